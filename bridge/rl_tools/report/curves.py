"""Curves of runs and of groups of runs that differ in nothing but the seed, and the groups compared."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_bridge.common.statistics import LEAST, over_seeds, student
from rl_bridge.run.provenance import EVALUATION, HELD_OUT, UNDIVIDED
from rl_tools.report.run_files import (
    CLOCKS,
    Column,
    RunFiles,
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

# Runs that differ in nothing but the seed belong together.

OWN = (
    "name", "output", "resume", "resume_anyway", "seed", "threads", "checkpoint_every", "keep_checkpoints",
    "stop_after_skips", "samples_every", "samples_kept", "trackers", "tracker_output", "tracker_project",
    "system_every",
)  # fmt: skip
"""Options in which runs of one group may differ."""
SPLIT = (HELD_OUT, EVALUATION)
"""Fingerprints in which runs of one group may differ, as the rows that are trained on: the seed chooses which rows are
held out, and draws what is measured. All rows before their split are compared, and so are options and rewards."""


@dataclass(frozen=True)
class Group:
    """``runs`` are places in the report's list of runs."""

    label: str
    runs: list[int]
    options: dict[str, str]
    counted: list[int]
    """One run of each seed: one that is repeated tells nothing of other seeds."""


def options_of(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Every option by its dotted name, as text.

    >>> options_of({"seed": 0, "policy": {"steps": 8, "pass_at": []}})
    {'seed': '0', 'policy.steps': '8', 'policy.pass_at': '[]'}
    """
    options: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            options |= options_of(value, f"{prefix}{name}.")
        else:
            options[prefix + name] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return options


def grouped(runs: Sequence[RunFiles]) -> list[Group]:
    """The groups in the order of their first runs. A label says what tells a group from the others.

    Runs of a group have equal options and inputs: the fingerprints of rows, rewards, models. An option or an input that
    only one of two runs has, as of an older version, is no difference between them.
    """
    options = [options_of(run.config) for run in runs]
    keys = [
        {name: value for name, value in of_run.items() if name not in OWN}
        | {f"content of the {name}": mark for name, mark in _inputs(run.fingerprints).items()}
        for of_run, run in zip(options, runs, strict=True)
    ]
    members: list[list[int]] = []
    for place, key in enumerate(keys):
        same = next((group for group in members if all(_agree(keys[one], key) for one in group)), None)
        if same is None:
            members.append([place])
        else:
            same.append(place)
    differing = differences([keys[group[0]] for group in members])
    return [
        Group(_label(runs, keys, group, differing), group, options[group[0]], _one_of_seeds(runs, group))
        for group in members
    ]


def _inputs(fingerprints: Mapping[str, str]) -> dict[str, str]:
    """The fingerprints that runs of one group have in common."""
    return {
        name: mark
        for name, mark in fingerprints.items()
        if name not in SPLIT and (name != "data" or UNDIVIDED not in fingerprints)
    }


def _one_of_seeds(runs: Sequence[RunFiles], group: Sequence[int]) -> list[int]:
    """The first run of each seed that came to its end, else the first one; those without a seed, all of them."""
    seeds = [runs[place].seed for place in group]
    first: dict[Any, int] = {}
    for place in [*(place for place in group if runs[place].finished), *group]:
        first.setdefault(json.dumps(runs[place].seed), place)
    return [place for place, seed in zip(group, seeds, strict=True) if seed is None or first[json.dumps(seed)] == place]


def differences(options: Sequence[Mapping[str, str]]) -> list[str]:
    """Names of the options that are not the same in all of them."""
    names = dict.fromkeys(name for of_one in options for name in of_one)
    return [name for name in names if len({of_one.get(name) for of_one in options}) > 1]


def _agree(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    return all(one[name] == other[name] for name in one.keys() & other.keys())


def _label(
    runs: Sequence[RunFiles], keys: Sequence[Mapping[str, str]], group: Sequence[int], differing: Sequence[str]
) -> str:
    names = ", ".join(runs[place].name for place in group)
    parts = [f"{name} {keys[group[0]].get(name, '–')}" for name in differing[:3]]
    parts += [f"and {len(differing) - 3} more"] if len(differing) > 3 else []
    label, counted = f"{names}: {', '.join(parts)}" if parts else names, _one_of_seeds(runs, group)
    again = [f"{runs[place].name} (seed {runs[place].seed})" for place in group if place not in counted]
    return f"{label}; not counted, as another run has the seed: {', '.join(again)}" if again else label


# Panels of curves: one a metric of a stage, with a line a run and a band a group of runs.

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
    visible = [name for name in names if name not in bounds and any(_there(of_run.get(name)) for of_run in columns)]
    several = {place: group for place, group in enumerate(groups) if len(group.counted) > 1}
    shared = {place: _shared([clocks[run]["step"] for run in group.counted]) for place, group in several.items()}
    return {
        "clocks": [
            {name: thinned_clock(times[name], part) for name in CLOCKS}
            for times, part in zip(clocks, parts, strict=True)
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
                    place: band
                    for place, group in several.items()
                    if (band := _band([columns[run].get(name) for run in group.counted], shared[place])) is not None
                },
                "before": {
                    run: value
                    for run, files in enumerate(runs)
                    if (value := short(files.summary.get(BEFORE.get((stage, name), "")))) is not None
                },
            }
            for name in visible
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
    clocks_of_group: dict[str, list[float | None]] = {}
    for name in CLOCKS:
        pairs = zip(group.counted, shared, strict=True)
        rows = [[clocks[run][name][place] for place in places] for run, places in pairs]
        mean = np.mean(np.array(rows, np.float64), axis=0) if rows[0] else np.zeros(0)
        clocks_of_group[name] = [short(x) for x in _first_of_parts(mean)]
    return clocks_of_group


def _band(columns: Sequence[Column | None], shared: Sequence[Sequence[int]]) -> dict[str, Any] | None:
    """Mean and interval over runs, at the steps where all of them have the metric."""
    if any(column is None for column in columns) or not shared[0]:
        return None
    values = np.array(
        [
            [column[place] for place in indices]
            for column, indices in zip(columns, shared, strict=True)
            if column is not None
        ],
        np.float64,
    )
    whole = ~np.isnan(values).any(0)
    if not whole.any():
        return None
    ends = np.full((3, values.shape[1]), np.nan)
    ends[:, whole] = student(values[:, whole])
    mean, low, high = ([short(float(x)) for x in _first_of_parts(row)] for row in ends)
    line: dict[str, Any] = packed(mean) | _mean([short(float(x)) for x in ends[0]], buckets(values.shape[1]))
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
    points, means = thinned(column, parts), ends_of(smooth, parts)
    places = packed(points).get("at", range(len(points)))
    return {"mean": [short(means[place]) for place in places]}


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


# Groups of runs compared at an equal step, with intervals over their seeds.

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
    """The final value of a run: the last entry of a metric that few steps have, else the mean over the last tenth.

    >>> final([None, 0.5, None, None]), final([1.0] * 18 + [2.0, 4.0])
    (0.5, 3.0)
    """
    values = [value for value in column or () if value is not None]
    if column is None or not values:
        return None
    count = max(1, len(values) // WINDOW) if 2 * len(values) > len(column) else 1
    return sum(values[-count:]) / count


def _of_groups(
    name: str, columns: Sequence[Mapping[str, Column]], runs: Sequence[RunFiles], groups: Sequence[Group]
) -> list[dict[str, Any]]:
    values = [{runs[place].seed: _final(columns[place], name) for place in group.counted} for group in groups]
    entries = []
    for place, group in enumerate(groups):
        finals = [_final(columns[run], name) for run in group.counted]
        entry: dict[str, Any] = {"mean": short(sum(finals) / len(finals)), "runs": len(finals)}
        if len(finals) > 1:
            entry |= _ends(over_seeds(finals))
        common = [seed for seed in values[0] if place and seed is not None and seed in values[place]]
        if len(common) > 1:
            pairs = [values[place][seed] for seed in common], [values[0][seed] for seed in common]
            paired = over_seeds(*pairs)
            entry["difference"] = {"mean": short(paired["mean"]), "seeds": len(common), **_ends(paired)}
        entries.append(entry)
    return entries


def _final(columns: Mapping[str, Column], name: str) -> float:
    value = final(columns[name])
    assert value is not None, name
    return value


def _ends(interval: Mapping[str, float]) -> dict[str, float | None]:
    return {"low": short(interval["low"]), "high": short(interval["high"])}
