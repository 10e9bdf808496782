"""Rows of several sequences, on the host: bins of a capacity, zigzag shards, and the ids that keep sequences apart."""

import bisect
from collections.abc import Sequence

import numpy as np

from rl_fn._numerics import require
from rl_fn.packing.balance import as_lengths


def pack(lengths: Sequence[int] | np.ndarray, capacity: int) -> list[np.ndarray]:
    """Pack items into few bins of one capacity, best fit decreasing.

    Each item, longest first, goes where it leaves the least room; a new bin is opened only where it fits in none.

    Args:
        lengths: N lengths ≥ 0.
        capacity: what a bin holds, in the same units.

    Returns:
        One ascending array of indices into lengths for each bin, in the order the bins were opened; every index is in
        exactly one, and no bin's lengths sum to more than the capacity.

    Raises:
        ValueError: for negative or non-integer lengths, or a length above the capacity.

    Reference:
        Johnson et al., Worst-Case Performance Bounds for Simple One-Dimensional Packing Algorithms (1974): at most
        11/9 of the fewest bins, plus 4.

    >>> [bin.tolist() for bin in pack([4, 8, 1, 4, 2, 1], 10)]
    [[1, 4], [0, 2, 3, 5]]

    """
    array = as_lengths(lengths)
    longest = int(array.max(initial=0))
    require(longest <= capacity, f"a length of {longest} does not fit into a capacity of {capacity}")
    order = np.argsort(-array, kind="stable")
    bins: list[list[int]] = []
    # Ascending (room, bin): the first entry with room enough is the best fit, the older bin on ties.
    rooms: list[tuple[int, int]] = []
    for item, length in zip(order.tolist(), array[order].tolist(), strict=True):
        place = bisect.bisect_left(rooms, (length, -1))
        if place < len(rooms):
            room, chosen = rooms.pop(place)
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(item)
        bisect.insort(rooms, (room - length, chosen))
    return [np.sort(np.asarray(items, np.int64)) for items in bins]


def _row(lengths: Sequence[int] | np.ndarray, size: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of a row's sequences, the padding being a last one, and where each starts."""
    array = as_lengths(lengths)
    total = int(array.sum())
    size = total if size is None else size
    require(total <= size, f"sequences of {total} tokens do not fit into a row of {size}")
    array = np.append(array, size - total)
    return array, np.cumsum(array) - array


def segment_ids(lengths: Sequence[int] | np.ndarray, *, size: int | None = None) -> np.ndarray:
    """Return, for each position of a packed row, the number of the sequence it belongs to.

    Args:
        lengths: of the row's sequences, in order.
        size: length of the row; the padding after the last sequence gets the next id. Without it there is none.

    Returns:
        int32, `size`: 0, 1, 2, …, each as often as its sequence is long.

    Raises:
        ValueError: if the sequences are longer than the row.

    Reference:
        Krell et al., Efficient Sequence Packing without Cross-contamination, arXiv 2107.02027.

    >>> segment_ids([2, 3], size=6).tolist()
    [0, 0, 1, 1, 1, 2]

    """
    array, _ = _row(lengths, size)
    return np.repeat(np.arange(array.size, dtype=np.int32), array)


def position_ids(lengths: Sequence[int] | np.ndarray, *, size: int | None = None) -> np.ndarray:
    """Position of each token in its own sequence, in a packed row.

    Args:
        lengths: of the row's sequences, in order.
        size: length of the row; the padding after the last sequence counts from 0 too. Without it there is none.

    Returns:
        int32, `size`.

    Raises:
        ValueError: if the sequences are longer than the row.

    Reference:
        Krell et al., Efficient Sequence Packing without Cross-contamination, arXiv 2107.02027.

    >>> position_ids([2, 3], size=6).tolist()
    [0, 1, 0, 1, 2, 0]

    """
    array, starts = _row(lengths, size)
    return (np.arange(int(array.sum())) - np.repeat(starts, array)).astype(np.int32)
