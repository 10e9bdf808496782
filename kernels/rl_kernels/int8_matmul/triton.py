"""Triton for NVIDIA and ROCm: tokens to int8, then an integer matmul whose epilogue multiplies with the scales.

The sum is exact: tiles depend on the number of tokens, the result does not.
"""

# Triton annotates neither constants passed to kernels nor reductions to scalars as what they are.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from rl_kernels.backends import interpreting
from rl_kernels.int8_matmul.triton_kernels import matmul_kernel, tokens_kernel

WIDEST = 16384


class Tiles(NamedTuple):
    """A tile's tokens (M), outputs (N) and inputs (K); warps; stages of the pipeline over K."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


# None was timed: no GPU was at hand. Few tokens: the matmul waits for the weights. Many: it computes.
FEW, MANY = Tiles(16, 64, 128, 4, 3), Tiles(128, 128, 64, 8, 3)


def tiles_for(tokens: int) -> Tiles:
    return FEW._replace(block_m=min(64, max(16, triton.next_power_of_2(tokens)))) if tokens <= 64 else MANY


def forward(
    x: Tensor, weight_q: Tensor, weight_scale: Tensor, bias: Tensor | None, half_range: float, y: Tensor
) -> None:
    """Write the result into ``y`` [M, N], contiguous."""
    tokens, in_features = x.shape
    out_features = len(weight_q)
    codes = torch.empty(tokens, in_features, dtype=torch.int8, device=x.device)
    scales = torch.empty(tokens, device=x.device)
    block = min(WIDEST, triton.next_power_of_2(in_features))
    tiles = tiles_for(tokens)
    # The interpreter cuts float32 off to bfloat16, where devices round.
    result = torch.empty_like(y, dtype=torch.float32) if interpreting() else y
    with torch.cuda.device_of(x):
        tokens_kernel[(tokens,)](
            x,
            codes,
            scales,
            in_features,
            *x.stride(),
            half_range,
            WHOLE=in_features <= block,
            BLOCK_K=block,
            num_warps=8,
        )
        matmul_kernel[(triton.cdiv(tokens, tiles.block_m) * triton.cdiv(out_features, tiles.block_n),)](
            codes, weight_q, scales, weight_scale, weight_scale if bias is None else bias, result, tokens, out_features,
            in_features, *weight_q.stride(), BIASED=bias is not None, GROUP=8, BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
    if result is not y:
        y.copy_(result)
