"""The Triton kernels."""

import triton
import triton.language as tl

from rl_kernels.common.triton_helpers import absorbed, kept_bits, softcap_slope, softcapped


@triton.jit
def forward_kernel(
    logits,
    inverse,
    kept,
    mask,
    entropy,
    logsumexp,
    vocabulary,
    row_stride,
    column_stride,
    kept_stride,
    softcap,
    CAPPED: tl.constexpr,
    KEPT: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if MASKED:
        if tl.load(mask + row) == 0:
            tl.store(entropy + row, 0.0)
            tl.store(logsumexp + row, 0.0)
            return
    scale = tl.load(inverse + row)
    maximum = tl.full([], float("-inf"), scale.dtype)
    total = tl.full([], 0.0, scale.dtype)
    weighted = tl.full([], 0.0, scale.dtype)
    for first in range(0, vocabulary, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < vocabulary
        z = tl.load(logits + row * row_stride + column.to(tl.int64) * column_stride, mask=inside, other=float("-inf"))
        z = z.to(scale.dtype)
        possible = z != float("-inf")
        if KEPT:
            possible = possible & kept_bits(kept + row * kept_stride, column, inside)
        x = softcapped(tl.where(possible, z, 0.0), softcap, CAPPED) * scale
        maximum, total, weighted = absorbed(x, possible, maximum, total, weighted)
    safe = tl.where(total == 0, 1.0, total)
    log_total = tl.log(safe)
    tl.store(logsumexp + row, maximum + log_total)
    tl.store(entropy + row, log_total - weighted / safe)


@triton.jit
def backward_kernel(
    logits,
    gradient,
    inverse,
    kept,
    mask,
    a,
    b,
    logsumexp,
    vocabulary,
    row_stride,
    column_stride,
    gradient_row_stride,
    gradient_column_stride,
    kept_stride,
    softcap,
    CAPPED: tl.constexpr,
    KEPT: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocabulary
    out = gradient + row * gradient_row_stride + column.to(tl.int64) * gradient_column_stride
    if MASKED:
        if tl.load(mask + row) == 0:
            tl.store(out, tl.zeros([BLOCK], gradient.dtype.element_ty), mask=inside)
            return
    scale = tl.load(inverse + row)
    z = tl.load(logits + row * row_stride + column.to(tl.int64) * column_stride, mask=inside, other=float("-inf"))
    z = z.to(scale.dtype)
    possible = z != float("-inf")
    if KEPT:
        possible = possible & kept_bits(kept + row * kept_stride, column, inside)
    z = tl.where(possible, z, 0.0)
    log_p = tl.where(possible, softcapped(z, softcap, CAPPED) * scale - tl.load(logsumexp + row), 0.0)
    dx = tl.exp(log_p) * (tl.load(a + row) + tl.load(b + row) * log_p) * scale * softcap_slope(z, softcap, CAPPED)
    tl.store(out, tl.where(possible, dx, 0.0).to(gradient.dtype.element_ty), mask=inside)
