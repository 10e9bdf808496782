"""The running mean that curves are drawn with, in the report and in curves.png."""

from collections.abc import Sequence

import numpy as np

LEAST = 41
"""A curve of fewer points is drawn as it is."""


def running_mean(values: Sequence[float]) -> np.ndarray | None:
    """Mean of the points around each, a twentieth of all; at the ends of those that there are. None for few points.

    >>> running_mean([0.0] * 40) is None, running_mean(range(60))[[0, 30, 59]].tolist()
    (True, [0.5, 30.0, 58.5])
    """
    count = len(values)
    if count < LEAST:
        return None
    half, places = count // 40, np.arange(count)
    first, behind = np.maximum(0, places - half), np.minimum(count, places + half + 1)
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(values, np.float64))])
    return (sums[behind] - sums[first]) / (behind - first)
