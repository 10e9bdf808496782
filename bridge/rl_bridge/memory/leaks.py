"""Whether memory grows from step to step: a sign test, and a slope that single jumps do not move."""

from collections.abc import Sequence
from itertools import pairwise
from math import comb
from statistics import median
from typing import NamedTuple

SURE = 1e-4
"""The chance that a run which only fluctuates is called a leak, at one look."""
LEAST = 0.002
"""Growth over the steps looked at, as a share of what is there, below which nothing is said."""


class Growth(NamedTuple):
    """``per_step``: the median of the slopes of all pairs of steps; ``chance``: of so many rises without a leak."""

    per_step: float
    steps: int
    chance: float


def growth(sizes: Sequence[float]) -> Growth | None:
    """How ``sizes``, of the ends of steps, grow; None where that is no leak.

    A change from step to step is a rise or a fall, and one of 0 is neither. Without a leak rises are at most as likely
    as falls. A checkpoint's buffers or a cache that is made once is one rise.

    >>> growth([100, 110, 120, 130, 140, 150, 160, 170, 180, 190, 200, 210, 220, 230, 240]).per_step
    10.0
    >>> growth([100] * 10 + [500] * 10) is None
    True
    """
    changes = [b - a for a, b in pairwise(sizes) if b != a]
    rises, count = sum(change > 0 for change in changes), len(changes)
    chance = sum(comb(count, k) for k in range(rises, count + 1)) / 2**count if count else 1.0
    if chance > SURE:
        return None
    slopes = [(b - a) / (j - i) for i, a in enumerate(sizes) for j, b in enumerate(sizes[i + 1 :], i + 1)]
    slope = median(slopes)
    if slope * len(sizes) <= LEAST * median(sizes):
        return None
    return Growth(slope, len(sizes), chance)
