"""A study's journal, one event a line, and the trials and repetitions that it tells of."""

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rl_bridge.common.files import sync_folder
from rl_tools.tune.space import Assignment

# A study's journal: one event a line, each on the disk before anything follows from it.

JOURNAL = "journal.jsonl"
Event = dict[str, Any]


class Journal:
    """Appends events. A last line that a kill left torn is cut off; it was of nothing that had happened yet."""

    def __init__(self, file: Path) -> None:
        """Open a journal, or begin one.

        Raises:
            ValueError: a line before the last is damaged.
        """
        self.events, size = read_journal(file)
        new = not file.exists()
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.ftruncate(self._descriptor, size)
        os.fsync(self._descriptor)
        if new:
            sync_folder(file.parent)

    def append(self, event: Mapping[str, Any]) -> None:
        """Write an event, and wait until it is on the disk."""
        line = _line(event)
        written = 0
        while written < len(line):
            written += os.write(self._descriptor, line[written:])
        os.fsync(self._descriptor)
        self.events.append(dict(event))

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def read_journal(file: Path) -> tuple[list[Event], int]:
    """(The whole events of a journal, how many bytes they are); none where there is no file.

    Raises:
        ValueError: a line before the last is damaged.
    """
    content = file.read_bytes() if file.exists() else b""
    events: list[Event] = []
    size = 0
    lines = content.splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        event = _parsed(line)
        if event is None and number < len(lines):
            raise ValueError(f"{file}, line {number} is damaged: {line[:60]!r}")
        if event is not None:
            events.append(event)
            size += len(line)
    return events, size


def _line(event: Mapping[str, Any]) -> bytes:
    text = json.dumps(event, ensure_ascii=False)
    return f'{{"crc32": {zlib.crc32(text.encode())}, "event": {text}}}\n'.encode()


def _parsed(line: bytes) -> Event | None:
    """The event of a whole line with the right checksum."""
    try:
        event = json.loads(line)["event"]
    except (ValueError, KeyError, TypeError):
        return None
    return event if line == _line(event) else None


# What a journal says: trials, their repetitions, and where each stands. Nothing else is remembered of a study.

ENDED = ("complete", "failed", "pruned", "left out")


class Key(NamedTuple):
    """A repetition: one process with one run folder."""

    trial: int
    seed: int

    @property
    def name(self) -> str:
        """Of the run's folder and of the log."""
        return f"trial-{self.trial:04d}-seed-{self.seed}"


@dataclass
class Repetition:
    """``status``: waiting, running, or one of ENDED."""

    status: str = "waiting"
    slot: int | None = None
    started: float = 0.0
    attempts: int = 0
    interruptions: int = 0
    """How often something killed the process that was not this study."""
    stopping: dict[str, Any] | None = None
    """Why the study stops the process: {"status", "reason"}."""
    values: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    seconds: float = 0.0

    @property
    def over(self) -> bool:
        """Whether nothing more comes of it."""
        return self.status in ENDED


@dataclass
class Trial:
    """``told`` is the event that ended it."""

    number: int
    assignment: Assignment
    repetitions: dict[int, Repetition]
    told: Event | None = None


class State:
    """The events of a journal, folded."""

    def __init__(self, seeds: int) -> None:
        """``seeds``: repetitions of a trial."""
        self.seeds = seeds
        self.trials: list[Trial] = []

    def fold(self, event: Event) -> None:
        """Take an event in."""
        match event["kind"]:
            case "asked":
                assert event["trial"] == len(self.trials), "trials are asked for in order, once each"
                made = {seed: Repetition() for seed in range(self.seeds)}
                self.trials.append(Trial(event["trial"], event["assignment"], made))
            case "started":
                one = self.repetition(event)
                one.status, one.slot, one.started = "running", event["slot"], event["time"]
                one.attempts += 1
            case "stopping":
                self.repetition(event).stopping = {"status": event["status"], "reason": event["reason"]}
            case "ended":
                self._end(event)
            case "confirming":
                self.trials[event["trial"]].repetitions |= {seed: Repetition() for seed in event["seeds"]}
            case "told":
                self.trials[event["trial"]].told = event

    def _end(self, event: Event) -> None:
        one = self.repetition(event)
        assert not one.over, f"{event} ends what has ended"
        one.seconds += event.get("seconds", 0.0)
        one.slot = None
        if event["status"] == "interrupted":
            one.status = "waiting"
            one.interruptions += event["counts"]
        else:
            one.status, one.reason, one.values = event["status"], event["reason"], event["values"]

    def repetition(self, key: Event | Key) -> Repetition:
        """The repetition that a key or an event is about."""
        trial, seed = key if isinstance(key, Key) else (key["trial"], key["seed"])
        return self.trials[trial].repetitions[seed]

    def those(self, *statuses: str) -> list[tuple[Key, Repetition]]:
        """Repetitions in one of these states, in order."""
        return [
            (Key(trial.number, seed), one)
            for trial in self.trials
            for seed, one in trial.repetitions.items()
            if one.status in statuses
        ]

    def calls(self, events: Iterable[Event]) -> list[Event]:
        """The events that a sampler hears of."""
        return [event for event in events if event["kind"] in ("asked", "told")]
