"""The Gluon operations that our Hopper kernel uses, in NumPy: its own source runs here, program by program.

Layouts must be given and are ignored. A TMA copy lands when its barrier's phase is waited for, a matrix product when it
is waited for. `Hazard` is raised by a buffer that is read before it landed or overwritten before the products that read
it are done, a wait for a phase that is not the next, bytes that a barrier does not expect, and a copy that nobody waits
for. One program is one thread here: what threads and the hardware's units owe to each other is not emulated.
"""

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


class Hazard(Exception):
    """What would read garbage or hang on a GPU."""


class Tensor(np.ndarray):
    """An array that stays one at rank 0, with the methods that kernels call."""

    def to(self, dtype):
        return self.astype(dtype)

    def permute(self, order):
        return np.transpose(self, order)

    def split(self):
        return self[..., 0], self[..., 1]


def tensor(x: Any) -> Tensor:
    """Python numbers are int32 and float32, as in Triton."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, bool | np.bool_):
        return np.asarray(x).view(Tensor)
    if isinstance(x, int):
        return np.asarray(x, np.int32 if -(2**31) <= x < 2**31 else np.int64).view(Tensor)
    return np.asarray(x, np.float32 if isinstance(x, float) else None).view(Tensor)


class Pointer:
    """An address in a torch tensor's memory; offsets are added in int64, and must stay inside where they are used."""

    def __init__(self, memory: torch.Tensor, offset: Any = 0):
        self.memory, self.offset = memory, tensor(offset).astype(np.int64)

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, self.offset + tensor(offset).astype(np.int64))

    def flat(self) -> torch.Tensor:
        span = 1 + sum((n - 1) * s for n, s in zip(self.memory.shape, self.memory.stride(), strict=True))
        return self.memory.detach().as_strided((span,), (1,))

    def checked(self, mask: Any) -> np.ndarray:
        offset, used = np.broadcast_arrays(self.offset, mask)
        if used.any() and (offset[used].min() < 0 or offset[used].max() >= len(self.flat())):
            raise Hazard(f"offsets {offset[used].min()} … {offset[used].max()} in {len(self.flat())} elements")
        return used


class Buffer:
    """One stage of a ring: free, landing (the copy is under way), landed (to be read), or read (a product reads it)."""

    def __init__(self, shape: list[int]):
        self.state, self.data = "free", np.full(shape, np.nan, np.float32)

    def become(self, before: str, after: str):
        if self.state != before:
            raise Hazard(f"a buffer that is {self.state} cannot become {after}: it must be {before}")
        self.state = after


class View:
    def __init__(self, buffer: Buffer, transposed: bool = False):
        self.buffer, self.transposed = buffer, transposed

    def permute(self, order: list[int]) -> "View":
        assert order == [1, 0]
        return View(self.buffer, not self.transposed)

    def read(self) -> np.ndarray:
        return self.buffer.data.T if self.transposed else self.buffer.data


class Barrier:
    """Phases completed and waited for; what the phase under way still expects."""

    def __init__(self):
        self.count, self.completed, self.waited, self.expected = 0, 0, 0, 0
        self.copies: list[tuple[Buffer, np.ndarray]] = []

    def expect(self, size: int):
        if self.count != 1 or self.expected or self.completed != self.waited:
            raise Hazard("a barrier that is not initialised, or whose last phase was not waited for")
        self.expected = size

    def deliver(self, size: int, buffer: Buffer, data: np.ndarray):
        if size > self.expected:
            raise Hazard(f"{size} bytes where {self.expected} are expected")
        buffer.become("free", "landing")
        buffer.data[...] = np.nan
        self.copies.append((buffer, data))
        self.expected -= size
        self.completed += self.expected == 0

    def wait(self, phase: int):
        if self.completed == self.waited:
            raise Hazard("a wait for a phase that never completes")
        if (self.completed - 1) % 2 != phase:
            raise Hazard(f"a wait for parity {phase} in phase {self.completed - 1}")
        self.waited = self.completed
        for buffer, data in self.copies:
            buffer.become("landing", "landed")
            buffer.data[...] = data
        self.copies = []


class Ring:
    """Shared memory of several stages: buffers, or their barriers."""

    def __init__(self, stages: list[Any]):
        self.stages = stages

    def index(self, stage: Any) -> Any:
        one = self.stages[int(stage)]
        return View(one) if isinstance(one, Buffer) else one


class Product:
    """An accumulator with products under way: it may be accumulated into and waited for, and nothing else."""

    def __init__(self, total: np.ndarray):
        self.total, self.under_way = total, []

    def wait(self, outstanding: int) -> "Product | Tensor":
        while len(self.under_way) > outstanding:
            a, b = self.under_way.pop(0)
            self.total = self.total + a.read() @ b.read()
            for view in (a, b):
                view.buffer.become("read", "free")
        return self if self.under_way else self.total.view(Tensor)


class Described:
    """What a kernel sees of a TensorDescriptor."""

    def __init__(self, descriptor: Any):
        self.host, self.layout = descriptor, descriptor.layout
        self.block_type = types.SimpleNamespace(shape=descriptor.block_shape)
        self.dtype = descriptor.base.dtype

    def tile(self, coordinates: list[Any]) -> np.ndarray:
        """Zeros where the block lies outside."""
        memory = self.host.base.detach().as_strided(self.host.shape, self.host.strides)
        block = np.zeros(self.host.block_shape, np.float32)
        first = [int(c) for c in coordinates]
        assert min(first) >= 0
        part = memory[tuple(slice(f, f + n) for f, n in zip(first, block.shape, strict=True))].float().numpy()
        block[: part.shape[0], : part.shape[1]] = part
        return block


class Program:
    """The names that a kernel finds in ``gl``, ``mbarrier`` and beside them, for one program of a grid."""

    int32, int64, float32 = np.int32, np.int64, np.float32
    exp, abs, max, sum = np.exp, np.abs, np.fmax.reduce, staticmethod(np.sum)
    static_range, constexpr = range, object

    def __init__(self, number: int, warps: int, layouts: Any):
        self.number, self.warps = number, warps
        self.shared: list[Barrier | Buffer] = []
        self.NVMMADistributedLayout, self.SliceLayout = layouts.NVMMADistributedLayout, layouts.SliceLayout

    def MBarrierLayout(self):
        return "barriers"

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

    def load(self, pointer, mask=True):
        pointer.checked(mask)
        assert mask is True
        values = pointer.flat()[torch.from_numpy(np.asarray(pointer.offset))]
        values = values.float() if values.is_floating_point() else values
        return values.numpy().view(Tensor)

    def store(self, pointer, value, mask):
        used = pointer.checked(mask)
        where, value = (np.asarray(np.broadcast_to(x, used.shape)[used]) for x in (pointer.offset, value))
        pointer.flat()[torch.from_numpy(where)] = torch.from_numpy(value).to(pointer.memory.dtype)

    def allocate_shared_memory(self, dtype, shape, layout):
        assert layout is not None
        made = [Barrier() if layout == "barriers" else Buffer(shape[1:]) for _ in range(shape[0])]
        self.shared += made
        return Ring(made)

    def init(self, barrier, count):
        barrier.count = count

    def expect(self, barrier, size, pred):
        if pred:
            barrier.expect(int(size))

    def wait(self, barrier, phase):
        barrier.wait(int(phase))

    def load_tile(self, described, coordinates, barrier, view, pred):
        if pred:
            size = int(np.prod(described.block_type.shape)) * described.dtype.itemsize
            barrier.deliver(size, view.buffer, described.tile(coordinates))

    def fence_async_shared(self):
        pass

    def warpgroup_mma(self, a, b, total, *, is_async):
        assert is_async
        for view in (a, b):
            view.buffer.become("landed", "read")
        product = total if isinstance(total, Product) else Product(total)
        product.under_way.append((a, b))
        return product

    def warpgroup_mma_wait(self, outstanding, deps):
        (product,) = deps
        return product.wait(outstanding) if isinstance(product, Product) else product

    def ended(self):
        for one in self.shared:
            if one.state != "free" if isinstance(one, Buffer) else one.completed != one.waited or one.expected:
                raise Hazard("the program ends while a copy is under way or before it was read")


class Emulated:
    """A Gluon kernel to be launched as ``kernel[grid](…)``; counts its programs."""

    def __init__(self, kernel: Any, layouts: Any):
        self.function, self.layouts, self.programs = kernel.fn, layouts, 0

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*arguments, num_warps, **constants):
            for number in range(grid[0]):
                program = Program(number, num_warps, self.layouts)
                rebound(self.function, program)(*map(argument, arguments), **constants)
                program.ended()
                self.programs += 1

        return launch


def argument(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return Pointer(x)
    return tensor(x) if isinstance(x, int | float) else Described(x)


def rebound(function: Any, program: Program) -> Callable[..., Any]:
    """The function's own code, and that of kernels' functions that it calls, with the program's names."""
    names: dict[str, Any] = dict.fromkeys(("gl", "tl", "mbarrier"), program)
    for name in function.__code__.co_names:
        found = function.__globals__.get(name)
        if name not in names and found is not None:
            names[name] = rebound(found.fn, program) if hasattr(found, "fn") else getattr(program, name)
    return types.FunctionType(function.__code__, {"__builtins__": __builtins__, **names}, function.__name__)
