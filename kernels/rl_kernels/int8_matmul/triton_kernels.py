"""The Triton kernels."""

# Triton annotates neither constants passed to kernels nor reductions to scalars as what they are.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

import triton
import triton.language as tl

from rl_kernels.quantize.triton_kernels import int8_codes, magnitude_bits, scale_of


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
