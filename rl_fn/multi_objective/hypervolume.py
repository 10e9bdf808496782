"""Exact hypervolume of a set of points, on the host in float64: a sweep in two dimensions, WFG's recursion above."""

from collections.abc import Sequence

import numpy as np

from rl_fn._numerics import require


def _gains(points: np.ndarray, reference: np.ndarray | Sequence[float], maximize: bool | Sequence[bool]) -> np.ndarray:
    """How far each point is past the reference, `N M`, larger is better; not past it counts as 0 volume."""
    array = np.asarray(points, np.float64)
    require(array.ndim == 2, f"points must be N M, got shape {array.shape}")
    origin = np.asarray(reference, np.float64)
    require(origin.shape == array.shape[1:], f"reference must have shape {array.shape[1:]}, got {origin.shape}")
    up = np.asarray(maximize)
    require(up.shape in ((), origin.shape), f"maximize must be one flag or {origin.size}, got {maximize}")
    finite = np.isfinite(array).all() and np.isfinite(origin).all()
    require(bool(finite), "points and reference must be finite: the volume of anything else is undefined")
    return np.where(up, array - origin, origin - array)


def _front(gains: np.ndarray) -> np.ndarray:
    """Return the distinct points that no other dominates."""
    distinct = np.unique(gains, axis=0)
    dominated = [bool(((distinct >= p).all(axis=1) & (distinct > p).any(axis=1)).any()) for p in distinct]
    return distinct[~np.array(dominated, bool)]


def _volume(gains: np.ndarray) -> float:
    """Volume of the union of the boxes [0, gain]."""
    gains = gains[(gains > 0).all(axis=1)]
    if gains.shape[0] <= 1 or gains.shape[1] == 1:
        return float(gains.prod(axis=1).max(initial=0.0))
    if gains.shape[1] == 2:
        descending = gains[np.argsort(-gains[:, 0], kind="stable")]
        heights = np.maximum.accumulate(descending[:, 1])
        return float(descending[:, 0] @ np.diff(heights, prepend=0.0))
    # Worst first in the last objective: what a point's rest is limited to then lies in one hyperplane, so that the
    # recursion loses a dimension at every level (WFG's slicing).
    front = _front(gains)
    front = front[np.argsort(front[:, -1], kind="stable")]
    total = 0.0
    for i, point in enumerate(front):
        limited = np.minimum(front[i + 1 :, :-1], point[:-1])
        total += point[-1] * (float(point[:-1].prod()) - _volume(limited))
    return total


def hypervolume(
    points: np.ndarray, reference: np.ndarray | Sequence[float], *, maximize: bool | Sequence[bool]
) -> float:
    """Exact hypervolume: how much of the objective space a set of points dominates, down to a reference point.

    HV = volume of ∪ᵢ [reference, pointᵢ]

    Args:
        points: `N M`, N points with M objectives; dominated and repeated ones add nothing.
        reference: `M`, worse than what is to count; a point that is not better in every objective adds nothing.
        maximize: True where larger is better; one flag, or one for each objective.

    Returns:
        The volume ≥ 0, in float64; 0 without points. The work grows exponentially with M in the worst case.

    Raises:
        ValueError: for shapes that do not match, or values that are not finite.

    Reference:
        Zitzler and Thiele, Multiobjective Evolutionary Algorithms: A Comparative Case Study (1999), for the indicator;
        While, Bradstreet and Barone, A Fast Way of Calculating Exact Hypervolumes (2012), for the recursion.

    >>> import numpy as np
    >>> hypervolume(np.array([[1.0, 3.0], [2.0, 2.0], [3.0, 1.0]]), [0.0, 0.0], maximize=True)
    6.0

    """
    return _volume(_gains(points, reference, maximize))


def hypervolume_contribution(
    points: np.ndarray, reference: np.ndarray | Sequence[float], *, maximize: bool | Sequence[bool]
) -> np.ndarray:
    """Exclusive volume of each point: what the hypervolume would lose without it.

    HVᵢ = HV(all) − HV(all without i)

    Args:
        points: `N M`, N points with M objectives.
        reference: `M`, as in hypervolume.
        maximize: True where larger is better; one flag, or one for each objective.

    Returns:
        `N`, float64, ≥ 0; 0 for dominated and for repeated points. Computed inside each point's own box, so a small
        contribution does not drown in the rounding of a large total.

    Raises:
        ValueError: for shapes that do not match, or values that are not finite.

    Reference:
        While, Bradstreet and Barone, A Fast Way of Calculating Exact Hypervolumes (2012).

    >>> import numpy as np
    >>> hypervolume_contribution(np.array([[1.0, 3.0], [2.0, 2.0], [3.0, 1.0]]), [0.0, 0.0], maximize=True).tolist()
    [1.0, 1.0, 1.0]

    """
    gains = _gains(points, reference, maximize)
    own = [
        float(point.prod()) - _volume(np.minimum(np.delete(gains, i, axis=0), point)) if (point > 0).all() else 0.0
        for i, point in enumerate(gains)
    ]
    return np.maximum(np.asarray(own, np.float64), 0.0)
