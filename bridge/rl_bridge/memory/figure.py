"""The memory timeline of a run's last whole step, and of the ends of all steps, as one PNG."""

import json
from pathlib import Path
from typing import Any

from rl_bridge.atomic import replacing
from rl_bridge.memory.places import COMPONENTS
from rl_bridge.plots import Figure

MIB = 1 << 20


def draw_memory(lines: Path, path: Path) -> None:
    """Draw memory.jsonl: components stacked over a step, phases named below; bytes and peaks from step to step."""
    records = [json.loads(line) for line in lines.read_text("utf-8").splitlines() if line.strip()]
    ends = [record for record in records if record.get("end_of_step")]
    step = ends[-1]["step"] if ends else 0
    calls = [record for record in records if record["step"] == step and "timeline" in record]
    figure = Figure(figsize=(10, 6), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(2, 1))
    times, parts, marks = _joined(calls)
    names = [name for name in COMPONENTS if any(part.get(name) for part in parts)]
    if times:
        above.stackplot(times, [[part.get(name, 0) / MIB for part in parts] for name in names], labels=names)
        for at, phase in marks:
            above.axvline(at, color="black", linewidth=0.5, alpha=0.4)
            above.annotate(phase, (at, 1.0), xycoords=("data", "axes fraction"), rotation=90, va="top", fontsize=6)
        above.legend(fontsize=7, loc="upper left")
    above.set(title=f"live tensors of step {step}", xlabel="seconds of the step's calls", ylabel="MiB")
    peaks: dict[int, int] = {}
    for record in records:
        if "peak" in record:
            peaks[record["step"]] = max(peaks.get(record["step"], 0), record["peak"])
    below.plot(list(peaks), [size / MIB for size in peaks.values()], label="peak of the step")
    below.plot([r["step"] for r in ends], [r["bytes"] / MIB for r in ends], label="after the step")
    below.plot([r["step"] for r in ends], [r["rss"] / MIB for r in ends], label="of the process (RSS)", linestyle=":")
    below.set(xlabel="step", ylabel="MiB")
    below.legend(fontsize=7)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)


def _joined(calls: list[dict[str, Any]]) -> tuple[list[float], list[dict[str, int]], list[tuple[float, str]]]:
    """The calls' timelines one behind another, and where a phase begins."""
    times: list[float] = []
    parts: list[dict[str, int]] = []
    marks: list[tuple[float, str]] = []
    start, last = 0.0, ""
    for call in calls:
        if call["phase"] != last:
            marks.append((start, call["phase"]))
            last = call["phase"]
        for at, components in call["timeline"]:
            times.append(start + at)
            parts.append(components)
        start += call["seconds"]
    return times, parts, marks
