"""The memory of a run, where it was profiled: from step to step, at the peak by component, within the last step."""

from collections.abc import Mapping, Sequence
from typing import Any

from rl_bridge.report.series import POINTS, buckets, short, thinned, thinned_clock

MIB = 2**20
Line = Mapping[str, Any]


def memory_of(lines: Sequence[Line]) -> dict[str, Any] | None:
    """``charts`` in MiB, and of each phase the call with the largest peak; None without lines of memory.jsonl."""
    if not lines:
        return None
    ends = {line["step"]: line for line in lines if line.get("end_of_step")}
    largest: dict[int, Line] = {}
    phases: dict[str, Line] = {}
    for line in lines:
        if "peak" in line:
            largest[line["step"]] = max(largest.get(line["step"], line), line, key=lambda one: one["peak"])
            phase = str(line.get("phase"))
            phases[phase] = max(phases.get(phase, line), line, key=lambda one: one["peak"])
    steps = sorted({*ends, *largest})
    sizes = {
        "peak": [largest.get(step, {}).get("peak") for step in steps],
        "after the step": [ends.get(step, {}).get("bytes") for step in steps],
        "process (RSS)": [ends.get(step, {}).get("rss") for step in steps],
    }
    parts = [largest.get(step, {}).get("components", {}) for step in steps]
    last = max(ends, default=max(steps, default=0))
    times, within = _joined([line for line in lines if line["step"] == last and "timeline" in line])
    charts = [
        _chart("memory of a step", "step", steps, sizes),
        _chart("components at the peak of a step", "step", steps, _columns(parts)),
        _chart(f"components within step {last}", "seconds of its calls", times, _columns(within)),
    ]
    peaks = [
        {name: line.get(name) for name in ("phase", "call", "step", "line")} | {"peak": short(line["peak"] / MIB)}
        for line in sorted(phases.values(), key=lambda line: -line["peak"])
    ]
    return {"charts": [chart for chart in charts if chart["columns"]], "peaks": peaks}


def _chart(title: str, unit: str, x: Sequence[float], columns: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    parts = buckets(len(x), POINTS)
    mib = {name: [None if size is None else short(size / MIB) for size in column] for name, column in columns.items()}
    there = {name: column for name, column in mib.items() if any(size is not None for size in column)}
    return {
        "title": title,
        "unit": unit,
        "x": [short(value) for value in thinned_clock(x, parts)],
        "columns": {name: thinned(column, parts) for name, column in there.items()},
    }


def _columns(parts: Sequence[Mapping[str, int]]) -> dict[str, list[int]]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: [part.get(name, 0) for part in parts] for name in names}


def _joined(calls: Sequence[Line]) -> tuple[list[float], list[Mapping[str, int]]]:
    """The calls' timelines one behind another."""
    times: list[float] = []
    parts: list[Mapping[str, int]] = []
    start = 0.0
    for call in calls:
        for at, components in call["timeline"]:
            times.append(start + at)
            parts.append(components)
        start += call["seconds"]
    return times, parts
