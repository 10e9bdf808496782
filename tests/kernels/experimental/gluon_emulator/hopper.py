"""TMA and barriers, and Hopper's products of warpgroups."""

import types
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tests.kernels.experimental.gluon_emulator.program import Program
from tests.kernels.experimental.gluon_emulator.shared import Ring, View
from tests.kernels.experimental.gluon_emulator.values import Hazard, Tensor


class Barrier:
    """Phases completed and waited for; what the phase under way still expects, and what its end brings about."""

    def __init__(self):
        self.count, self.completed, self.waited, self.expected = 0, 0, 0, 0
        self.effects: list[Callable[[], None]] = []

    def begin(self) -> None:
        if self.count != 1 or self.expected or self.completed != self.waited:
            raise Hazard("a barrier that is not initialised, or whose last phase was not waited for")

    def expect(self, size: int) -> None:
        self.begin()
        self.expected = size

    def deliver(self, size: int, effect: Callable[[], None]) -> None:
        if size > self.expected:
            raise Hazard(f"{size} bytes where {self.expected} are expected")
        self.effects.append(effect)
        self.expected -= size
        self.completed += self.expected == 0

    def wait(self, phase: int) -> None:
        if self.completed == self.waited:
            raise Hazard("a wait for a phase that never completes")
        if (self.completed - 1) % 2 != phase:
            raise Hazard(f"a wait for parity {phase} in phase {self.completed - 1}")
        self.waited = self.completed
        for effect in self.effects:
            effect()
        self.effects = []


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


class Copying(Program):
    """Copies by TMA that barriers wait for."""

    MODULES = (*Program.MODULES, "mbarrier")

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.barriers: list[Barrier] = []

    def MBarrierLayout(self):
        return "barriers"

    def allocate_shared_memory(self, dtype, shape, layout):
        if layout != "barriers":
            return super().allocate_shared_memory(dtype, shape, layout)
        made = [Barrier() for _ in range(shape[0])]
        self.barriers += made
        return Ring(made, shape)

    def init(self, barrier, count):
        barrier.count = count

    def expect(self, barrier, size, pred):
        if pred:
            barrier.expect(int(size))

    def wait(self, barrier, phase):
        barrier.wait(int(phase))

    def load_tile(self, described: Described, coordinates: list[Any], barrier: Barrier, view: View, pred: bool):
        if pred:
            view.buffer.ask()
            size = int(np.prod(described.block_type.shape)) * described.dtype.itemsize
            barrier.deliver(size, partial(view.buffer.land, described.tile(coordinates)))

    def fence_async_shared(self):
        pass

    def ended(self):
        super().ended()
        if any(barrier.expected for barrier in self.barriers) or any(b.state != "free" for b in self.buffers):
            raise Hazard("the program ends before a copy is complete or its tile was read")


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


class Hopper(Copying):
    """Products of warpgroups, whose sums are in registers."""

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
