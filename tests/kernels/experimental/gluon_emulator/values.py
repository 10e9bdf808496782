"""What kernels compute with: arrays, and addresses in a tensor's memory."""

import types
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
        self.dtype = types.SimpleNamespace(element_ty=memory.dtype)

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

    def load(self, mask: Any = True) -> Tensor:
        """Zeros where the mask is False."""
        used = self.checked(mask)
        values = self.flat()[torch.from_numpy(np.where(used, self.offset, 0))]
        values = values.float() if values.is_floating_point() else values
        return np.where(used, values.numpy(), 0).astype(values.numpy().dtype).view(Tensor)

    def store(self, value: Any, mask: Any) -> None:
        used = self.checked(mask)
        where, value = (np.asarray(np.broadcast_to(x, used.shape)[used]) for x in (self.offset, value))
        self.flat()[torch.from_numpy(where)] = torch.from_numpy(value).to(self.memory.dtype)
