"""The search for a cutoff in Triton, as cutoff.py has it; tiles below the threshold that is tried are not read."""

# Triton annotates neither constants passed to kernels nor reductions to scalars as what they are.
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

import triton
import triton.language as tl

from rl_kernels.sampling.cutoff import DEPTH, EMPTY
from rl_kernels.sampling.kernel_math import key_value, mass_units, ordered_key

_EMPTY = tl.constexpr(EMPTY)
_DEPTH = tl.constexpr(DEPTH)


@triton.jit
def scaled_tile(logits, row, live, heat, tile, vocabulary, row_stride, column_stride, WIDTH: tl.constexpr):
    """Logits over temperature [ROWS, WIDTH], divided with the one rounding that PyTorch has; −inf past the end."""
    column = tile * WIDTH + tl.arange(0, WIDTH)
    place = row[:, None] * row_stride + column[None, :].to(tl.int64) * column_stride
    z = tl.load(logits + place, mask=live[:, None] & (column < vocabulary)[None, :], other=float("-inf"))
    z = z.to(tl.float32)
    return tl.div_rn(z, tl.broadcast_to(heat[:, None], z.shape))


@triton.jit
def amount_above(
    logits, maximum, row, live, heat, base, threshold, vocabulary, tiles, row_stride, column_stride,
    MASS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """How many entries, or how much mass, have keys of at least the threshold [ROWS]; the nearest keys at or above it
    and below it.
    """
    amount = tl.zeros([ROWS], tl.int64)
    above = tl.full([ROWS], 0x7FFFFFFF, tl.int32)
    below = tl.full([ROWS], _EMPTY, tl.int32)
    for tile in range(0, tiles):
        top = ordered_key(tl.load(maximum + row * tiles + tile, mask=live, other=float("-inf")))
        if tl.max((top >= threshold).to(tl.int32), 0) > 0:
            x = scaled_tile(logits, row, live, heat, tile, vocabulary, row_stride, column_stride, WIDTH)
            key = ordered_key(x)
            chosen = key >= threshold[:, None]
            value = mass_units(x - base[:, None]) if MASS else tl.full([ROWS, WIDTH], 1, tl.int64)
            amount += tl.sum(tl.where(chosen, value, 0), 1)
            above = tl.minimum(above, tl.min(tl.where(chosen, key, 0x7FFFFFFF), 1))
            below = tl.maximum(below, tl.max(tl.where(chosen, _EMPTY, key), 1))
        else:
            below = tl.maximum(below, top)
    return amount, above.to(tl.int64), below.to(tl.int64)


@triton.jit
def largest(
    logits, maximum, row, live, heat, base, wanted, low, high, vocabulary, tiles, row_stride, column_stride,
    MASS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The largest key in [low, high] at or above which there is the amount wanted; low if there is none. As in
    cutoff.py.
    """
    floor = key_value(high) - _DEPTH
    step = 0
    while tl.max(high - low, 0) > 0:
        value = 0.5 * tl.maximum(key_value(low), floor) + 0.5 * key_value(high)
        by_value = tl.minimum(tl.maximum(ordered_key(value).to(tl.int64), low + 1), high)
        middle = tl.where(step % 2 == 0, by_value, low + (high - low + 1) // 2)
        amount, above, below = amount_above(
            logits, maximum, row, live, heat, base, middle, vocabulary, tiles, row_stride, column_stride,
            MASS, ROWS, WIDTH,
        )  # fmt: skip
        enough = amount >= wanted
        open_ = low < high
        high = tl.where(open_ & (amount < wanted), tl.maximum(below, low), high)
        low = tl.where(open_ & enough, above, low)
        step += 1
    return low
