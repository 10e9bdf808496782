"""Groups of runs compared at an equal step, with intervals over their seeds."""

from collections.abc import Mapping, Sequence
from typing import Any

from rl_bridge.report.curves import order, section_of
from rl_bridge.report.grouping import Group
from rl_bridge.report.reading import RunFiles
from rl_bridge.report.series import Column, columns_of, short
from rl_bridge.tracking.intervals import over_seeds

COMPARED = ("Outcome", "Policy", "Rollouts", "Speed")
WINDOW = 10
"""A metric of every step is its mean over the last tenth of the steps, 1/WINDOW."""


def comparison(stage: str, runs: Sequence[RunFiles], groups: Sequence[Group]) -> dict[str, Any] | None:
    """The metrics of a stage that all groups have, at the last step that all runs have; None for a single group.

    Each group has the mean over its runs and its difference to the first group, paired by seed, where they have two
    seeds or more in common. Both have Student's interval from three runs on.
    """
    records = [[record for record in run.records if record["stage"] == stage] for run in runs]
    if len(groups) < 2 or not all(records):
        return None
    last = min(of_run[-1]["step"] for of_run in records)
    until = [[record for record in of_run if record["step"] <= last] for of_run in records]
    columns = [columns_of(of_run) for of_run in until]
    names = [
        name
        for name in sorted(columns[0], key=order)
        if section_of(name) in COMPARED
        and not name.endswith(("_low", "_high"))
        and all(final(of_run.get(name)) is not None for of_run in columns)
    ]
    rows = [{"name": name, "groups": _of_groups(name, columns, runs, groups)} for name in names]
    return {"step": last, "rows": rows}


def final(column: Column | None) -> float | None:
    """What a run has come to: the last entry of a metric that few steps have, else the mean over the last tenth.

    >>> final([None, 0.5, None, None]), final([1.0] * 18 + [2.0, 4.0])
    (0.5, 3.0)
    """
    there = [value for value in column or () if value is not None]
    if column is None or not there:
        return None
    count = max(1, len(there) // WINDOW) if 2 * len(there) > len(column) else 1
    return sum(there[-count:]) / count


def _of_groups(
    name: str, columns: Sequence[Mapping[str, Column]], runs: Sequence[RunFiles], groups: Sequence[Group]
) -> list[dict[str, Any]]:
    values = [{runs[place].seed: _final(columns[place], name) for place in group.runs} for group in groups]
    found = []
    for place, group in enumerate(groups):
        own = [_final(columns[run], name) for run in group.runs]
        entry: dict[str, Any] = {"mean": short(sum(own) / len(own)), "runs": len(own)}
        if len(own) > 1:
            entry |= _ends(over_seeds(own))
        common = [seed for seed in values[0] if place and seed is not None and seed in values[place]]
        if len(common) > 1:
            pairs = [values[place][seed] for seed in common], [values[0][seed] for seed in common]
            paired = over_seeds(*pairs)
            entry["difference"] = {"mean": short(paired["mean"]), "seeds": len(common), **_ends(paired)}
        found.append(entry)
    return found


def _final(columns: Mapping[str, Column], name: str) -> float:
    value = final(columns[name])
    assert value is not None, name
    return value


def _ends(interval: Mapping[str, float]) -> dict[str, float | None]:
    return {"low": short(interval["low"]), "high": short(interval["high"])}
