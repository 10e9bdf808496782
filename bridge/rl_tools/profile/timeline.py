"""The memory of a run from step to step: bytes as people write them, whether they grow, and the figure."""

import re
from collections.abc import Sequence
from itertools import pairwise
from math import comb
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rl_bridge.common.append_log import read_log
from rl_bridge.common.files import replacing
from rl_bridge.common.plots import Figure
from rl_tools.profile.live_bytes import COMPONENTS

_UNITS = {"": 1, "B": 1} | {f"{prefix}iB": 1 << (10 * n) for n, prefix in enumerate("KMGT", 1)}
_UNITS |= {f"{prefix}B": 1000**n for n, prefix in enumerate("kMGT", 1)}


def parse_bytes(text: str) -> int:
    """Bytes from an amount as people write it.

    >>> parse_bytes("24GiB"), parse_bytes("1.5 MB"), parse_bytes("512")
    (25769803776, 1500000, 512)

    Raises:
        ValueError: no positive number, or another unit than B, kB, MB, GB, TB, KiB, MiB, GiB, TiB.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2] not in _UNITS or not float(match[1]) > 0:
        raise ValueError(f"{text!r} is no amount of memory: write it like 24GiB, with one of {', '.join(_UNITS)[4:]}")
    return int(float(match[1]) * _UNITS[match[2]])


def shown_bytes(size: int) -> str:
    """Bytes as people read them.

    >>> shown_bytes(25769803776), shown_bytes(-1536), shown_bytes(0)
    ('24.0 GiB', '-1.5 KiB', '0 B')
    """
    amount, sign = float(abs(size)), "-" if size < 0 else ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{sign}{amount:.0f} B" if unit == "B" else f"{sign}{amount:.1f} {unit}"
        amount /= 1024
    return f"{sign}{amount:.1f} TiB"


SURE = 1e-4
"""The chance that a run which only fluctuates is called a leak, at one look."""
LEAST = 0.002
"""The smallest growth over the steps that is reported, as a share of the bytes that live."""


class Growth(NamedTuple):
    """Growth of memory, in bytes.

    ``per_step``: the median of the slopes of all pairs of steps, which single jumps do not move. ``chance``: the
    probability of so many rises without a leak, of a sign test.
    """

    per_step: float
    steps: int
    chance: float


def growth(sizes: Sequence[float]) -> Growth | None:
    """The growth of ``sizes``, of the ends of steps; None where there is no leak.

    A change from step to step is a rise or a fall, and one of 0 is neither. Without a leak rises are at most as likely
    as falls. A checkpoint's buffers or a cache that is made once is one rise.

    >>> growth([100, 110, 120, 130, 140, 150, 160, 170, 180, 190, 200, 210, 220, 230, 240]).per_step
    10.0
    >>> growth([100] * 10 + [500] * 10) is None
    True
    """
    changes = [b - a for a, b in pairwise(sizes) if b != a]
    rises, count = sum(change > 0 for change in changes), len(changes)
    chance = sum(comb(count, k) for k in range(rises, count + 1)) / 2**count if count else 1.0
    if chance > SURE:
        return None
    slopes = [(b - a) / (j - i) for i, a in enumerate(sizes) for j, b in enumerate(sizes[i + 1 :], i + 1)]
    slope = median(slopes)
    if slope * len(sizes) <= LEAST * median(sizes):
        return None
    return Growth(slope, len(sizes), chance)


MIB = 1 << 20


def draw_memory(lines: Path, path: Path) -> None:
    """Draw memory.jsonl: components stacked over the last whole step, with phases; bytes and peaks of all steps."""
    records = read_log(lines)
    ends = [record for record in records if record.get("end_of_step")]
    step = ends[-1]["step"] if ends else 0
    calls = [record for record in records if record["step"] == step and "timeline" in record]
    figure = Figure(figsize=(10, 6), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(2, 1))
    times, parts, marks = _joined(calls)
    names = [name for name in COMPONENTS if any(part.get(name) for part in parts)]
    if times:
        above.stackplot(times, [[part.get(name, 0) / MIB for part in parts] for name in names], labels=names)
        for seconds, phase in marks:
            above.axvline(seconds, color="black", linewidth=0.5, alpha=0.4)
            above.annotate(phase, (seconds, 1.0), xycoords=("data", "axes fraction"), rotation=90, va="top", fontsize=6)
        above.legend(fontsize=7, loc="upper left")
    above.set(title=f"live tensors of step {step}", xlabel="seconds of the step's calls", ylabel="MiB")
    peaks: dict[int, int] = {}
    for record in records:
        if "peak" in record:
            peaks[record["step"]] = max(peaks.get(record["step"], 0), record["peak"])
    below.plot(list(peaks), [size / MIB for size in peaks.values()], label="peak of the step")
    steps = [end["step"] for end in ends]
    below.plot(steps, [end["bytes"] / MIB for end in ends], label="after the step")
    below.plot(steps, [end["rss"] / MIB for end in ends], label="of the process (RSS)", linestyle=":")
    below.set(xlabel="step", ylabel="MiB")
    below.legend(fontsize=7)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)


def _joined(calls: list[dict[str, Any]]) -> tuple[list[float], list[dict[str, int]], list[tuple[float, str]]]:
    """(Times, components at each, beginnings of phases) of the calls' timelines one behind another."""
    times: list[float] = []
    parts: list[dict[str, int]] = []
    marks: list[tuple[float, str]] = []
    start, last = 0.0, ""
    for call in calls:
        if call["phase"] != last:
            marks.append((start, call["phase"]))
            last = call["phase"]
        for seconds, components in call["timeline"]:
            times.append(start + seconds)
            parts.append(components)
        start += call["seconds"]
    return times, parts, marks
