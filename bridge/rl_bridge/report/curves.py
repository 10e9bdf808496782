"""Panels of curves: one a metric of a stage, with a line a run and a band a group of runs."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl_bridge.report.grouping import Group
from rl_bridge.report.reading import RunFiles
from rl_bridge.report.series import (
    CLOCKS,
    Column,
    buckets,
    clocks_of,
    columns_of,
    ends_of,
    packed,
    short,
    smoothed,
    thinned,
    thinned_clock,
)
from rl_bridge.tracking.intervals import LEAST, student

SECTIONS: dict[str, tuple[str, ...]] = {
    "Outcome": ("held_out", "reward", "accuracy", "pass@", "loss", "nll", "margin"),
    "Policy": (
        "kl", "approx_kl", "entropy", "clip_fraction", "ratio", "informative", "policy_loss", "grad_norm",
        "learning_rate", "reward_kl", "skipped",
    ),
    "Critic": ("critic", "value", "explained"),
    "Rollouts": ("tokens", "turns", "errors", "mismatch", "corrected", "staleness", "versions", "aborted", "truncated"),
    "Speed": ("tokens_per_second", "step_seconds", "trainer_idle_seconds", "rollout_idle_seconds"),
}  # fmt: skip
"""Title → how the names of its metrics begin, in the order of the page."""


BEFORE = {("policy", "held_out"): "accuracy_before"}
"""Stage and metric → the entry of summary.json that has its value before the stage."""


def section_of(name: str) -> str:
    """Where a metric is shown: under its whole name, or the longest beginning of it.

    >>> section_of("tokens_per_second"), section_of("mismatch/alarm"), section_of("own")
    ('Speed', 'Rollouts', 'Others')
    """
    starts = [(len(start), title) for title, names in SECTIONS.items() for start in names if name.startswith(start)]
    return max(starts)[1] if starts else "Others"


def curves(runs: Sequence[RunFiles], groups: Sequence[Group]) -> dict[str, Any]:
    """``stages``: for each, the clocks of runs and groups and the panels, in the order of the page."""
    stages = list(dict.fromkeys(record["stage"] for run in runs for record in run.records))
    return {stage: _stage(stage, runs, groups) for stage in stages}


def _stage(stage: str, runs: Sequence[RunFiles], groups: Sequence[Group]) -> dict[str, Any]:
    records = [[record for record in run.records if record["stage"] == stage] for run in runs]
    before = [_tokens_before(run, stage) for run in runs]
    clocks = [clocks_of(of_run, tokens) for of_run, tokens in zip(records, before, strict=True)]
    columns = [columns_of(of_run) for of_run in records]
    parts = [buckets(len(of_run)) for of_run in records]
    names = sorted(dict.fromkeys(name for of_run in columns for name in of_run), key=order)
    bounds = {f"{name}_{end}" for name in names for end in ("low", "high")}
    shown = [name for name in names if name not in bounds and any(_there(of_run.get(name)) for of_run in columns)]
    several = {place: group for place, group in enumerate(groups) if len(group.runs) > 1}
    shared = {place: _shared([clocks[run]["step"] for run in group.runs]) for place, group in several.items()}
    return {
        "clocks": [
            {name: thinned_clock(times[name], cut) for name in CLOCKS} for times, cut in zip(clocks, parts, strict=True)
        ],
        "group_clocks": {place: _group_clocks(group, clocks, shared[place]) for place, group in several.items()},
        "panels": [
            {
                "name": name,
                "section": section_of(name),
                "lines": {
                    run: _line(name, of_run, parts[run])
                    for run, of_run in enumerate(columns)
                    if _there(of_run.get(name))
                },
                "bands": {
                    place: made
                    for place, group in several.items()
                    if (made := _band([columns[run].get(name) for run in group.runs], shared[place])) is not None
                },
                "before": {
                    run: value
                    for run, files in enumerate(runs)
                    if (value := short(files.summary.get(BEFORE.get((stage, name), "")))) is not None
                },
            }
            for name in shown
        ],
    }


def _line(name: str, columns: Mapping[str, Column], parts: Sequence[range]) -> dict[str, Any]:
    line: dict[str, Any] = packed(thinned(columns[name], parts)) | _mean(columns[name], parts)
    ends = {end: columns.get(f"{name}_{end}") for end in ("low", "high")}
    for end, column in ends.items():
        if column is not None and not parts:
            line[end] = [column[place] for place in line["at"]] if "at" in line else column
    return line


def _shared(steps: Sequence[Sequence[float]]) -> list[list[int]]:
    """For each run the places of those steps that all runs have."""
    common = sorted(set.intersection(*map(set, steps)))
    places = [{step: place for place, step in enumerate(of_run)} for of_run in steps]
    return [[of_run[step] for step in common] for of_run in places]


def _group_clocks(
    group: Group, clocks: Sequence[Mapping[str, list[float]]], shared: Sequence[Sequence[int]]
) -> dict[str, list[float | None]]:
    """Mean of the runs' clocks at the steps that all of them have."""
    found: dict[str, list[float | None]] = {}
    for name in CLOCKS:
        rows = [[clocks[run][name][place] for place in own] for run, own in zip(group.runs, shared, strict=True)]
        mean = np.mean(np.array(rows, np.float64), axis=0) if rows[0] else np.zeros(0)
        found[name] = [short(x) for x in _first_of_parts(mean)]
    return found


def _band(columns: Sequence[Column | None], shared: Sequence[Sequence[int]]) -> dict[str, Any] | None:
    """Mean and interval over runs, at the steps where all of them have the metric."""
    if any(column is None for column in columns) or not shared[0]:
        return None
    values = np.array(
        [[column[place] for place in own] for column, own in zip(columns, shared, strict=True) if column is not None],
        np.float64,
    )
    whole = ~np.isnan(values).any(0)
    if not whole.any():
        return None
    made = np.full((3, values.shape[1]), np.nan)
    made[:, whole] = student(values[:, whole])
    mean, low, high = ([short(float(x)) for x in _first_of_parts(row)] for row in made)
    line: dict[str, Any] = packed(mean) | _mean([short(float(x)) for x in made[0]], buckets(values.shape[1]))
    if len(columns) < LEAST:
        return line
    places = line.get("at", range(len(mean)))
    return {**line, "low": [low[place] for place in places], "high": [high[place] for place in places]}


def _first_of_parts(row: np.ndarray) -> np.ndarray:
    parts = buckets(len(row))
    return row if not parts else row[[place for part in parts for place in (part[0], part[-1])]]


def _mean(column: Column, parts: Sequence[range]) -> dict[str, Column]:
    """``mean``: the running mean of the whole column at the points that are drawn, where there are enough."""
    smooth = smoothed(column)
    if smooth is None:
        return {}
    drawn, means = thinned(column, parts), ends_of(smooth, parts)
    kept = packed(drawn).get("at", range(len(drawn)))
    return {"mean": [short(means[place]) for place in kept]}


def _there(column: Column | None) -> bool:
    return column is not None and any(value is not None for value in column)


def order(name: str) -> tuple[int, int, str]:
    """Sorts metrics as the page has them."""
    section = section_of(name)
    starts = SECTIONS.get(section, ())
    place = next((i for i, start in enumerate(starts) if name == start), len(starts))
    return [*SECTIONS, "Others"].index(section), place, name


def _tokens_before(run: RunFiles, stage: str) -> float:
    """Trained on in the stages before this one."""
    tokens = 0.0
    for record in run.records:
        if record["stage"] == stage:
            break
        tokens += record.get("trained_tokens", 0)
    return tokens
