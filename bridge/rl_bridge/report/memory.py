"""The memory timeline of a run, where it recorded one."""

from collections.abc import Mapping, Sequence
from typing import Any

from rl_bridge.report.series import POINTS, buckets, short, thinned, thinned_clock


def memory_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Numbers of memory.jsonl over time: ``x`` and a column a name; None without lines.

    A name of a nested object is dotted, as ``bytes.weights``.
    """
    if not lines:
        return None
    flat = [_flat(line) for line in lines]
    clock = next((name for name in ("seconds", "time", "step") if all(name in line for line in flat)), None)
    times = [float(line[clock]) for line in flat] if clock else [float(place) for place in range(len(flat))]
    if clock == "time":
        times = [value - times[0] for value in times]
    about = {"seconds", "time", "step", "attempt", "weights_version", "optimizer_step"}
    names = [name for name in dict.fromkeys(name for line in flat for name in line) if name not in about]
    parts = buckets(len(flat), POINTS)
    return {
        "clock": {"time": "seconds", None: "sample"}.get(clock, clock),
        "x": [short(value) for value in thinned_clock(times, parts)],
        "columns": {name: thinned([short(line.get(name)) for line in flat], parts) for name in names},
    }


def _flat(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        elif short(value) is not None:
            found[prefix + name] = value
    return found
