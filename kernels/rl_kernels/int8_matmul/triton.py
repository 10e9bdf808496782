"""Triton for NVIDIA and ROCm: tokens to int8, then an integer product whose epilogue multiplies with the scales.

The product's sum is exact, so that tiles may depend on the number of tokens and the result does not.
"""

# Triton annotates neither constants passed to kernels nor reductions to scalars as what they are.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from rl_kernels.backends import interpreting
from rl_kernels.int8_matmul.triton_kernels import product_kernel, tokens_kernel

WIDEST = 16384


class Tiles(NamedTuple):
    """Rows, columns and features of a tile; warps; stages of the pipeline over the features."""

    rows: int
    columns: int
    features: int
    warps: int
    stages: int


# None was timed: no GPU was at hand. Few tokens first: their product waits for the weights.
FEW, MANY = Tiles(16, 64, 128, 4, 3), Tiles(128, 128, 64, 8, 3)


def tiles_for(tokens: int) -> Tiles:
    return FEW._replace(rows=min(64, max(16, triton.next_power_of_2(tokens)))) if tokens <= 64 else MANY


def forward(
    x: Tensor, weight_q: Tensor, weight_scale: Tensor, bias: Tensor | None, half_range: float, y: Tensor
) -> None:
    """Write the product into ``y`` [M, N], contiguous."""
    tokens, features = x.shape
    count = len(weight_q)
    codes = torch.empty(tokens, features, dtype=torch.int8, device=x.device)
    scales = torch.empty(tokens, device=x.device)
    block = min(WIDEST, triton.next_power_of_2(features))
    tiles = tiles_for(tokens)
    # The interpreter cuts float32 off to bfloat16, where devices round.
    result = torch.empty_like(y, dtype=torch.float32) if interpreting() else y
    with torch.cuda.device_of(x):
        tokens_kernel[(tokens,)](
            x, codes, scales, features, *x.stride(), half_range, WHOLE=features <= block, BLOCK=block, num_warps=8
        )
        product_kernel[(triton.cdiv(tokens, tiles.rows) * triton.cdiv(count, tiles.columns),)](
            codes, weight_q, scales, weight_scale, weight_scale if bias is None else bias, result, tokens, count,
            features, *weight_q.stride(), BIASED=bias is not None, GROUP=8, ROWS=tiles.rows, COLUMNS=tiles.columns,
            FEATURES=tiles.features, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
    if result is not y:
        y.copy_(result)
