"""A truncated distribution as a cutoff: every truncation allows a prefix of the order (value falling, id rising).

The cutoff is the last token of the prefix: its value as an integer key, and its id. By number it is one of the largest
logits, or is found by bisection. By mass it is sought among these, or else in one bin of a histogram of values, whose
few tokens are put in order. Masses are integers: no order of summation changes the prefix.
"""

import math
import threading
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

# The parameters of a custom operation that stand for a `Parameters`, in the order of its fields.
PARAMETERS = "Tensor temperature, Tensor k, Tensor p, Tensor log_min_p, Tensor seed, Tensor position"
EMPTY = -0x7F800001
"""The key of −inf, which is never allowed."""
UNIT = 2.0**40
"""The mass of the largest logit; the sum over a vocabulary of 2²³ still fits into int64."""
EXACT = 2.0**53
"""A sum of integers in float64 below is exact."""
SORTED = 1024
"""Largest logits that are listed in order where a number cuts; in larger sets the cutoff is sought."""
FEW = 64
"""Largest logits that are listed first where a mass cuts."""
BINS = 1024
"""Of a row's histogram."""
CACHED = 1 << 17
"""Logits whose masses and bins a cache holds."""
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
    ids = torch.arange(x.shape[-1], device=x.device) if ids is None else ids
    value = key_value(cutoff)[:, None]  # floats are in the order of their keys, and cost no pass
    return (x > value) | ((x == value) & (ids <= last[:, None]))


class Cutoff(NamedTuple):
    """Key (int64) and id of each row's last allowed token; `EMPTY` and −1 where nothing is cut off."""

    key: Tensor
    last: Tensor
    partial: Tensor
    """Whether only some of the tokens with the last one's value are allowed."""


_current = threading.local()


class Workspace:
    """Memory that chunks and calls work in: on a CPU to get fresh memory costs more than what is done there.

    Inside ``with workspace:`` the calls of this thread share it. It holds no more than the largest of them needs.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self._outer: list[Workspace | None] = []

    def __enter__(self) -> Self:
        self._outer.append(getattr(_current, "workspace", None))
        _current.workspace = self
        return self

    def __exit__(self, *error: object) -> None:
        _current.workspace = self._outer.pop()

    @staticmethod
    def of_call(x: Tensor) -> "Workspace":
        """The one that was entered, if any; elsewhere than on a CPU streams would share memory."""
        return (getattr(_current, "workspace", None) if x.device.type == "cpu" else None) or Workspace()

    def __call__(self, name: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory of this shape, not filled; that of the same name and dtype before is overwritten."""
        held = self._held.get((name, dtype, like.device))
        if held is None or held.numel() < math.prod(shape):
            held = self._held[name, dtype, like.device] = like.new_empty(math.prod(shape), dtype=dtype)
        return held[: math.prod(shape)].view(shape)


def find(x: Tensor, k: Tensor, p: Tensor, log_min_p: Tensor, work: Workspace | None = None) -> Cutoff:
    """The cutoff of rows x [R, V], float32 over temperature."""
    maximum = x.amax(-1)
    by_mass = p < 1
    value, number, last = torch.full_like(maximum, float("-inf")), torch.zeros_like(k), torch.full_like(k, -1)
    partial, listed = torch.zeros_like(by_mass), torch.zeros_like(by_mass)
    if bool((by_count := k < x.shape[-1]).any()):
        width = min(SORTED, int(k.masked_fill(~by_count, 0).amax()))
        listed = by_count & (k <= width)
        for rows, search in (
            (listed, lambda x, maximum, k, p: _listed(largest(x, width), maximum, k, p, None)),
            (by_count & ~listed, _counted),
        ):
            if len(some := rows.nonzero()[:, 0]):
                mine = _rows(x, some)
                value[some], number[some] = search(mine, maximum[some], k[some], p[some])
                last[some], partial[some] = _ids(mine, value[some], number[some])
    if len(some := (by_mass & ~listed).nonzero()[:, 0]) == len(x) > 0:
        value, last, partial = _weighed(x, maximum, p, value, number, work or Workspace())
    elif len(some):
        found = _weighed(x[some], maximum[some], p[some], value[some], number[some], work or Workspace())
        value[some], last[some], partial[some] = found
    lowest = maximum + log_min_p
    raised = lowest > value
    key = ordered_key(torch.where(raised, lowest, value)).long()
    return Cutoff(key, torch.where(raised, x.shape[-1], last), partial & ~raised)


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    return x if len(rows) == len(x) else x[rows]


def largest(x: Tensor, number: int) -> Tensor:
    """The largest values [R, number] of rows, falling: those of the groups of columns with the largest maxima."""
    rows, width = x.shape
    size = 1 << max(0, (width // max(1, number)).bit_length() // 2)
    columns = width // size
    if size < 4 or columns < 2 * number:
        return x.topk(number, -1).values
    groups = x[:, : size * columns].unflatten(1, (size, columns))
    some = groups.amax(1).topk(number, -1, sorted=False).indices[:, None].expand(rows, size, number)
    return torch.cat([groups.gather(-1, some).flatten(1), x[:, size * columns :]], -1).topk(number, -1).values


def _listed(values: Tensor, maximum: Tensor, k: Tensor, p: Tensor, target: Tensor | None) -> tuple[Tensor, Tensor]:
    """Value of the last allowed token, and how many of this value are allowed, among the largest logits in order.

    Without a ``target`` the mass to be reached is that of p in the k largest.
    """
    weight = masses(values, maximum)
    if target is None:
        inside = torch.arange(values.shape[-1], device=values.device) < k[:, None]
        weight = weight.masked_fill_(~inside, 0)
    upto = weight.cumsum(-1)
    target = _target(p, upto[:, -1]) if target is None else target
    place = torch.where(p < 1, torch.minimum((upto < target[:, None]).sum(-1), k - 1), k - 1)[:, None]
    value = values.gather(-1, place)
    above = values > value
    fitting = _fitting(target - weight.masked_fill(~above, 0).sum(-1), weight.gather(-1, place)[:, 0])
    return value[:, 0], torch.where(p < 1, fitting, k - above.sum(-1))


def _counted(x: Tensor, maximum: Tensor, k: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """As ``_listed``, of the k largest where k is large; p is for ``_weighed``."""
    key = ordered_key(x)

    def count(threshold: Tensor) -> Tensor:
        return (key >= threshold[:, None]).sum(-1)

    cutoff = _largest(key, count, k, torch.full_like(k, EMPTY), ordered_key(maximum).long())
    return key_value(cutoff), k - count(cutoff + 1)


def _weighed(
    x: Tensor, maximum: Tensor, p: Tensor, least: Tensor, number: Tensor, work: Workspace
) -> tuple[Tensor, Tensor, Tensor]:
    """Value, id and whether it is partial, of rows that a mass cuts.

    A histogram of the row says in which bin the mass is reached; this bin's tokens are put in order. Of rows that a
    large k has cut before, ``number`` tokens of the value ``least`` and all above are left.
    """
    if bool((odd := maximum.isnan() | (maximum == float("inf"))).any()):
        x, maximum = x.masked_fill(odd[:, None], 0.0), maximum.masked_fill(odd, 0.0)  # refused, or without a token
    top = maximum.masked_fill(maximum == float("-inf"), 0.0)[:, None]
    bounded = bool((least > float("-inf")).any())
    upto, bins = _histogram(x, top, (least, number) if bounded else None, work)
    target = _target(p, upto[:, -1])
    if not bounded and bool((target <= FEW * UNIT).all()):
        few = largest(x, min(FEW, x.shape[-1]))
        if bool((masses(few, maximum).sum(-1) >= target).all()):
            value, number = _listed(few, maximum, torch.full_like(number, few.shape[-1]), p, target)
            return value, *_ids(x, value, number)
    reached = (upto < target[:, None]).sum(-1).clamp(max=BINS - 1)[:, None]
    before = torch.where(reached > 0, upto.gather(-1, (reached - 1).clamp(min=0)), 0)[:, 0]

    row, column, counts = _equal(bins, reached.int())
    found = x[row, column]
    weight = masses(found[:, None], top[row, 0])[:, 0]
    if bounded:
        weight = weight.masked_fill(found < least[row], 0)
    rank = torch.arange(len(row), device=x.device) - (counts.cumsum(0) - counts)[row]
    values = x.new_full((len(x), int(counts.amax())), float("-inf"))
    mass, ids = (torch.zeros_like(values, dtype=torch.int64) for _ in range(2))
    values[row, rank], mass[row, rank], ids[row, rank] = found, weight, column
    # Of one value the lower id comes first, as it was.
    values, order = values.sort(dim=-1, descending=True, stable=True)
    mass, ids = mass.gather(-1, order), ids.gather(-1, order)
    upto = before[:, None] + mass.cumsum(-1)
    place = (upto < target[:, None]).sum(-1, keepdim=True).clamp(max=values.shape[-1] - 1)
    value = values.gather(-1, place)
    above = values > value
    fitting = _fitting(target - before - mass.masked_fill(~above, 0).sum(-1), mass.gather(-1, place)[:, 0])
    same = ((values == value) & (torch.arange(values.shape[-1], device=x.device) < counts[:, None])).sum(-1)
    value = value[:, 0]
    if bounded:
        fitting = torch.where(value <= least, torch.minimum(fitting, number), fitting)
        value = value.maximum(least)
    fitting = torch.minimum(fitting, same)
    last = ids.gather(-1, (above.sum(-1) + fitting - 1).clamp(min=0)[:, None])[:, 0]
    nothing = value == float("-inf")
    return value, last.masked_fill(nothing, -1), (fitting < same) & ~nothing


def _histogram(
    x: Tensor, top: Tensor, left: tuple[Tensor, Tensor] | None, work: Workspace, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Mass [R, BINS] up to each bin's end, from the largest logit down, and each token's bin [R, V].

    ``left``: the value of the least token that a number has left in a row, and how many tokens of this value. Masses
    are added in ``dtype``, in int64 where they are too large for float64.
    """
    bins = work("bins", tuple(x.shape), x, torch.int32)
    total = torch.zeros(len(x), BINS, dtype=dtype, device=x.device)
    scale = (1 - BINS) / (top - x.amin(-1, keepdim=True)).clamp_(min=1e-30, max=DEPTH)
    step = max(1, CACHED // x.shape[-1])
    for first in range(0, len(x), step):
        rows = slice(first, first + step)
        shape = tuple(x[rows].shape)
        # No mass is below the depth, and exponentials there would be slow.
        below = torch.sub(x[rows], top[rows], out=work("below", shape, x)).clamp_(min=-DEPTH)
        # Of what is not negative floor is trunc, and costs a tenth.
        rounded = torch.exp(below, out=work("mass", shape, x)).mul_(UNIT).floor_()
        # By way of int32, which is the faster way to int64.
        place = work("place", shape, x, torch.int64).copy_(bins[rows].copy_(below.mul_(scale[rows])))
        if left is not None:
            least, number = (y[rows, None] for y in left)
            same = (x[rows] == least) & (rounded > 0)
            # Of the ties those that a number has left are the first ones.
            rounded.masked_fill_((x[rows] < least) | (same & (same.cumsum(-1) > number)), 0)
        total[rows].scatter_add_(-1, place, work("mass", shape, x, dtype).copy_(rounded))
    if dtype == torch.float64 and bool((total >= EXACT).any()):
        return _histogram(x, top, left, work, torch.int64)
    return total.long().cumsum(-1), bins


def _target(p: Tensor, total: Tensor) -> Tensor:
    """A token is allowed where the mass before it, an integer, is below p·total."""
    return torch.ceil(p.double() * total).long().clamp(min=1)


def _fitting(left: Tensor, each: Tensor) -> Tensor:
    """How many tokens of one mass begin before the mass that is left is reached."""
    each = each.clamp(min=1)
    return (left + each - 1) // each


def _ids(x: Tensor, value: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    """The id of the last of ``number`` tokens of this value, lower ids first (−1: none), and whether there are more."""
    _, column, counts = _equal(x, value.masked_fill(value == float("-inf"), float("nan"))[:, None])
    there = counts > 0
    last = torch.full_like(number, -1)
    rank = torch.minimum(number.clamp(min=1), counts)  # of logits that are refused it can be any number
    last[there] = column[(counts.cumsum(0) - counts + rank - 1)[there]]
    return last, number < counts


def _equal(x: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Row and column of the elements of x [R, V] that are their row's value [R, 1], and how many there are [R]."""
    if x.device.type == "cpu" and type(x) is Tensor:  # torch needs ten times as long
        width, step = x.shape[-1], max(1, CACHED // x.shape[-1])
        blocks = zip(x.split(step), value.split(step), strict=True)
        found = [np.flatnonzero(a.numpy() == b.numpy()) + n * step * width for n, (a, b) in enumerate(blocks)]
        row, column = (torch.from_numpy(y) for y in np.divmod(np.concatenate(found), width))
        return row, column, torch.bincount(row, minlength=len(x))
    (row, column), counts = (same := x == value).nonzero(as_tuple=True), same.sum(-1)
    return row, column, counts


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
