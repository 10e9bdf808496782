"""What the Gluon kernels share: which tokens and part of the vocabulary a
program has, and the state of some of a tile's logits."""

# Gluon annotates what its compiler sees: layouts and sizes become constants by being declared so.
# pyright: reportAssignmentType=false, reportArgumentType=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rl_kernels.common.triton_helpers import softcapped

# One kernel for all values of these numbers. Where one is 1, Triton would compile it in as a constant; with one target
# a row, the most common case, Hopper's kernel would spill.
NUMBERS = ("count", "vocab_size", "target_count", "start", "bias_stride", "allowed_stride")


@gluon.jit
def place(count, vocab_size, part_size, BLOCK_M: gl.constexpr, GROUP: gl.constexpr):
    """The program's part of the vocabulary and its first row."""
    # Programs that run at the same time share GROUP blocks of rows and one tile of each part of the weight.
    parts = gl.cdiv(vocab_size, part_size)
    program = gl.program_id(0)
    leader = program // (GROUP * parts) * GROUP
    together = gl.minimum(gl.cdiv(count, BLOCK_M) - leader, GROUP)
    within = program % (GROUP * parts)
    return within // together, (leader + within % together) * BLOCK_M


@gluon.jit
def halves(x):
    """The left and the right half of the columns; in registers, nothing moves."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute([0, 2, 1]).split()


@gluon.jit
def eighths(x):
    """Eight equal parts of the columns, from left to right."""
    one, two = halves(x)
    a, b = halves(one)
    c, d = halves(two)
    return halves(a) + halves(b) + halves(c) + halves(d)


@gluon.jit
def left_out(words, first, vocab_size, bits):
    """0 for the 32 tokens from ``first`` on that each row allows, −inf for others: to be added to logits."""
    # Tokens past the last word are excluded already.
    word = gl.load(words + gl.minimum(first // 32, (vocab_size - 1) // 32))
    return gl.where(((word[:, None] >> bits[None, :]) & 1) == 0, float("-inf"), 0.0)


@gluon.jit
def extended(
    x,
    first,
    column,
    maximum,
    total,
    weighted,
    nearest,
    real,
    scale,
    bias,
    tokens,
    allowed,
    targets,
    vocab_size,
    target_count,
    start,
    bias_stride,
    allowed_stride,
    softcap,
    BIASED: gl.constexpr,
    CAPPED: gl.constexpr,
    ALLOWED: gl.constexpr,
):
    """The rows' state with the 32 tokens from ``first`` on, whose logits are ``x``; target logits are stored."""
    WIDTH: gl.constexpr = x.shape[1]
    # As many as one word has bits.
    gl.static_assert(WIDTH == 32)
    token_id = first + column
    # Excluded tokens have −inf added, others 0.
    excluded = gl.where(token_id < vocab_size, 0.0, float("-inf"))
    if BIASED:
        nearby = gl.minimum(token_id, vocab_size - 1).to(gl.int64)
        added = gl.load(bias + nearby * bias_stride).to(gl.float32)
        finite = gl.where(added == float("-inf"), 0.0, added)
        excluded += added - finite
        x += finite[None, :]
    x = softcapped(x, softcap, CAPPED) * scale[:, None] + excluded[None, :]
    if ALLOWED:
        x += left_out(allowed + nearest * allowed_stride, first, vocab_size, column)
    for which in range(target_count):
        token = gl.load(tokens + nearest * target_count + which) - start
        caught = real & (token >= first) & (token < gl.minimum(first + WIDTH, vocab_size))
        value = gl.sum(gl.where(token_id[None, :] == token[:, None], x, 0.0), 1)
        gl.store(targets + nearest * target_count + which, value, mask=caught)
    top = gl.maximum(maximum, gl.max(x, 1))
    # The maximum of a row without a token so far is −inf: a difference of two −inf would be NaN.
    base = gl.where(top == float("-inf"), 0.0, top)
    moved = gl.where(maximum == float("-inf"), 0.0, maximum - base)
    shrunk = gl.exp(moved)
    # −inf becomes −1000, with exponential 0 and product 0; NaN stays NaN.
    x = x - base[:, None]
    x = gl.where(x < -1000.0, -1000.0, x)
    e = gl.exp(x)
    weighted = shrunk * (weighted + moved * total) + gl.sum(x * e, 1)
    return top, total * shrunk + gl.sum(e, 1), weighted


@gluon.jit
def store_state(states, part, row, real, count, maximum, total, weighted):
    """Three numbers a row and part."""
    out = states + part.to(gl.int64) * 3 * count + row
    # A maximum ignores NaN; a sum does not.
    gl.store(out, gl.where(total == total, maximum, total), mask=real)
    gl.store(out + count, total, mask=real)
    gl.store(out + 2 * count, weighted, mask=real)
