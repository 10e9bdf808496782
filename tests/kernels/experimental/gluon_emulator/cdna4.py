"""CDNA4's copies into the LDS, in groups that are waited for in order, and its products."""

from typing import Any

import numpy as np

from tests.kernels.experimental.gluon_emulator.program import Program
from tests.kernels.experimental.gluon_emulator.shared import Buffer, View
from tests.kernels.experimental.gluon_emulator.values import Hazard, Pointer

# Bytes that a lane copies at once.
WIDTH = 16


class CDNA4(Program):
    """A wait is for this wave's copies and then for every wave: what was read before it may be overwritten after it."""

    MODULES = (*Program.MODULES, "async_copy")

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.copies: list[tuple[Buffer, np.ndarray]] = []
        self.groups: list[list[tuple[Buffer, np.ndarray]]] = []

    def global_load_to_shared(self, view: View, pointers: Pointer, mask: Any = None, other: Any = None):
        shape = view.buffer.data.shape
        used = np.broadcast_to(True if mask is None else mask, shape)
        offset = np.broadcast_to(pointers.offset, shape)
        size = pointers.memory.element_size()
        lanes = (*shape[:-1], -1, WIDTH // size)
        first = offset.reshape(lanes)[..., :1]
        if (offset.reshape(lanes) != first + np.arange(WIDTH // size)).any():
            raise Hazard("a lane's elements do not lie together")
        if ((first * size + pointers.memory.data_ptr()) % WIDTH).any():
            raise Hazard("a lane's elements begin at no multiple of their bytes")
        if (used.reshape(lanes) != used.reshape(lanes)[..., :1]).any():
            raise Hazard("a mask that takes some of a lane's elements")
        assert other == 0.0 or mask is None
        view.buffer.ask()
        self.copies.append((view.buffer, pointers.load(used)))

    def buffer_load_to_shared(self, view: View, base: Pointer, offsets: Any, mask: Any = None, other: Any = None):
        if offsets.dtype != np.int32 or offsets.min() < 0 or (2 * offsets.astype(np.int64)).max() >= 2**31:
            raise Hazard("offsets that 31 bits of bytes do not hold")
        self.global_load_to_shared(view, base + offsets, mask, other)

    def commit_group(self):
        self.groups.append(self.copies)
        self.copies = []

    def wait_group(self, outstanding: int):
        assert not self.copies
        for buffer in self.buffers:
            if buffer.state == "read":
                buffer.become("read", "free")
        while len(self.groups) > outstanding:
            for buffer, data in self.groups.pop(0):
                buffer.land(data)

    def load_shared_relaxed(self, view: View, layout: Any):
        assert layout is not None
        view.buffer.become("landed", "read")
        return view.read()

    def mfma(self, a: np.ndarray, b: np.ndarray, total: np.ndarray):
        return total + a @ b
