"""Cut a set of lengths into parts of nearly equal total, on the host: LPT, then swaps between heavy and light parts."""

import heapq
import itertools
import math
from collections.abc import Sequence

import numpy as np

from rl_fn._numerics import require

# Swaps stop at this excess over the mean; below it the remaining gain is smaller than what one token costs.
_TOLERANCE = 1e-3
_ROUNDS, _PAIRS = 32, 64
# Candidate swaps examined in one round; wider parts are sampled.
_CANDIDATES = 1 << 17


def as_lengths(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the lengths as int64; what is not a flat list of non-negative integers is refused."""
    array = np.asarray(lengths)
    require(array.ndim == 1, f"lengths must be one-dimensional, got shape {array.shape}")
    if array.size == 0:
        return np.zeros(0, np.int64)
    require(array.dtype.kind in "iu", f"lengths must be integers, got dtype {array.dtype}")
    array = array.astype(np.int64)
    require(bool((array >= 0).all()), f"lengths must not be negative, got {array.min()}")
    return array


def _longest_first(lengths: np.ndarray, parts: int, size: int | None) -> list[list[int]]:
    """Give each item, longest first, to the lightest part that has room for one more."""
    order = np.argsort(-lengths, kind="stable")
    members: list[list[int]] = [[] for _ in range(parts)]
    # One integer a part, load · parts + part: compared faster than a tuple, and ties go to the lower part.
    heap = list(range(parts))
    for item, length in zip(order.tolist(), (lengths[order] * parts).tolist(), strict=True):
        lightest = heap[0]
        chosen = members[lightest % parts]
        chosen.append(item)
        if size is not None and len(chosen) == size:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, lightest + length)
    return members


def _columns(width: int, pairs: int) -> np.ndarray:
    """Which slots of a part take part in swaps: all of them where that is affordable, else evenly many."""
    wanted = max(2, math.isqrt(_CANDIDATES // max(pairs, 1)))
    return np.arange(width) if width <= wanted else np.unique(np.linspace(0, width - 1, wanted).astype(int))


def _swap(slots: np.ndarray, lengths: np.ndarray) -> None:
    """Swap slots of heavy and light parts, heaviest with lightest, while that lowers the heavier of a pair.

    slots: item of each slot, `parts width`; the last entry of lengths, 0, stands for an empty slot, so that a swap with
    it is a move.
    """
    parts, width = slots.shape
    loads = lengths[slots].sum(axis=1, dtype=lengths.dtype)
    target = max(loads.mean(), lengths.max()) * (1.0 + _TOLERANCE)
    shift = 0
    for _ in range(_ROUNDS):
        pairs = min(int((loads > target).sum()), parts // 2, _PAIRS)
        if pairs == 0 or shift > parts - 2 * pairs:
            return
        order = np.argsort(loads, kind="stable")
        heavy, light = order[::-1][:pairs], order[shift : shift + pairs]
        columns = _columns(width, pairs)
        here = np.arange(pairs)
        gap = loads[heavy] - loads[light]
        taken, given = lengths[slots[heavy][:, columns]], lengths[slots[light][:, columns]]
        moved = (taken[:, :, None] - given[:, None, :]).reshape(pairs, -1)
        remaining = np.abs(gap[:, None] - 2 * moved)
        best = remaining.argmin(axis=1)
        better = remaining[here, best] < gap
        if not better.any():
            # None of these light parts has what these heavy ones lack: try the next lightest.
            shift += pairs
            continue
        out, back = columns[best // columns.size][better], columns[best % columns.size][better]
        moved = moved[here, best][better]
        heavy, light = heavy[better], light[better]
        slots[heavy, out], slots[light, back] = slots[light, back], slots[heavy, out]
        loads[heavy] -= moved
        loads[light] += moved


def balance(lengths: Sequence[int] | np.ndarray, parts: int, *, equal_size: bool = False) -> list[np.ndarray]:
    """Partition items into parts whose total lengths are nearly equal.

    Longest processing time first (each item, longest first, to the lightest part), then swaps between heavy and light
    parts until the heaviest is within 0.1 % of the mean or no swap helps. No part can be lighter than its longest item:
    with few parts' worth of very long items max/mean stays above 1.

    Args:
        lengths: N lengths ≥ 0, in tokens or in whatever the cost is.
        parts: number of parts ≥ 1; with fewer items than parts some stay empty.
        equal_size: every part gets exactly N / parts items.

    Returns:
        One ascending array of indices into lengths for each part; every index is in exactly one.

    Raises:
        ValueError: for negative or non-integer lengths, parts < 1, or equal_size where parts does not divide N.

    Reference:
        Graham, Bounds on Multiprocessing Timing Anomalies (1969): LPT is within 4/3 of the optimum.

    >>> [part.tolist() for part in balance([5, 4, 3, 3, 3], 2)]
    [[0, 1], [2, 3, 4]]

    """
    array = as_lengths(lengths)
    require(parts >= 1, f"parts must be at least 1, got {parts}")
    divisible = array.size % parts == 0
    require(divisible or not equal_size, f"equal_size needs parts to divide the items, got {array.size} in {parts}")
    members = _longest_first(array, parts, array.size // parts if equal_size else None)
    empty = array.size
    sizes = np.fromiter(map(len, members), np.int64, parts)
    width = int(sizes.max()) + (0 if equal_size else 1)
    slots = np.full((parts, width), empty)
    slots[np.arange(width) < sizes[:, None]] = np.fromiter(itertools.chain.from_iterable(members), np.int64, array.size)
    if array.size and parts > 1:
        # Narrow integers where twice the total still fits: the search for swaps is bound by memory.
        narrow = np.int32 if 2 * int(array.sum()) < 2**31 else np.int64
        _swap(slots, np.append(array, 0).astype(narrow))
    owner = np.zeros(array.size + 1, np.int64)
    owner[slots] = np.arange(parts)[:, None]
    return np.split(np.argsort(owner[:-1], kind="stable"), np.cumsum(np.bincount(owner[:-1], minlength=parts))[:-1])
