"""What the Gluon kernels share: which rows and entries a program has, and the state of some of a tile's logits."""

# Gluon annotates what its compiler sees: layouts and sizes become constants by being declared so.
# pyright: reportAssignmentType=false, reportArgumentType=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rl_kernels.common.triton_helpers import softcapped

# One kernel serves any of these: where one is 1, Triton would compile another with a constant. For one target a row,
# the most common case, Hopper's would spill then.
NUMBERS = ("count", "vocabulary", "target_count", "start", "bias_stride", "kept_stride")


@gluon.jit
def place(count, vocabulary, part_size, ROWS: gl.constexpr, GROUP: gl.constexpr):
    """The program's part of the vocabulary and its first row."""
    # Programs that run at the same time share GROUP blocks of rows and one tile of each part of the weight.
    parts = gl.cdiv(vocabulary, part_size)
    program = gl.program_id(0)
    leader = program // (GROUP * parts) * GROUP
    together = gl.minimum(gl.cdiv(count, ROWS) - leader, GROUP)
    within = program % (GROUP * parts)
    return within // together, (leader + within % together) * ROWS


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
def left_out(words, first, vocabulary, bits):
    """0 for the 32 entries from ``first`` on that are in each row's kept set, −inf for others: to be added."""
    # Past the last word every entry is left out already.
    word = gl.load(words + gl.minimum(first // 32, (vocabulary - 1) // 32))
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
    kept,
    targets,
    vocabulary,
    target_count,
    start,
    bias_stride,
    kept_stride,
    softcap,
    BIASED: gl.constexpr,
    CAPPED: gl.constexpr,
    KEPT: gl.constexpr,
):
    """The rows' state with 32 entries from ``first`` on, whose products are ``x``; logits of tokens are stored."""
    WIDTH: gl.constexpr = x.shape[1]
    # A word of a kept set.
    gl.static_assert(WIDTH == 32)
    entry = first + column
    # What leaves an entry out is added: 0 or −inf.
    excluded = gl.where(entry < vocabulary, 0.0, float("-inf"))
    if BIASED:
        nearby = gl.minimum(entry, vocabulary - 1).to(gl.int64)
        added = gl.load(bias + nearby * bias_stride).to(gl.float32)
        finite = gl.where(added == float("-inf"), 0.0, added)
        excluded += added - finite
        x += finite[None, :]
    x = softcapped(x, softcap, CAPPED) * scale[:, None] + excluded[None, :]
    if KEPT:
        x += left_out(kept + nearest * kept_stride, first, vocabulary, column)
    for which in range(target_count):
        token = gl.load(tokens + nearest * target_count + which) - start
        caught = real & (token >= first) & (token < gl.minimum(first + WIDTH, vocabulary))
        value = gl.sum(gl.where(entry[None, :] == token[:, None], x, 0.0), 1)
        gl.store(targets + nearest * target_count + which, value, mask=caught)
    top = gl.maximum(maximum, gl.max(x, 1))
    # A row that has had nothing yet: differences with −inf would be NaN.
    base = gl.where(top == float("-inf"), 0.0, top)
    moved = gl.where(maximum == float("-inf"), 0.0, maximum - base)
    shrunk = gl.exp(moved)
    # Also −inf becomes −1000, whose exponential is 0 and its product with it; NaN stays.
    x = x - base[:, None]
    x = gl.where(x < -1000.0, -1000.0, x)
    e = gl.exp(x)
    weighted = shrunk * (weighted + moved * total) + gl.sum(x * e, 1)
    return top, total * shrunk + gl.sum(e, 1), weighted


@gluon.jit
def store_state(states, part, row, real, count, maximum, total, weighted):
    """Three numbers a row and part."""
    out = states + part.to(gl.int64) * 3 * count + row
    # A maximum passes over NaN; a sum does not.
    gl.store(out, gl.where(total == total, maximum, total), mask=real)
    gl.store(out + count, total, mask=real)
    gl.store(out + 2 * count, weighted, mask=real)
