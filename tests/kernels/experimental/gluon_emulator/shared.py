"""Shared memory: rings of buffers, of which each is asked for, there, read, and free again, in this order."""

from typing import Any

import numpy as np

from tests.kernels.experimental.gluon_emulator.values import Hazard


class Buffer:
    """One stage of a ring: free, landing (the copy is under way), landed (to be read), or read."""

    def __init__(self, shape: list[int]):
        self.state, self.data = "free", np.full(shape, np.nan, np.float32)

    def become(self, before: str, after: str) -> None:
        if self.state != before:
            raise Hazard(f"a buffer that is {self.state} cannot become {after}: it must be {before}")
        self.state = after

    def ask(self) -> None:
        self.become("free", "landing")
        self.data[...] = np.nan

    def land(self, data: np.ndarray) -> None:
        self.become("landing", "landed")
        self.data[...] = data


class View:
    """A buffer, or its transpose."""

    def __init__(self, buffer: Buffer, transposed: bool = False):
        self.buffer, self.transposed = buffer, transposed

    def permute(self, order: list[int]) -> "View":
        assert order == [1, 0]
        return View(self.buffer, not self.transposed)

    def read(self) -> np.ndarray:
        return self.buffer.data.T if self.transposed else self.buffer.data


class Ring:
    """Shared memory of several stages: buffers, or their barriers."""

    def __init__(self, stages: list[Any], shape: list[int]):
        self.stages, self.shape = stages, shape

    def index(self, stage: Any) -> Any:
        one = self.stages[int(stage)]
        return View(one) if isinstance(one, Buffer) else one
