"""Blackwell's products, whose sums are in tensor memory and whose end barriers wait for."""

from functools import partial

import numpy as np

from tests.kernels.experimental.gluon_emulator.hopper import Barrier, Copying
from tests.kernels.experimental.gluon_emulator.shared import Ring, View
from tests.kernels.experimental.gluon_emulator.values import Hazard, Tensor


class Sums:
    """A tile of tensor memory: garbage until a product is done; how many are under way; whether a thread may read."""

    def __init__(self, shape: list[int]):
        self.data, self.under_way, self.read = np.full(shape, np.nan, np.float32), 0, False

    def slice(self, first: int, length: int) -> "Columns":
        return Columns(self, first, length)


class Columns:
    """Some columns of a tile."""

    def __init__(self, sums: Sums, first: int, length: int):
        assert first + length <= sums.data.shape[1]
        self.sums, self.columns = sums, slice(first, first + length)

    def load(self, layout) -> Tensor:
        assert layout is not None
        if self.sums.under_way:
            raise Hazard("sums are read while a product into them is under way")
        self.sums.read = True
        return self.sums.data[:, self.columns].copy().view(Tensor)


class Blackwell(Copying):
    """Products are done in the order in which they are begun, and as late as a wait allows."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.memory: list[Sums] = []
        self.under_way: list[tuple[View, View, Sums, bool]] = []
        self.begun = self.done = 0

    def allocate_tensor_memory(self, dtype, shape, layout):
        assert layout is not None and np.prod(shape) <= 128 * 512
        self.memory = [Sums(shape[1:]) for _ in range(shape[0])]
        return Ring(self.memory, shape)

    def barrier(self):
        for sums in self.memory:
            sums.read = False

    def tcgen05_mma(self, a, b, sums, *, use_acc, mbarriers):
        for view in (a, b):
            view.buffer.become("landed", "read")
        if sums.read:
            raise Hazard("a product into sums that another thread may still have to read")
        sums.under_way += 1
        self.under_way.append((a, b, sums, bool(use_acc)))
        self.begun += 1
        for barrier in mbarriers:
            self.tcgen05_commit(barrier)

    def tcgen05_commit(self, barrier: Barrier):
        """The barrier's phase ends with the last product begun."""
        barrier.begin()
        barrier.effects.append(partial(self.finalize_row_state, self.begun))
        barrier.completed += 1

    def finalize_row_state(self, number: int):
        while self.done < number:
            a, b, sums, allowed = self.under_way.pop(0)
            sums.data = a.read() @ b.read() + (sums.data if allowed else 0)
            sums.under_way -= 1
            for view in (a, b):
                view.buffer.become("read", "free")
            self.done += 1

    def ended(self):
        super().ended()
        if self.under_way:
            raise Hazard("the program ends while a product is under way")
