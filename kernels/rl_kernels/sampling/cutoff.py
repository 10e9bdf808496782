"""A truncated distribution as a cutoff: every truncation allows a prefix of the order (value falling, id rising).

The cutoff is the last token of the prefix: its value as an integer key, and its id. It is one of the largest logits, or
is found in a larger set: by count through bisection, by mass through a sort. Masses are integers: no order of summation
changes the prefix.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# The parameters of a custom operation that stand for a `Parameters`, in the order of its fields.
PARAMETERS = "Tensor temperature, Tensor k, Tensor p, Tensor log_min_p, Tensor seed, Tensor position"
EMPTY = -0x7F800001
"""The key of −inf, which is never allowed."""
UNIT = 2.0**40
"""The mass of the largest logit; the sum over a vocabulary of 2²³ still fits into int64."""
SORTED = 1024
"""Largest logits that are listed in order; in larger sets the cutoff is sought."""
DEPTH = 40.0
"""How far below the largest logit the middle of values is sought: there is no mass below."""


class Parameters(NamedTuple):
    """One number a row [B] each: temperature, p and log min_p in float32, k, seed and position in int64."""

    temperature: Tensor
    k: Tensor
    p: Tensor
    log_min_p: Tensor
    seed: Tensor
    position: Tensor


def tile_width(vocab_size: int) -> int:
    """Tokens in a tile: a function of the vocabulary alone, since the noise of a draw depends on the tile."""
    return min(1024, max(32, 1 << (max(1, vocab_size // 16) - 1).bit_length()))


def greedy_is_top_1(temperature: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy rows, of temperature 0, as top-1 at temperature 1: no other code knows them."""
    greedy = temperature == 0
    return temperature.masked_fill(greedy, 1.0), k.masked_fill(greedy, 1)


def ordered_key(x: Tensor) -> Tensor:
    """int32 in the order of the floats; −0 and 0 are equal."""
    bits = torch.where(x == 0, 0.0, x).view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def key_value(key: Tensor) -> Tensor:
    """The float with this key (int64)."""
    bits = key.to(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).view(torch.float32)


def allowed(x: Tensor, cutoff: Tensor, last: Tensor, ids: Tensor | None = None) -> Tensor:
    """Which tokens of rows x [R, V] (float32, over temperature) are allowed; ``ids`` [R, V]: not 0 … V − 1."""
    key = ordered_key(x)
    ids = torch.arange(x.shape[-1], device=x.device) if ids is None else ids
    return (key > cutoff[:, None]) | ((key == cutoff[:, None]) & (ids <= last[:, None]))


def find(x: Tensor, k: Tensor, p: Tensor, log_min_p: Tensor) -> tuple[Tensor, Tensor]:
    """Key (int64) and id of each row's last allowed token; `EMPTY` and −1 where nothing is cut off."""
    key, vocab_size = ordered_key(x), x.shape[-1]
    maximum = x.amax(-1)
    top = ordered_key(maximum).long()
    cutoff = torch.full_like(top, EMPTY)
    equals = torch.zeros_like(top)
    by_count, by_mass = k < vocab_size, p < 1
    # Most sets are small: of the largest logits in order nothing need be sought.
    width = SORTED if bool(by_mass.any()) else int(k.masked_fill(~by_count, 0).amax()) if len(k) else 0
    listed = x.topk(min(width, SORTED, vocab_size), -1).values
    listed_key = ordered_key(listed).long()

    if bool(by_count.any()):
        kth = listed_key.gather(-1, (k.clamp(max=listed.shape[-1]) - 1)[:, None])[:, 0]
        cutoff = torch.where(by_count, kth, cutoff)
        above = (listed_key > cutoff[:, None]).sum(-1)
        if len(rows := (by_count & (k > listed.shape[-1])).nonzero()[:, 0]):
            some = key[rows]

            def count(threshold: Tensor) -> Tensor:
                return (some >= threshold[:, None]).sum(-1)

            cutoff[rows] = _largest(some, count, k[rows], torch.full_like(rows, EMPTY), top[rows])
            above[rows] = count(cutoff[rows] + 1)
        equals = torch.where(cutoff > EMPTY, k - above, 0)
    if bool(by_mass.any()):
        weight, listed_weight = masses(x, maximum), masses(listed, maximum)
        at_cutoff = torch.where(key == cutoff[:, None], weight, 0).amax(-1)
        total = torch.where(key > cutoff[:, None], weight, 0).sum(-1) + equals * at_cutoff
        # A token is allowed where the mass before it, an integer, is below p·total.
        target = torch.ceil(p.double() * total).long().clamp(min=1)
        upto = listed_weight.cumsum(-1)
        place = (upto < target[:, None]).sum(-1).clamp(max=listed.shape[-1] - 1)
        found = torch.where(by_mass, listed_key.gather(-1, place[:, None])[:, 0], cutoff)
        before = torch.where(listed_key > found[:, None], listed_weight, 0).sum(-1)
        if len(rows := (by_mass & (upto[:, -1] < target)).nonzero()[:, 0]):
            # Flat rows: one sort costs less than the twenty passes of a bisection.
            in_order = x[rows].sort(-1, descending=True).values
            upto = masses(in_order, maximum[rows]).cumsum(-1)
            place = (upto < target[rows, None]).sum(-1).clamp(max=vocab_size - 1)
            found[rows] = ordered_key(in_order.gather(-1, place[:, None])[:, 0]).long().maximum(cutoff[rows])
            before[rows] = torch.where(key[rows] > found[rows, None], weight[rows], 0).sum(-1)
        each = torch.where(key == found[:, None], weight, 0).amax(-1).clamp(min=1)
        fitting = ((target - before + each - 1) // each).masked_fill(found == EMPTY, 0)
        cutoff, equals = torch.where(by_mass, found, cutoff), torch.where(by_mass, fitting, equals)
    lowest = torch.where(log_min_p > float("-inf"), ordered_key(maximum + log_min_p), EMPTY)
    same = key == cutoff[:, None]
    column = torch.arange(vocab_size, device=x.device)
    if bool((same.sum(-1) > equals).logical_and(cutoff > EMPTY).any()):
        same_allowed = same & (same.cumsum(-1) <= equals[:, None])
    else:
        same_allowed = same & (equals > 0)[:, None]
    last = torch.where(same_allowed, column, -1).amax(-1)
    raised = lowest > cutoff
    return torch.where(raised, lowest, cutoff), torch.where(raised, vocab_size, last)


def masses(x: Tensor, maximum: Tensor) -> Tensor:
    """e^{x − maximum} in units of 2⁻⁴⁰, int64."""
    return (torch.exp(x - maximum.masked_fill(maximum == float("-inf"), 0.0)[:, None]) * UNIT).long()


def _largest(key: Tensor, amount, wanted: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The largest key in [low, high] above or at which there is the amount wanted; low if there is none.

    The bounds move to the nearest keys of the row, so that few steps are needed. The middle is by turns that of the
    values, which are spread more evenly, and that of the keys, of which there are at most 2³²: 32 halvings end it.
    """
    floor = key_value(high) - DEPTH
    for step in range(64):
        if not bool((low < high).any()):
            break
        middle = low + (high - low + 1) // 2
        if step % 2 == 0:
            value = 0.5 * key_value(low).maximum(floor) + 0.5 * key_value(high)
            middle = ordered_key(value).long().maximum(low + 1).minimum(high)
        enough, open_ = amount(middle) >= wanted, low < high
        above = key >= middle[:, None]
        nearest = key.masked_fill(~above, 0x7FFFFFFF).amin(-1).long()
        below = key.masked_fill(above, EMPTY).amax(-1).long().maximum(low)
        low, high = torch.where(open_ & enough, nearest, low), torch.where(open_ & ~enough, below, high)
    return low
