"""A run's folder read for a report, while the run may still be writing to it, and its curves in few points."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from rl_bridge.algorithms.completion_log import COMPLETIONS
from rl_bridge.common.append_log import parsed, read_log
from rl_bridge.common.json_kinds import Kind, require_kind
from rl_bridge.common.statistics import running_mean
from rl_bridge.run.provenance import PROVENANCE
from rl_bridge.run.records import ABOUT, METRICS, STEP, kind_of

# The files of a folder.

CONFIG, SUMMARY, SAMPLES, MEMORY = "config.json", "summary.json", "samples.json", "memory.jsonl"
FILES = (CONFIG, METRICS, SUMMARY, SAMPLES, COMPLETIONS, MEMORY, PROVENANCE)
"""All that a report reads of a run."""

_NUMBERS = ["a number or null"]
_SAMPLE: dict[str, Kind] = {
    "prompt": "text",
    "completion": "text",
    "finish_reason": "text",
    "reward": "a number or null",
    "rewards": {"*": "a number or null"},
    "left_out": "a whole number",
    "tokens": {
        **{"id": ["a whole number"], "text": ["text"], "counted": ["a boolean"], "version": ["a whole number"]},
        **{"advantage": _NUMBERS, "ratio": _NUMBERS, "entropy": _NUMBERS, "logprob": _NUMBERS},
        **{"old_logprob": _NUMBERS, "rollout_logprob": _NUMBERS},
    },
}
_HELD_OUT = {"prompt?": "anything", "completion?": "anything", "answer?": "anything", "*": "a number or text or null"}
_ROWS: dict[str, Kind] = {"*": [_HELD_OUT]}
_SOURCE: dict[str, Kind] = {
    "name?": "text",
    "files?": "a whole number or null",
    "read?": "a whole number",
    "left_out?": {"*": "a whole number"},
    "held_out?": "a whole number",
    "trained?": "a whole number",
    "*": "no other entry",
}
_BYTES = {"*": "a finite number"}
KINDS: dict[str, Kind] = {
    CONFIG: {"seed?": "a whole number or null"},
    METRICS: STEP,
    SUMMARY: {"census?": {"*": _SOURCE}, "versions?": {"*": "text"}},
    SAMPLES: {"before?": _ROWS, "after?": _ROWS},
    COMPLETIONS: {"step": "a whole number", "samples": [_SAMPLE]},
    MEMORY: {
        "step": "a whole number",
        "bytes?": "a finite number",
        "rss?": "a finite number or null",
        "peak?": "a finite number",
        "components?": _BYTES,
        "seconds?": "a finite number",
        "timeline?": [("a finite number", _BYTES)],
    },
    PROVENANCE: {"fingerprints?": {"*": "text"}},
}
"""The entries of each file, a line or the whole of it, so far as a report computes anything from them."""


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The files of a run's folder. Those that are not there yet are empty."""

    folder: Path
    config: dict[str, Any]
    records: list[dict[str, Any]]
    """Records of steps, in order."""
    notes: list[dict[str, Any]]
    """Lines of the record that are no step's."""
    summary: dict[str, Any]
    """Summary of a run that has ended."""
    samples: dict[str, Any]
    completions: list[dict[str, Any]]
    memory: list[dict[str, Any]]
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Input → hash, of the last attempt."""

    @property
    def name(self) -> str:
        """That of the folder."""
        return self.folder.resolve().name

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return bool(self.summary)

    @property
    def seed(self) -> Any:
        """Seed of the run's config; None where it has none."""
        return self.config.get("seed")


def read_run(folder: Path) -> RunFiles:
    """Everything that a report needs of a run.

    Raises:
        ValueError: the folder is no run's, or a file is damaged; the message names file and line.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder")
    missing = [name for name in (CONFIG, METRICS) if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} has no {' and no '.join(missing)}: it is not a run's folder")
    lines, attempts = _lines(folder / METRICS), _lines(folder / PROVENANCE)
    return RunFiles(
        folder=folder,
        config=_object(folder / CONFIG),
        records=[line for line in lines if "stage" in line],
        notes=[line for line in lines if "stage" not in line],
        summary=_object(folder / SUMMARY),
        samples=_object(folder / SAMPLES),
        completions=_lines(folder / COMPLETIONS),
        memory=_lines(folder / MEMORY),
        fingerprints=attempts[-1].get("fingerprints", {}) if attempts else {},
    )


def _object(file: Path) -> dict[str, Any]:
    """The object that a JSON file holds; {} where there is no file."""
    if not file.is_file():
        return {}
    value = parsed(file.read_bytes(), str(file))
    require_kind(value, KINDS[file.name], str(file))
    return value


def _lines(file: Path) -> list[dict[str, Any]]:
    """The records of a log; [] where there is no file."""
    records = read_log(file)
    for number, record in enumerate(records, 1):
        kind = kind_of(record) if file.name == METRICS else KINDS[file.name]
        require_kind(record, kind, f"{file}, line {number}")
    last = file.read_bytes().rpartition(b"\n")[2] if file.exists() else b""
    if last.strip() and not last.startswith(b"{"):  # What a writer is at work on begins as an object does.
        parsed(last, f"{file}, line {len(records) + 1}")
    return records


# Curves of a run: every number of its record over several clocks, in few enough points, with the extremes kept.

CLOCKS = ("step", "tokens", "seconds", "version")
DRAWN_OVER = ABOUT | {"trained_tokens"}
"""Entries of a record that have no curve of their own: of the tokens a page draws the sum, as a clock."""
POINTS = 1000
"""Points of a curve at most, in the page."""
Column = list[float | None]


def short(value: Any) -> float | None:
    """A number in six digits; None for what is no finite number.

    >>> short(0.123456789), short(float("nan")), short(None)
    (0.123457, None, None)
    """
    # A whole number of any length is compared, and not converted.
    return float(f"{value:.6g}") if _is_number(value) and abs(value) <= sys.float_info.max else None


def clocks_of(records: Sequence[Mapping[str, Any]], tokens_before: float = 0.0) -> dict[str, list[float]]:
    """Step, tokens trained on so far, seconds and weights version at each record of a stage.

    ``tokens_before``: of earlier stages. A version that was not recorded is the one before it.
    """
    tokens, version = tokens_before, 0.0
    clocks: dict[str, list[float]] = {name: [] for name in CLOCKS}
    for record in records:
        tokens += record.get("trained_tokens", 0)
        version = record.get("weights_version", version)
        for name, value in zip(CLOCKS, (record["step"], tokens, record["seconds"], version), strict=True):
            clocks[name].append(value)
    return clocks


def columns_of(records: Sequence[Mapping[str, Any]]) -> dict[str, Column]:
    """Every metric that a record has, an entry a record; besides ``step_seconds``, the time since the record before."""
    names = dict.fromkeys(
        name for record in records for name, value in record.items() if name not in DRAWN_OVER and _is_number(value)
    )
    columns: dict[str, Column] = {name: [short(record.get(name)) for record in records] for name in names}
    columns["step_seconds"] = step_seconds(records)
    return columns


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
    points: Column = []
    for part in parts:
        values = [(value, place) for place in part if (value := column[place]) is not None]
        if values:
            pair = sorted([min(values, key=lambda x: x[0]), max(values, key=lambda x: x[0])], key=lambda x: x[1])
            points += [value for value, _ in pair]
        else:
            points += [None, None]
    return points


def thinned_clock(clock: Sequence[float], parts: Sequence[range]) -> list[float]:
    """First and last time of each part, for the two points that ``thinned`` makes of it."""
    return list(clock) if not parts else [clock[place] for part in parts for place in (part[0], part[-1])]


def packed(column: Column) -> dict[str, Any]:
    """The column for the page: ``y``, and where most entries are missing ``at``, the places of the others.

    >>> packed([None, None, 0.5, None])
    {'y': [0.5], 'at': [2]}
    """
    places = [place for place, value in enumerate(column) if value is not None]
    if 2 * len(places) > len(column):
        return {"y": column}
    return {"y": [column[place] for place in places], "at": places}


def smoothed(column: Column) -> Column | None:
    """The running mean at each place that has a value, over all values of the column; None for few of them.

    What is drawn of a long column are its extremes: a mean of those would be none of the column.
    """
    places = [place for place, value in enumerate(column) if value is not None]
    means = running_mean([value for value in column if value is not None])
    if means is None:
        return None
    smooth: Column = [None] * len(column)
    for place, mean in zip(places, means.tolist(), strict=True):
        smooth[place] = mean
    return smooth


def ends_of(column: Column, parts: Sequence[range]) -> Column:
    """First and last value of each part, at the times of ``thinned_clock``. Without parts, the column itself.

    >>> ends_of([1.0, 9.0, 3.0, None, 4.0, 2.0], [range(0, 3), range(3, 6)])
    [1.0, 3.0, 4.0, 2.0]
    """
    if not parts:
        return column
    ends: Column = []
    for part in parts:
        values = [value for place in part if (value := column[place]) is not None]
        ends += [values[0], values[-1]] if values else [None, None]
    return ends


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
