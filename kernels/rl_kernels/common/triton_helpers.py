"""Small functions that Triton kernels share."""

import triton
import triton.language as tl


@triton.jit
def tanh(y):
    """Tanh from one exponential; near 0, where 1 − e^{−2|y|} cancels, its series."""
    t = tl.exp(-2.0 * tl.abs(y))
    magnitude = (1.0 - t) / (1.0 + t)
    square = y * y
    series = y * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(tl.abs(y) < 0.15, series, tl.where(y < 0, -magnitude, magnitude))


@triton.jit
def softcapped(z, softcap, CAPPED: tl.constexpr):
    """softcap·tanh(z/softcap), or z."""
    if CAPPED:
        z = softcap * tanh(z / softcap)
    return z


@triton.jit
def softcap_slope(z, softcap, CAPPED: tl.constexpr):
    """The cap's derivative at z: 1 without one. Written as sech², which is not 1 − 1 where the cap saturates."""
    if CAPPED:
        t = tl.exp(-2.0 * tl.abs(z / softcap))
        slope = 4.0 * t / ((1.0 + t) * (1.0 + t))
    else:
        slope = 1.0
    return slope


@triton.jit
def allowed_bits(words, column, inside):
    """Whether a row allows the tokens ``column``; bit i of word j stands for token 32·j + i."""
    word = tl.load(words + column // 32, mask=inside, other=0)
    return ((word >> (column % 32)) & 1) != 0


@triton.jit
def absorbed(x, possible, maximum, total, weighted):
    """A row's state (`row_state.RowState`, but for its targets) with a tile ``x`` [W] of its scaled logits taken in.

    Where ``possible`` is False a token is excluded, whatever finite number ``x`` has there.
    """
    top = tl.maximum(maximum, tl.max(tl.where(possible, x, float("-inf")), 0))
    # The maximum of a row without a token so far is −inf: a difference of two −inf would be NaN.
    base = tl.where(top == float("-inf"), 0.0, top)
    moved = tl.where(maximum == float("-inf"), 0.0, maximum - base)
    shrunk = tl.exp(moved)
    shifted = tl.where(possible, x - base, 0.0)
    e = tl.where(possible, tl.exp(shifted), 0.0)
    weighted = shrunk * (weighted + moved * total) + tl.sum(shifted * e, 0)
    return top, total * shrunk + tl.sum(e, 0), weighted
