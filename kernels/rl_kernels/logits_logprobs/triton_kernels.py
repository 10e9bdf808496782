"""The Triton kernels: logits to entropy and logsumexp, and logits to their gradient."""

import triton
import triton.language as tl

from rl_kernels.common.triton_helpers import absorbed, allowed_bits, softcap_slope, softcapped


@triton.jit
def forward_kernel(
    logits,
    inv_temperature,
    allowed,
    mask,
    entropy,
    logsumexp,
    vocab_size,
    row_stride,
    column_stride,
    allowed_stride,
    softcap,
    CAPPED: tl.constexpr,
    ALLOWED: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if MASKED:
        if tl.load(mask + row) == 0:
            tl.store(entropy + row, 0.0)
            tl.store(logsumexp + row, 0.0)
            return
    scale = tl.load(inv_temperature + row)
    maximum = tl.full([], float("-inf"), scale.dtype)
    total = tl.full([], 0.0, scale.dtype)
    weighted = tl.full([], 0.0, scale.dtype)
    for first in range(0, vocab_size, BLOCK_N):
        column = first + tl.arange(0, BLOCK_N)
        inside = column < vocab_size
        z = tl.load(logits + row * row_stride + column.to(tl.int64) * column_stride, mask=inside, other=float("-inf"))
        z = z.to(scale.dtype)
        possible = z != float("-inf")
        if ALLOWED:
            possible = possible & allowed_bits(allowed + row * allowed_stride, column, inside)
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
    inv_temperature,
    allowed,
    mask,
    a,
    b,
    logsumexp,
    vocab_size,
    row_stride,
    column_stride,
    gradient_row_stride,
    gradient_column_stride,
    allowed_stride,
    softcap,
    CAPPED: tl.constexpr,
    ALLOWED: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < vocab_size
    out = gradient + row * gradient_row_stride + column.to(tl.int64) * gradient_column_stride
    if MASKED:
        if tl.load(mask + row) == 0:
            tl.store(out, tl.zeros([BLOCK_N], gradient.dtype.element_ty), mask=inside)
            return
    scale = tl.load(inv_temperature + row)
    z = tl.load(logits + row * row_stride + column.to(tl.int64) * column_stride, mask=inside, other=float("-inf"))
    z = z.to(scale.dtype)
    possible = z != float("-inf")
    if ALLOWED:
        possible = possible & allowed_bits(allowed + row * allowed_stride, column, inside)
    z = tl.where(possible, z, 0.0)
    log_p = tl.where(possible, softcapped(z, softcap, CAPPED) * scale - tl.load(logsumexp + row), 0.0)
    dx = tl.exp(log_p) * (tl.load(a + row) + tl.load(b + row) * log_p) * scale * softcap_slope(z, softcap, CAPPED)
    tl.store(out, tl.where(possible, dx, 0.0).to(gradient.dtype.element_ty), mask=inside)
