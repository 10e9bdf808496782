"""Whether a gain is more than noise: its bootstrap confidence interval."""

from collections.abc import Sequence

import numpy as np

CHUNK = 2**18
"""Numbers of the resamples that are drawn together."""


def confidence_interval(
    after: Sequence[float], before: Sequence[float], *, level: float = 0.95, resamples: int = 10_000
) -> dict[str, float]:
    """Mean of ``after − before`` over the same rows, with the paired bootstrap's percentile interval.

    Rows are resampled: the interval covers the choice of held-out rows, and not the choice of the training seed.

    >>> confidence_interval([1.0, 1.0, 1.0], [0.0, 0.0, 0.0])
    {'mean': 1.0, 'low': 1.0, 'high': 1.0, 'level': 0.95}
    """
    if len(after) != len(before) or not len(after):
        raise ValueError(f"need the same rows before and after, got {len(before)} and {len(after)}")
    difference = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    generator, rows = np.random.default_rng(0), len(difference)
    # A chunk of resamples at a time: all of them at once would take gigabytes for ten thousand rows.
    chunk = max(1, CHUNK // rows)
    sizes = [(min(chunk, resamples - start), rows) for start in range(0, resamples, chunk)]
    means = np.concatenate([difference[generator.integers(rows, size=size)].mean(1) for size in sizes])
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return {"mean": float(difference.mean()), "low": float(low), "high": float(high), "level": level}
