"""What every kernel finds in ``gl``, for one program of a grid, and the launch of all of them."""

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.kernels.experimental.gluon_emulator.shared import Buffer, Ring
from tests.kernels.experimental.gluon_emulator.values import Hazard, Pointer, Tensor, tensor


class Program:
    """The names that a kernel finds in ``gl`` and beside it; MODULES are names of modules whose names are here, too."""

    MODULES: tuple[str, ...] = ("gl", "tl")
    int32, int64, float32 = np.int32, np.int64, np.float32
    exp, abs, max, sum = np.exp, np.abs, np.fmax.reduce, staticmethod(np.sum)
    static_range, constexpr = range, object

    def __init__(self, number: int, warps: int, names: Any):
        self.number, self.warps, self.names = number, warps, names
        self.buffers: list[Buffer] = []

    def __getattr__(self, name: str) -> Any:
        if not name.endswith("Layout"):
            raise AttributeError(f"{type(self).__name__} emulates no {name}")
        return self.names.get(name) or getattr(self.names["gl"], name)

    def num_warps(self):
        return self.warps

    def program_id(self, axis):
        return tensor(self.number)

    def static_assert(self, holds):
        assert holds

    def cdiv(self, a, b):
        return (tensor(a) + (b - 1)) // b

    def arange(self, start, stop, *, layout):
        assert layout is not None
        return np.arange(start, stop, dtype=np.int32).view(Tensor)

    def full(self, shape, value, dtype, *, layout):
        assert layout is not None
        return np.full(shape, value, dtype).view(Tensor)

    def convert_layout(self, x, layout):
        assert layout is not None
        return x.copy()

    def where(self, condition, a, b):
        return np.where(condition, tensor(a), tensor(b)).view(Tensor)

    def minimum(self, a, b):
        return np.fmin(tensor(a), tensor(b))

    def maximum(self, a, b):
        return np.fmax(tensor(a), tensor(b))

    def load(self, pointer):
        return pointer.load()

    def store(self, pointer, value, mask):
        pointer.store(value, mask)

    def allocate_shared_memory(self, dtype, shape, layout):
        assert layout is not None
        made = [Buffer(shape[1:]) for _ in range(shape[0])]
        self.buffers += made
        return Ring(made, shape)

    def ended(self):
        """Whether the program may end."""
        if any(buffer.state == "landing" for buffer in self.buffers):
            raise Hazard("the program ends while a copy is under way")


class Emulated:
    """A Gluon kernel to be launched as ``kernel[grid](…)``; counts its programs."""

    def __init__(self, kernel: Any, program: type[Program]):
        self.function, self.program, self.programs = kernel.fn, program, 0

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*arguments, num_warps, **constants):
            for number in range(grid[0]):
                program = self.program(number, num_warps, self.function.__globals__)
                rebound(self.function, program)(*map(argument, arguments), **constants)
                program.ended()
                self.programs += 1

        return launch


def argument(x: Any) -> Any:
    """What a kernel sees of what it is launched with."""
    if isinstance(x, torch.Tensor):
        return Pointer(x)
    if isinstance(x, int | float):
        return tensor(x)
    from tests.kernels.experimental.gluon_emulator.hopper import Described

    return Described(x)


def rebound(function: Any, program: Program) -> Callable[..., Any]:
    """The function's own code, and that of kernels' functions that it calls, with the program's names."""
    names: dict[str, Any] = dict.fromkeys(program.MODULES, program)
    for name in function.__code__.co_names:
        found = function.__globals__.get(name)
        if name not in names and found is not None:
            names[name] = rebound(found.fn, program) if hasattr(found, "fn") else getattr(program, name)
    return types.FunctionType(function.__code__, {"__builtins__": __builtins__, **names}, function.__name__)
