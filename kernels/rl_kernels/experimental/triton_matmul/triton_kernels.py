"""The forward kernel: a matrix product whose result never leaves the chip, and the row states of that result."""

import triton
import triton.language as tl

from rl_kernels.common.triton_helpers import softcapped


@triton.jit
def left_out(words, first, vocab_size, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """0 for the tokens first, first + 1, … that each row allows, −inf for others, in float32: to be added to logits.

    Reads at most two words a row. No comparison: on AMD its result would take scalar registers.
    """
    tl.static_assert(BLOCK_N <= 64)
    last = (vocab_size - 1) // 32
    word = tl.load(words + first // 32).to(tl.int64)[:, None]
    if BLOCK_N > 32:
        word = (word & 0xFFFFFFFF) | (tl.load(words + tl.minimum(first // 32 + 1, last)).to(tl.int64)[:, None] << 32)
    bit = (word >> (first % 32 + tl.arange(0, BLOCK_N))[None, :]).to(tl.int32) & 1
    # The bits of −inf, or none.
    return ((bit - 1) & -8388608).to(tl.float32, bitcast=True)


# One kernel for all values of these numbers. Triton would compile another one where a number is 1 or a multiple of 16.
@triton.jit(do_not_specialize=["count", "target_count", "start", "bias_stride"])
def forward_kernel(
    hidden,
    weight,
    bias,
    rows,
    tokens,
    inv_temperature,
    allowed,
    states,
    targets,
    count,
    vocab_size,
    hidden_size,
    part_size,
    target_count,
    start,
    hidden_row_stride,
    hidden_stride,
    weight_row_stride,
    weight_stride,
    bias_stride,
    allowed_stride,
    softcap,
    BIASED: tl.constexpr,
    CAPPED: tl.constexpr,
    ALLOWED: tl.constexpr,
    WIDENED: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """State of BLOCK_M rows over one part of the vocabulary; the logits of a tile are in registers only."""
    # Programs that run at the same time share GROUP blocks of rows and one tile of each part of the weight.
    parts = tl.cdiv(vocab_size, part_size)
    program = tl.program_id(0)
    leader = program // (GROUP * parts) * GROUP
    together = tl.minimum(tl.cdiv(count, BLOCK_M) - leader, GROUP)
    within = program % (GROUP * parts)
    part = within // together
    local = (leader + within % together) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = local < count
    # Rows and tokens past the end read the last one instead of being masked: a mask of a tile costs registers, on AMD
    # scalar registers, of which there are few.
    nearest = tl.minimum(local, count - 1)
    row = tl.load(rows + nearest)
    dtype: tl.constexpr = inv_temperature.dtype.element_ty
    scale = tl.load(inv_temperature + row)
    maximum = tl.full([BLOCK_M], float("-inf"), dtype)
    total = tl.zeros([BLOCK_M], dtype)
    weighted = tl.zeros([BLOCK_M], dtype)
    dim = tl.arange(0, BLOCK_K).to(tl.int64)
    for first in range(part * part_size, tl.minimum(vocab_size, (part + 1) * part_size), BLOCK_N):
        column = first + tl.arange(0, BLOCK_N)
        weight_row = tl.minimum(column, vocab_size - 1).to(tl.int64)
        x = tl.zeros([BLOCK_M, BLOCK_N], dtype)
        left = hidden + row[:, None] * hidden_row_stride + dim[None, :] * hidden_stride
        right = weight + weight_row[None, :] * weight_row_stride + dim[:, None] * weight_stride
        for done in range(0, hidden_size, BLOCK_K):
            if EVEN:
                a, b = tl.load(left), tl.load(right)
            else:
                there = dim < hidden_size - done
                a = tl.load(left, mask=there[None, :], other=0.0)
                b = tl.load(right, mask=there[:, None], other=0.0)
            if WIDENED:
                a, b = a.to(dtype), b.to(dtype)
            x = tl.dot(a, b, x, input_precision="ieee", out_dtype=dtype)
            left += BLOCK_K * hidden_stride
            right += BLOCK_K * weight_stride
        # Excluded tokens have −inf added, others 0: on AMD a mask of a tile would take scalar registers.
        excluded = tl.where(column < vocab_size, 0.0, float("-inf"))
        if BIASED:
            added = tl.load(bias + weight_row * bias_stride).to(dtype)
            finite = tl.where(added == float("-inf"), 0.0, added)
            excluded += added - finite
            x += finite[None, :]
        x = softcapped(x, softcap, CAPPED) * scale[:, None] + excluded[None, :]
        if ALLOWED:
            x += left_out(allowed + nearest.to(tl.int64) * allowed_stride, first, vocab_size, BLOCK_M, BLOCK_N).to(
                dtype
            )
        for k in range(target_count):
            token = tl.load(tokens + row * target_count + k) - start
            caught = real & (token >= first) & (token < tl.minimum(first + BLOCK_N, vocab_size))
            value = tl.sum(tl.where(column[None, :] == token[:, None], x, 0.0), 1)
            tl.store(targets + local.to(tl.int64) * target_count + k, value, mask=caught)
        top = tl.maximum(maximum, tl.max(x, 1))
        # The maximum of a row without a token so far is −inf: a difference of two −inf would be NaN.
        base = tl.where(top == float("-inf"), 0.0, top)
        moved = tl.where(maximum == float("-inf"), 0.0, maximum - base)
        shrunk = tl.exp(moved)
        # −inf becomes −1000, with exponential 0 and product 0; NaN stays NaN.
        x = x - base[:, None]
        x = tl.where(x < -1000.0, -1000.0, x)
        e = tl.exp(x)
        weighted = shrunk * (weighted + moved * total) + tl.sum(x * e, 1)
        total = total * shrunk + tl.sum(e, 1)
        maximum = top
    out = states + part.to(tl.int64) * 3 * count + local
    # A maximum ignores NaN; a sum does not.
    tl.store(out, tl.where(total == total, maximum, total), mask=real)
    tl.store(out + count, total, mask=real)
    tl.store(out + 2 * count, weighted, mask=real)
