"""The Triton kernels: logits to row states, and logits to their gradient."""

import triton
import triton.language as tl

from rl_kernels.common.triton_helpers import absorbed, softcap_slope, softcapped


@triton.jit(do_not_specialize=["start", "bias_start", "entries", "target_count"])
def state_kernel(
    logits,
    kept,
    bias,
    tokens,
    inverse,
    maximum,
    total,
    weighted,
    targets,
    start,
    bias_start,
    entries,
    row_stride,
    kept_row_stride,
    kept_stride,
    bias_stride,
    target_count,
    softcap,
    BIASED: tl.constexpr,
    CAPPED: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Take a block of logits into the rows' states; its first entry has the id ``start``."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(inverse + row)
    m, s, u = tl.load(maximum + row), tl.load(total + row), tl.load(weighted + row)
    z_row, kept_row = logits + row * row_stride, kept + row * kept_row_stride
    for first in range(0, entries, BLOCK):
        column = (first + tl.arange(0, BLOCK)).to(tl.int64)
        inside = column < entries
        z = tl.load(z_row + column, mask=inside, other=float("-inf"))
        if BIASED:
            z += tl.load(bias + (bias_start + column) * bias_stride, mask=inside, other=0.0).to(z.dtype)
        possible = z != float("-inf")
        if KEPT:
            possible = possible & (tl.load(kept_row + column * kept_stride, mask=inside, other=0) != 0)
        x = softcapped(tl.where(possible, z, 0.0), softcap, CAPPED) * scale
        m, s, u = absorbed(x, possible, m, s, u)
    # A maximum passes over NaN; a sum does not.
    tl.store(maximum + row, tl.where(s == s, m, s))
    tl.store(total + row, s)
    tl.store(weighted + row, u)
    for k in range(target_count):
        token = tl.load(tokens + row * target_count + k) - start
        if (token >= 0) & (token < entries):
            z = tl.load(z_row + token)
            if BIASED:
                z += tl.load(bias + (bias_start + token) * bias_stride).to(z.dtype)
            possible = z != float("-inf")
            if KEPT:
                possible = possible & (tl.load(kept_row + token * kept_stride) != 0)
            x = softcapped(tl.where(possible, z, 0.0), softcap, CAPPED) * scale
            tl.store(targets + row * target_count + k, tl.where(possible, x, float("-inf")))


@triton.jit(do_not_specialize=["entries", "target_count"])
def dlogits_kernel(
    logits,
    gradient,
    kept,
    bias,
    tokens,
    own,
    inverse,
    a,
    b,
    base,
    entries,
    row_stride,
    gradient_row_stride,
    kept_row_stride,
    kept_stride,
    bias_stride,
    target_count,
    softcap,
    BIASED: tl.constexpr,
    CAPPED: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dL/dlogits of a block; ``gradient`` may be the logits' own memory."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < entries
    scale = tl.load(inverse + row)
    z = tl.load(logits + row * row_stride + column, mask=inside, other=float("-inf"))
    if BIASED:
        z += tl.load(bias + column.to(tl.int64) * bias_stride, mask=inside, other=0.0).to(z.dtype)
    possible = z != float("-inf")
    if KEPT:
        offsets = row * kept_row_stride + column.to(tl.int64) * kept_stride
        possible = possible & (tl.load(kept + offsets, mask=inside, other=0) != 0)
    z = tl.where(possible, z, 0.0)
    log_p = tl.where(possible, softcapped(z, softcap, CAPPED) * scale - tl.load(base + row), 0.0)
    dx = tl.exp(log_p) * (tl.load(a + row) + tl.load(b + row) * log_p)
    for k in range(target_count):
        token = tl.load(tokens + row * target_count + k)
        dx = tl.where(column == token, tl.load(own + row * target_count + k), dx)
    dz = tl.where(possible, dx * scale * softcap_slope(z, softcap, CAPPED), 0.0)
    tl.store(gradient + row * gradient_row_stride + column, dz.to(gradient.dtype.element_ty), mask=inside)
