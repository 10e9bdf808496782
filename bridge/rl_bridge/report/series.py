"""Curves of a run: every number of its record over several clocks, in few enough points, with the extremes kept."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rl_bridge.tracking.smoothing import running_mean

CLOCKS = ("step", "tokens", "seconds", "version")
ABOUT = {"stage", "step", "run", "attempt", "time", "seconds", "weights_version", "optimizer_step", "trained_tokens"}
"""Entries of a record that are no metric."""
POINTS = 1000
"""Of a curve at most, in the page."""
Column = list[float | None]


def short(value: Any) -> float | None:
    """A number in six digits; None for what is no finite number.

    >>> short(0.123456789), short(float("nan")), short(None)
    (0.123457, None, None)
    """
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(f"{value:.6g}") if number else None


def clocks_of(records: Sequence[Mapping[str, Any]], tokens_before: float = 0.0) -> dict[str, list[float]]:
    """Step, tokens trained on so far, seconds and weights version at each record of a stage.

    ``tokens_before``: of earlier stages. A version that was not recorded is the one before it.
    """
    tokens, version = tokens_before, 0.0
    found: dict[str, list[float]] = {name: [] for name in CLOCKS}
    for record in records:
        tokens += record.get("trained_tokens", 0)
        version = record.get("weights_version", version)
        for name, value in zip(CLOCKS, (record["step"], tokens, record["seconds"], version), strict=True):
            found[name].append(value)
    return found


def columns_of(records: Sequence[Mapping[str, Any]]) -> dict[str, Column]:
    """Every metric that a record has, an entry a record; besides ``step_seconds``, the time since the record before."""
    names = dict.fromkeys(
        name for record in records for name, value in record.items() if name not in ABOUT and _is_number(value)
    )
    found: dict[str, Column] = {name: [short(record.get(name)) for record in records] for name in names}
    found["step_seconds"] = step_seconds(records)
    return found


def step_seconds(records: Sequence[Mapping[str, Any]]) -> Column:
    """Time of each step: since the record before it; of the first one it is not known."""
    seconds = [record["seconds"] for record in records]
    return [None, *(short(max(0.0, b - a)) for a, b in pairwise(seconds))][: len(records)]


def buckets(count: int, points: int = POINTS) -> list[range]:
    """Runs of places that are drawn as two points each; [] where every place has a point.

    >>> buckets(5, 4), buckets(4, 4)
    ([range(0, 2), range(2, 5)], [])
    """
    if count <= points:
        return []
    parts = max(1, points // 2)
    cuts = [count * part // parts for part in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(cuts)]


def thinned(column: Column, parts: Sequence[range]) -> Column:
    """Smallest and largest entry of each part, in the order in which they came. Without parts, the column itself.

    >>> thinned([1.0, 9.0, 3.0, None, 4.0, 2.0], [range(0, 3), range(3, 6)])
    [1.0, 9.0, 4.0, 2.0]
    """
    if not parts:
        return column
    found: Column = []
    for part in parts:
        there = [(value, place) for place in part if (value := column[place]) is not None]
        if there:
            pair = sorted([min(there, key=lambda x: x[0]), max(there, key=lambda x: x[0])], key=lambda x: x[1])
            found += [value for value, _ in pair]
        else:
            found += [None, None]
    return found


def thinned_clock(clock: Sequence[float], parts: Sequence[range]) -> list[float]:
    """First and last time of each part, for the two points that ``thinned`` makes of it."""
    return list(clock) if not parts else [clock[place] for part in parts for place in (part[0], part[-1])]


def packed(column: Column) -> dict[str, Any]:
    """The column for the page: ``y``, and where most entries are missing ``at``, the places of the others.

    >>> packed([None, None, 0.5, None])
    {'y': [0.5], 'at': [2]}
    """
    there = [place for place, value in enumerate(column) if value is not None]
    if 2 * len(there) > len(column):
        return {"y": column}
    return {"y": [column[place] for place in there], "at": there}


def smoothed(column: Column) -> Column | None:
    """The running mean at each place that has a value, over all values of the column; None for few of them.

    What is drawn of a long column are its extremes: a mean of those would be none of the column.
    """
    there = [place for place, value in enumerate(column) if value is not None]
    means = running_mean([value for value in column if value is not None])
    if means is None:
        return None
    found: Column = [None] * len(column)
    for place, mean in zip(there, means.tolist(), strict=True):
        found[place] = mean
    return found


def ends_of(column: Column, parts: Sequence[range]) -> Column:
    """First and last value of each part, at the times of ``thinned_clock``. Without parts, the column itself.

    >>> ends_of([1.0, 9.0, 3.0, None, 4.0, 2.0], [range(0, 3), range(3, 6)])
    [1.0, 3.0, 4.0, 2.0]
    """
    if not parts:
        return column
    found: Column = []
    for part in parts:
        there = [value for place in part if (value := column[place]) is not None]
        found += [there[0], there[-1]] if there else [None, None]
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
