"""Statistics of a run's numbers: confidence intervals, and the running mean of a curve."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.special import stdtrit

# Confidence intervals of a mean: over many rows by the bootstrap, over few values by Student's t.

CHUNK = 2**18
"""Numbers of the resamples that are drawn together."""
FEW = 30
"""Below so many values a bootstrap's interval is too narrow."""
LEAST = 3
"""Seeds without which there is no interval. Student's t of two is valid, and 9 times as wide as they are apart."""
LEVEL = 0.95


def confidence_interval(
    after: Sequence[float], before: Sequence[float], *, resamples: int = 10_000
) -> dict[str, float]:
    """Mean of ``after − before`` over the same rows, with its interval: of 30 rows or more by the paired bootstrap.

    Rows are resampled: the interval covers the choice of held-out rows, and not the choice of the training seed. Of
    fewer rows it is Student's t; a single row has no interval but itself.

    >>> confidence_interval([1.0, 1.0, 1.0], [0.0, 0.0, 0.0])
    {'mean': 1.0, 'low': 1.0, 'high': 1.0, 'level': 0.95}
    """
    difference = _differences(after, before)
    if len(difference) < FEW:
        mean, low, high = map(float, student(difference))
        return {"mean": mean, "low": low, "high": high, "level": LEVEL}
    generator, rows = np.random.default_rng(0), len(difference)
    # A chunk of resamples at a time: all of them at once would take gigabytes for ten thousand rows.
    chunk = max(1, CHUNK // rows)
    sizes = [(min(chunk, resamples - start), rows) for start in range(0, resamples, chunk)]
    means = np.concatenate([difference[generator.integers(rows, size=size)].mean(1) for size in sizes])
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return {"mean": float(difference.mean()), "low": float(low), "high": float(high), "level": LEVEL}


def over_seeds(values: Sequence[float], before: Sequence[float] | None = None) -> dict[str, Any]:
    """Mean of a number of each seed, or of ``values − before`` seed by seed, with Student's 95 % interval.

    ``low`` and ``high`` are None for fewer than three seeds; ``count`` says how many there are.

    >>> over_seeds([1.0, 2.0, 3.0])["count"], over_seeds([0.0, 1.0])["low"]
    (3, None)
    """
    difference = _differences(values, [0.0] * len(values) if before is None else before)
    mean, low, high = map(float, student(difference))
    count = len(difference)
    ends = {"low": low, "high": high} if count >= LEAST else {"low": None, "high": None}
    return {"mean": mean, **ends, "level": LEVEL, "count": count}


def over_units(sums: Sequence[float], counts: Sequence[float]) -> dict[str, Any]:
    """Σ sums / Σ counts, as of a number of each token over prompts that are independent, with its 95 % interval.

    Tokens of one prompt are alike: the prompts are what there are ``count`` of. The interval is Student's, of the
    jackknife over prompts, and of the mean's logarithm, since such means are skewed. ``low`` and ``high`` are None for
    fewer than three prompts. In simulations it has the truth 92 to 94 % of the time.

    >>> over_units([2.0, 4.0], [1, 2])
    {'mean': 2.0, 'low': None, 'high': None, 'level': 0.95, 'count': 2}
    """
    total, size = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    if len(total) != len(size) or not size.sum() > 0 or (total < 0).any():
        raise ValueError(f"need sums of 0 or more, as many as counts, and a count above 0, got {sums} and {counts}")
    mean, count = float(total.sum() / size.sum()), len(total)
    interval: dict[str, Any] = {"mean": mean, "low": None, "high": None, "level": LEVEL, "count": count}
    remaining_size = size.sum() - size
    if count < LEAST or not (remaining_size > 0).all():
        return interval
    without = (total.sum() - total) / remaining_size
    whole = bool((without > 0).all())  # else there is no logarithm
    scaled, parts = (np.log(mean), np.log(without)) if whole else (mean, without)
    centre, low, high = student(count * scaled - (count - 1) * parts)
    low, high = scaled + (low - centre), scaled + (high - centre)
    ends = (np.exp(low), np.exp(high)) if whole else (max(0.0, low), high)
    return interval | {"low": float(ends[0]), "high": float(ends[1])}


def student(rows: np.ndarray, *, level: float = LEVEL) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean of [n, ...] over n, and both ends of Student's interval: mean ± t · s / √n with n − 1 degrees of freedom."""
    count, mean = len(rows), rows.mean(0)
    if count < 2:
        return mean, mean, mean
    half = stdtrit(count - 1, (1 + level) / 2) * rows.std(0, ddof=1) / np.sqrt(count)
    return mean, mean - half, mean + half


def _differences(after: Sequence[float], before: Sequence[float]) -> np.ndarray:
    if len(after) != len(before) or not len(after):
        raise ValueError(f"need the same rows before and after, got {len(before)} and {len(after)}")
    return np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)


# The running mean that curves are drawn with, in the report and in curves.png.

LEAST_POINTS = 41
"""A curve of fewer points is drawn as it is."""


def running_mean(values: Sequence[float]) -> np.ndarray | None:
    """Mean of the points around each, a twentieth of all; at the ends of those that there are. None for few points.

    >>> running_mean([0.0] * 40) is None, running_mean(range(60))[[0, 30, 59]].tolist()
    (True, [0.5, 30.0, 58.5])
    """
    count = len(values)
    if count < LEAST_POINTS:
        return None
    half, places = count // 40, np.arange(count)
    first, behind = np.maximum(0, places - half), np.minimum(count, places + half + 1)
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(values, np.float64))])
    return (sums[behind] - sums[first]) / (behind - first)
