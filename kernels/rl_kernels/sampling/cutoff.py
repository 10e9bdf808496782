"""A truncated distribution as a cutoff: every truncation keeps a prefix of the order (value falling, id rising).

The cutoff is the last entry kept: its value as an integer key and its id. It is found by bisection over the keys, which
needs no sort; masses are integers, so that no order of summation changes what is kept.
"""

import torch
from torch import Tensor

EMPTY = -0x7F800001
"""The key of −inf, which is never kept."""
UNIT = 2.0**40
"""The mass of the largest entry; with 2²³ entries the sum still fits into int64."""


def tile_width(vocabulary: int) -> int:
    """Entries of a tile: a function of the vocabulary alone, since the noise of a draw depends on it."""
    return min(1024, max(32, 1 << (max(1, vocabulary // 16) - 1).bit_length()))


def greedy_is_top_1(temperature: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Temperature and k with which greedy rows (temperature 0) need no code of their own."""
    greedy = temperature == 0
    return temperature.masked_fill(greedy, 1.0), k.masked_fill(greedy, 1)


def ordered_key(x: Tensor) -> Tensor:
    """int32 in the order of the floats; −0 and 0 are equal."""
    bits = torch.where(x == 0, 0.0, x).view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def kept(x: Tensor, cutoff: Tensor, last: Tensor) -> Tensor:
    """Which entries of rows x [R, V] (float32, over temperature) are kept."""
    key, column = ordered_key(x), torch.arange(x.shape[-1], device=x.device)
    return (key > cutoff[:, None]) | ((key == cutoff[:, None]) & (column <= last[:, None]))


def find(x: Tensor, k: Tensor, p: Tensor, log_min_p: Tensor) -> tuple[Tensor, Tensor]:
    """The last entry kept in each row: its key (int64) and its id; `EMPTY` and −1 where nothing is cut off."""
    key, vocabulary = ordered_key(x), x.shape[-1]
    maximum = x.amax(-1)
    top = ordered_key(maximum).long()
    cutoff = torch.full_like(top, EMPTY)
    equals = torch.zeros_like(top)

    by_count, by_mass = k < vocabulary, p < 1
    if bool(by_count.any()):

        def count(threshold: Tensor) -> Tensor:
            return (key >= threshold[:, None]).sum(-1)

        cutoff = torch.where(by_count, _largest(count, k, cutoff, top), cutoff)
        equals = torch.where(cutoff > EMPTY, k - count(cutoff + 1), 0)
    if bool(by_mass.any()):
        weight = masses(x, maximum)

        def mass(threshold: Tensor) -> Tensor:
            return torch.where(key >= threshold[:, None], weight, 0).sum(-1)

        at_cutoff = torch.where(key == cutoff[:, None], weight, 0).amax(-1)
        total = mass(cutoff + 1) + equals * at_cutoff
        # An entry is kept where the mass before it, an integer, is below p·total.
        target = torch.ceil(p.double() * total).long().clamp(min=1)
        found = _largest(mass, target, cutoff, top)
        each = torch.where(key == found[:, None], weight, 0).amax(-1).clamp(min=1)
        fitting = ((target - mass(found + 1) + each - 1) // each).masked_fill(found == EMPTY, 0)
        cutoff, equals = torch.where(by_mass, found, cutoff), torch.where(by_mass, fitting, equals)
    lowest = torch.where(log_min_p > float("-inf"), ordered_key(maximum + log_min_p), EMPTY)
    same = key == cutoff[:, None]
    column = torch.arange(vocabulary, device=x.device)
    last = torch.where(same & (same.cumsum(-1) <= equals[:, None]), column, -1).amax(-1)
    raised = lowest > cutoff
    return torch.where(raised, lowest, cutoff), torch.where(raised, vocabulary, last)


def masses(x: Tensor, maximum: Tensor) -> Tensor:
    """e^{x − maximum} in units of 2⁻⁴⁰, int64."""
    return (torch.exp(x - maximum.masked_fill(maximum == float("-inf"), 0.0)[:, None]) * UNIT).long()


def _largest(amount, wanted: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The largest key in [low, high] above or at which there is the amount wanted; low if there is none."""
    for _ in range(33):
        middle = low + (high - low + 1) // 2
        enough = amount(middle) >= wanted
        low, high = torch.where(enough & (low < high), middle, low), torch.where(enough, high, middle - 1).maximum(low)
    return low
