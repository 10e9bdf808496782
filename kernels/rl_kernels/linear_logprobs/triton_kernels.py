"""The Triton kernels: logits to row states, and logits to their gradient."""

import triton
import triton.language as tl

from rl_kernels.common.triton_helpers import absorbed, softcap_slope, softcapped


# The width of a block is specialised: where it is a multiple of 16, a thread loads and stores several numbers at once.
@triton.jit(do_not_specialize=["start", "target_count"])
def state_kernel(
    logits,
    allowed,
    bias,
    tokens,
    inv_temperature,
    maximum,
    total,
    weighted,
    targets,
    start,
    vocab,
    row_stride,
    allowed_row_stride,
    allowed_stride,
    bias_stride,
    target_count,
    softcap,
    BIASED: tl.constexpr,
    CAPPED: tl.constexpr,
    ALLOWED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Take a block of logits, whose first token is ``start``, into the rows' states: one row a program."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(inv_temperature + row)
    m, s, u = tl.load(maximum + row), tl.load(total + row), tl.load(weighted + row)
    z_row, allowed_row = logits + row * row_stride, allowed + row * allowed_row_stride
    for first in range(0, vocab, BLOCK_N):
        column = (first + tl.arange(0, BLOCK_N)).to(tl.int64)
        inside = column < vocab
        z = tl.load(z_row + column, mask=inside, other=float("-inf"))
        if BIASED:
            z += tl.load(bias + column * bias_stride, mask=inside, other=0.0).to(z.dtype)
        possible = z != float("-inf")
        if ALLOWED:
            possible = possible & (tl.load(allowed_row + column * allowed_stride, mask=inside, other=0) != 0)
        x = softcapped(tl.where(possible, z, 0.0), softcap, CAPPED) * scale
        m, s, u = absorbed(x, possible, m, s, u)
    # A maximum ignores NaN; a sum does not.
    tl.store(maximum + row, tl.where(s == s, m, s))
    tl.store(total + row, s)
    tl.store(weighted + row, u)
    for k in range(target_count):
        token = tl.load(tokens + row * target_count + k) - start
        if (token >= 0) & (token < vocab):
            z = tl.load(z_row + token)
            if BIASED:
                z += tl.load(bias + token * bias_stride).to(z.dtype)
            possible = z != float("-inf")
            if ALLOWED:
                possible = possible & (tl.load(allowed_row + token * allowed_stride) != 0)
            x = softcapped(tl.where(possible, z, 0.0), softcap, CAPPED) * scale
            tl.store(targets + row * target_count + k, tl.where(possible, x, float("-inf")))


@triton.jit(do_not_specialize=["target_count"])
def dlogits_kernel(
    logits,
    gradient,
    allowed,
    bias,
    tokens,
    own,
    inv_temperature,
    a,
    b,
    base,
    vocab,
    row_stride,
    gradient_row_stride,
    allowed_row_stride,
    allowed_stride,
    bias_stride,
    target_count,
    softcap,
    BIASED: tl.constexpr,
    CAPPED: tl.constexpr,
    ALLOWED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dL/dlogits of a block, BLOCK_N logits of a row a program; ``gradient`` may be the logits' own memory."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < vocab
    scale = tl.load(inv_temperature + row)
    z = tl.load(logits + row * row_stride + column, mask=inside, other=float("-inf"))
    if BIASED:
        z += tl.load(bias + column.to(tl.int64) * bias_stride, mask=inside, other=0.0).to(z.dtype)
    possible = z != float("-inf")
    if ALLOWED:
        offsets = row * allowed_row_stride + column.to(tl.int64) * allowed_stride
        possible = possible & (tl.load(allowed + offsets, mask=inside, other=0) != 0)
    z = tl.where(possible, z, 0.0)
    log_p = tl.where(possible, softcapped(z, softcap, CAPPED) * scale - tl.load(base + row), 0.0)
    dx = tl.exp(log_p) * (tl.load(a + row) + tl.load(b + row) * log_p)
    for k in range(target_count):
        token = tl.load(tokens + row * target_count + k)
        dx = tl.where(column == token, tl.load(own + row * target_count + k), dx)
    dz = tl.where(possible, dx * scale * softcap_slope(z, softcap, CAPPED), 0.0)
    tl.store(gradient + row * gradient_row_stride + column, dz.to(gradient.dtype.element_ty), mask=inside)
