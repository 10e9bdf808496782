"""What the backends are told, and which scales a weight has."""

from typing import NamedTuple

import torch

FP8_MAX = 448.0
SMALLEST_SCALE = 2.0**-23
"""Takes the place of a scale of 0, as in rl_fn."""
OUT_DTYPES = {"int8": (torch.int8,), "fp8": (torch.float8_e4m3fn, torch.float8_e4m3fnuz)}
GRANULARITIES = {"int8": ("tensor", "channel"), "fp8": ("tensor", "channel", "block")}


class Scheme(NamedTuple):
    """``name`` "int8" or "fp8"; "tensor", "channel" or "block"; side of a block; what the largest magnitude becomes."""

    name: str
    granularity: str
    block: int
    largest: float

    @property
    def bounds(self) -> tuple[float, float]:
        return (-128.0, 127.0) if self.name == "int8" else (-FP8_MAX, FP8_MAX)

    def scale_shape(self, shape: torch.Size) -> tuple[int, ...]:
        """Of a weight's scales, as rl_fn has it: an int8 stack "tensor" has one scale, an fp8 stack one a matrix."""
        if self.granularity == "channel":
            return (*shape[:-1], 1)
        if self.granularity == "block":
            return (*shape[:-2], *(-(-size // self.block) for size in shape[-2:]))
        return (1,) * len(shape) if self.name == "int8" else (*shape[:-2], 1, 1)
