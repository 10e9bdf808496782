"""The forward kernel: a matrix product whose result never leaves the chip, and the row states of that result."""

import triton
import triton.language as tl

from rl_kernels.common.triton_helpers import softcapped


@triton.jit
def left_out(words, first, vocabulary, ROWS: tl.constexpr, ENTRIES: tl.constexpr):
    """0 for the entries first, first + 1, … that are in each row's kept set, −inf for others: to be added, in float32.

    At most two words a row are read. Without a comparison, whose result takes scalar registers on AMD.
    """
    tl.static_assert(ENTRIES <= 64)
    last = (vocabulary - 1) // 32
    word = tl.load(words + first // 32).to(tl.int64)[:, None]
    if ENTRIES > 32:
        word = (word & 0xFFFFFFFF) | (tl.load(words + tl.minimum(first // 32 + 1, last)).to(tl.int64)[:, None] << 32)
    bit = (word >> (first % 32 + tl.arange(0, ENTRIES))[None, :]).to(tl.int32) & 1
    # The bits of −inf, or none.
    return ((bit - 1) & -8388608).to(tl.float32, bitcast=True)


# Triton would compile a kernel anew where such a number is 1 or a multiple of 16, and constants take registers.
@triton.jit(do_not_specialize=["count", "target_count", "start", "bias_stride"])
def forward_kernel(
    hidden,
    weight,
    bias,
    rows,
    tokens,
    inverse,
    kept,
    states,
    targets,
    count,
    vocabulary,
    features,
    part_size,
    target_count,
    start,
    hidden_row_stride,
    hidden_stride,
    weight_row_stride,
    weight_stride,
    bias_stride,
    kept_stride,
    softcap,
    BIASED: tl.constexpr,
    CAPPED: tl.constexpr,
    KEPT: tl.constexpr,
    WIDENED: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """State of ``ROWS`` rows over one part of the vocabulary; the logits of a tile are in registers only."""
    # Programs that run at the same time share GROUP blocks of rows and one tile of each part of the weight.
    parts = tl.cdiv(vocabulary, part_size)
    program = tl.program_id(0)
    leader = program // (GROUP * parts) * GROUP
    together = tl.minimum(tl.cdiv(count, ROWS) - leader, GROUP)
    within = program % (GROUP * parts)
    part = within // together
    local = (leader + within % together) * ROWS + tl.arange(0, ROWS)
    real = local < count
    # Rows and entries past the end read the last one instead of being masked: a mask of a tile costs registers, on AMD
    # scalar ones, of which there are few.
    nearest = tl.minimum(local, count - 1)
    row = tl.load(rows + nearest)
    dtype: tl.constexpr = inverse.dtype.element_ty
    scale = tl.load(inverse + row)
    maximum = tl.full([ROWS], float("-inf"), dtype)
    total = tl.zeros([ROWS], dtype)
    weighted = tl.zeros([ROWS], dtype)
    feature = tl.arange(0, FEATURES).to(tl.int64)
    for first in range(part * part_size, tl.minimum(vocabulary, (part + 1) * part_size), ENTRIES):
        column = first + tl.arange(0, ENTRIES)
        entry = tl.minimum(column, vocabulary - 1).to(tl.int64)
        x = tl.zeros([ROWS, ENTRIES], dtype)
        left = hidden + row[:, None] * hidden_row_stride + feature[None, :] * hidden_stride
        right = weight + entry[None, :] * weight_row_stride + feature[:, None] * weight_stride
        for done in range(0, features, FEATURES):
            if EVEN:
                a, b = tl.load(left), tl.load(right)
            else:
                there = feature < features - done
                a = tl.load(left, mask=there[None, :], other=0.0)
                b = tl.load(right, mask=there[:, None], other=0.0)
            if WIDENED:
                a, b = a.to(dtype), b.to(dtype)
            x = tl.dot(a, b, x, input_precision="ieee", out_dtype=dtype)
            left += FEATURES * hidden_stride
            right += FEATURES * weight_stride
        # What leaves an entry out is added: 0 or −inf. Masks of a tile are scalar registers on AMD.
        excluded = tl.where(column < vocabulary, 0.0, float("-inf"))
        if BIASED:
            added = tl.load(bias + entry * bias_stride).to(dtype)
            finite = tl.where(added == float("-inf"), 0.0, added)
            excluded += added - finite
            x += finite[None, :]
        x = softcapped(x, softcap, CAPPED) * scale[:, None] + excluded[None, :]
        if KEPT:
            x += left_out(kept + nearest.to(tl.int64) * kept_stride, first, vocabulary, ROWS, ENTRIES).to(dtype)
        for k in range(target_count):
            token = tl.load(tokens + row * target_count + k) - start
            caught = real & (token >= first) & (token < tl.minimum(first + ENTRIES, vocabulary))
            value = tl.sum(tl.where(column[None, :] == token[:, None], x, 0.0), 1)
            tl.store(targets + local.to(tl.int64) * target_count + k, value, mask=caught)
        top = tl.maximum(maximum, tl.max(x, 1))
        # A row that has had nothing yet: differences with −inf would be NaN.
        base = tl.where(top == float("-inf"), 0.0, top)
        moved = tl.where(maximum == float("-inf"), 0.0, maximum - base)
        shrunk = tl.exp(moved)
        # Also −inf becomes −1000, whose exponential is 0 and its product with it; NaN stays.
        x = x - base[:, None]
        x = tl.where(x < -1000.0, -1000.0, x)
        e = tl.exp(x)
        weighted = shrunk * (weighted + moved * total) + tl.sum(x * e, 1)
        total = total * shrunk + tl.sum(e, 1)
        maximum = top
    out = states + part.to(tl.int64) * 3 * count + local
    # A maximum passes over NaN; a sum does not.
    tl.store(out, tl.where(total == total, maximum, total), mask=real)
    tl.store(out + count, total, mask=real)
    tl.store(out + 2 * count, weighted, mask=real)
