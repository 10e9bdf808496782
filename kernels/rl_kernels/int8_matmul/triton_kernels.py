"""The Triton kernels: tokens to int8, and the matmul of int8 matrices."""

# Triton annotates neither constants passed to kernels nor reductions to scalars as what they are.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

import triton
import triton.language as tl

from rl_kernels.quantize.triton_kernels import int8_codes, magnitude_bits, scale_of


@triton.jit
def tokens_kernel(
    x, codes, scales, in_features, row_stride, column_stride, half_range, WHOLE: tl.constexpr, BLOCK_K: tl.constexpr
):
    """One token's codes [in_features] and scale."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_K)
    source = x + row * row_stride
    if WHOLE:
        inside = column < in_features
        value = tl.load(source + column.to(tl.int64) * column_stride, mask=inside, other=0.0).to(tl.float32)
        peak = tl.max(magnitude_bits(value), 0)
        scale, finite = scale_of(peak, half_range)
        tl.store(codes + row * in_features + column, int8_codes(value, scale, finite), mask=inside)
    else:
        peak = tl.full([], 0, tl.int32)
        for first in range(0, in_features, BLOCK_K):
            at = first + column
            value = tl.load(source + at.to(tl.int64) * column_stride, mask=at < in_features, other=0.0).to(tl.float32)
            peak = tl.maximum(peak, tl.max(magnitude_bits(value), 0))
        scale, finite = scale_of(peak, half_range)
        for first in range(0, in_features, BLOCK_K):
            at = first + column
            value = tl.load(source + at.to(tl.int64) * column_stride, mask=at < in_features, other=0.0).to(tl.float32)
            tl.store(codes + row * in_features + at, int8_codes(value, scale, finite), mask=at < in_features)
    tl.store(scales + row, tl.where(finite, scale, float("nan")))


@triton.jit
def matmul_kernel(
    codes, weight, scales, weight_scale, bias, y, tokens, out_features, in_features, weight_row_stride,
    weight_column_stride, BIASED: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # GROUP neighbouring blocks of tokens share tiles of the weight in the cache.
    program = tl.program_id(0)
    down, across = tl.cdiv(tokens, BLOCK_M), tl.cdiv(out_features, BLOCK_N)
    first = (program // (GROUP * across)) * GROUP
    height = tl.minimum(down - first, GROUP)
    row = (first + program % (GROUP * across) % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (program % (GROUP * across) // height) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Past the edges the last row is read again; its result is not written.
    a = codes + tl.minimum(row, tokens - 1).to(tl.int64)[:, None] * in_features + k[None, :]
    b = weight + tl.minimum(column, out_features - 1).to(tl.int64)[None, :] * weight_row_stride
    b += k.to(tl.int64)[:, None] * weight_column_stride
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for start in range(0, in_features, BLOCK_K):
        rest = in_features - start
        left = tl.load(a, mask=k[None, :] < rest, other=0)
        right = tl.load(b, mask=k[:, None] < rest, other=0)
        total = tl.dot(left, right, total, out_dtype=tl.int32)
        a += BLOCK_K
        b += BLOCK_K * weight_column_stride
    factor = tl.load(scales + row, mask=row < tokens, other=0.0)[:, None]
    factor = factor * tl.load(weight_scale + column, mask=column < out_features, other=0.0)[None, :]
    value = total.to(tl.float32) * factor
    if BIASED:
        value += tl.load(bias + column, mask=column < out_features, other=0.0)[None, :]
    place = y + row.to(tl.int64)[:, None] * out_features + column[None, :]
    tl.store(place, value.to(y.dtype.element_ty), mask=(row < tokens)[:, None] & (column < out_features)[None, :])
