"""Triton for NVIDIA and ROCm: tokens to int8, then an integer product whose epilogue multiplies with the scales.

The product's sum is exact, so that tiles may depend on the number of tokens and the result does not.
"""

# Triton annotates neither constants passed to kernels nor reductions to scalars as what they are.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_kernels.backends import interpreting
from rl_kernels.quantize.kernel_math import int8_codes, magnitude_bits, scale_of

_WIDEST = 16384


@triton.jit
def tokens_kernel(
    x, codes, scales, features, row_stride, column_stride, half_range, WHOLE: tl.constexpr, BLOCK: tl.constexpr
):
    """One token's codes [features] and scale."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    source = x + row * row_stride
    if WHOLE:
        inside = column < features
        value = tl.load(source + column.to(tl.int64) * column_stride, mask=inside, other=0.0).to(tl.float32)
        peak = tl.max(magnitude_bits(value), 0)
        scale, finite = scale_of(peak, half_range)
        tl.store(codes + row * features + column, int8_codes(value, scale, finite), mask=inside)
    else:
        peak = tl.full([], 0, tl.int32)
        for first in range(0, features, BLOCK):
            at = first + column
            value = tl.load(source + at.to(tl.int64) * column_stride, mask=at < features, other=0.0).to(tl.float32)
            peak = tl.maximum(peak, tl.max(magnitude_bits(value), 0))
        scale, finite = scale_of(peak, half_range)
        for first in range(0, features, BLOCK):
            at = first + column
            value = tl.load(source + at.to(tl.int64) * column_stride, mask=at < features, other=0.0).to(tl.float32)
            tl.store(codes + row * features + at, int8_codes(value, scale, finite), mask=at < features)
    tl.store(scales + row, tl.where(finite, scale, float("nan")))


@triton.jit
def product_kernel(
    codes, weight, scales, weight_scale, bias, y, tokens, count, features, weight_row_stride, weight_column_stride,
    BIASED: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    # Some row blocks beside each other share the weights' tiles in the cache.
    program = tl.program_id(0)
    down, across = tl.cdiv(tokens, ROWS), tl.cdiv(count, COLUMNS)
    first = (program // (GROUP * across)) * GROUP
    height = tl.minimum(down - first, GROUP)
    row = (first + program % (GROUP * across) % height) * ROWS + tl.arange(0, ROWS)
    column = (program % (GROUP * across) // height) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, FEATURES)
    # Past the edges the last row is read again, and not written.
    a = codes + tl.minimum(row, tokens - 1).to(tl.int64)[:, None] * features + k[None, :]
    b = weight + tl.minimum(column, count - 1).to(tl.int64)[None, :] * weight_row_stride
    b += k.to(tl.int64)[:, None] * weight_column_stride
    total = tl.zeros([ROWS, COLUMNS], tl.int32)
    for start in range(0, features, FEATURES):
        rest = features - start
        left = tl.load(a, mask=k[None, :] < rest, other=0)
        right = tl.load(b, mask=k[:, None] < rest, other=0)
        total = tl.dot(left, right, total, out_dtype=tl.int32)
        a += FEATURES
        b += FEATURES * weight_column_stride
    factor = tl.load(scales + row, mask=row < tokens, other=0.0)[:, None]
    factor = factor * tl.load(weight_scale + column, mask=column < count, other=0.0)[None, :]
    value = total.to(tl.float32) * factor
    if BIASED:
        value += tl.load(bias + column, mask=column < count, other=0.0)[None, :]
    place = y + row.to(tl.int64)[:, None] * count + column[None, :]
    tl.store(place, value.to(y.dtype.element_ty), mask=(row < tokens)[:, None] & (column < count)[None, :])


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
    block = min(_WIDEST, triton.next_power_of_2(features))
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


_POINTERS = {"codes": "*i8", "weight": "*i8", "scales": "*fp32", "weight_scale": "*fp32", "bias": "*fp32"}


def _specialisation(function, dtype, constants, options):
    """What kernels/benchmarks/ahead_of_time.py compiles."""
    special = _POINTERS | {"x": f"*{dtype}", "y": f"*{dtype}", "half_range": "fp32"}
    constants = constants | {n: 1 for n in ("column_stride", "weight_column_stride") if n in function.arg_names}
    types = {name: special.get(name, "i32") for name in function.arg_names if name not in constants}
    multiples = ("features", "row_stride", "weight_row_stride", "count")
    aligned = tuple(n for n in types if n in multiples or (n in special and n != "half_range"))
    return function.__name__, types, constants, options | {"aligned": aligned}


def _product(tiles: Tiles, *, biased: bool = False):
    sizes = {"BIASED": biased, "GROUP": 8, "ROWS": tiles.rows, "COLUMNS": tiles.columns, "FEATURES": tiles.features}
    return _specialisation(
        product_kernel, "bf16", sizes, {"warps": tiles.warps, "stages": tiles.stages, "matrix": True}
    )


SPECIALISATIONS = {
    "tokens bf16": _specialisation(tokens_kernel, "bf16", {"WHOLE": True, "BLOCK": 4096}, {}),
    "tokens bf16, wide": _specialisation(tokens_kernel, "bf16", {"WHOLE": True, "BLOCK": _WIDEST}, {}),
    "tokens fp32, wider": _specialisation(tokens_kernel, "fp32", {"WHOLE": False, "BLOCK": _WIDEST}, {}),
    "product of many tokens": _product(MANY),
    "product of many tokens, bias": _product(MANY, biased=True),
    "product of 16 tokens": _product(FEW),
    "product of 64 tokens, bias": _product(tiles_for(64), biased=True),
}
