"""rl_fn's own functions: the definition that other backends are compared with."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

import rl_fn
from rl_kernels.quantize.scheme import Scheme


def forward(weights: list[Tensor], out: list[Tensor], scales: list[Tensor], scheme: Scheme) -> None:
    """Write codes into ``out`` and scales, shaped as rl_fn's, into ``scales``."""
    for weight, codes, scale in zip(weights, out, scales, strict=True):
        found = _function(scheme)(jnp.asarray(weight.float().cpu().numpy()))
        bits, factor = np.array(found.values).view(np.uint8), np.array(found.scale)
        if codes.dtype == torch.float8_e4m3fnuz:
            bits, factor = np.where(bits == 0x80, np.uint8(0), bits), factor * np.float32(2)
        codes.view(torch.uint8).copy_(torch.from_numpy(bits))
        scale.copy_(torch.from_numpy(factor))


@cache
def _function(scheme: Scheme):
    if scheme.name == "int8":
        axis = -1 if scheme.granularity == "channel" else None
        return jax.jit(partial(rl_fn.quantize_int8, axis=axis, half_range=scheme.largest))
    return jax.jit(partial(rl_fn.quantize_fp8, granularity=scheme.granularity, block=scheme.block))
