"""A study's journal, which is Optuna's, and the trials and repetitions that its events tell of."""

import importlib
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rl_bridge.common.files import sync_folder
from rl_tools.tune.space import Assignment

JOURNAL, STUDY, EVENT = "journal.jsonl", "tune", "event "
ATTRIBUTE = 2
"""Optuna's number of a record that sets an attribute of a study."""
CONTENTS = "the content of "
"""Begins the name of a setting that is the hash of a file."""
Event = dict[str, Any]


def library(name: str) -> Any:
    """A module of the extra ``tune``. Optuna tells errors alone.

    Raises:
        ModuleNotFoundError: it is not installed; the message says what to install.
    """
    try:
        module: Any = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error.name} is not installed: pip install '.[tune]'") from error
    if name == "optuna":
        module.logging.set_verbosity(module.logging.ERROR)
    return module


class Journal:
    """Optuna's journal file, a record a line, with the study's events as attributes of the study.

    Each event is on the disk before anything follows from the event. The records that a sampler writes into ``storage``
    stand before the event that follows from them. Lines behind the last event are cut off, as a kill can leave any part
    of them: nothing had followed from them yet, and Optuna's trials and the events always agree.
    """

    def __init__(self, file: Path, goals: int = 1) -> None:
        """Open a journal, or begin one with so many losses a trial.

        Raises:
            ValueError: as ``read_journal`` does.
        """
        optuna = library("optuna")
        self.events, size = read_journal(file)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o644)
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
        os.close(descriptor)
        sync_folder(file.parent)
        # The study has a lock of its own. A lock of Optuna's would outlive a kill by half a minute.
        backend = optuna.storages.journal.JournalFileBackend(str(file), lock_obj=_NoLock())
        self.storage = optuna.storages.JournalStorage(backend)
        if not self.events:
            minimize = optuna.study.StudyDirection.MINIMIZE
            self.storage.create_new_study([minimize] * goals, STUDY)
        self._study = self.storage.get_study_id_from_name(STUDY)

    def append(self, event: Mapping[str, Any]) -> None:
        """Write an event, and wait until it is on the disk."""
        sealed = {"crc32": _checksum(event), "event": dict(event)}
        self.storage.set_study_user_attr(self._study, f"{EVENT}{len(self.events):06d}", sealed)
        self.events.append(dict(event))


class _NoLock:
    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        return None


def read_journal(file: Path) -> tuple[list[Event], int]:
    """(The whole events of a journal, how many bytes end with the last one); none where there is no file.

    Raises:
        ValueError: a line before the last is damaged, or the journal is none of Optuna's.
    """
    content = file.read_bytes() if file.exists() else b""
    # A study that had only begun is one line: as a damaged last line it would be cut off.
    if content.startswith(b'{"crc32"'):
        raise ValueError(f"{file} is of an earlier version, whose studies cannot go on: give this one another --name")
    events: list[Event] = []
    size = end = 0
    lines = content.splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        end += len(line)
        try:
            event = _parsed(line, len(events))
        except (ValueError, KeyError, TypeError):
            if number < len(lines):
                raise ValueError(f"{file}, line {number} is damaged: {line[:60]!r}") from None
            break
        if event is not None:
            events.append(event)
            size = end
    return events, size


def _parsed(line: bytes, number: int) -> Event | None:
    """The event of a line, None for a line of Optuna's own; KeyError and ValueError for a damaged one."""
    record = json.loads(line)
    if not line.endswith(b"\n"):
        raise ValueError("a torn line")
    if record["op_code"] != ATTRIBUTE or not next(iter(record["user_attr"])).startswith(EVENT):
        return None
    sealed = record["user_attr"][f"{EVENT}{number:06d}"]
    if sealed["crc32"] != _checksum(sealed["event"]):
        raise ValueError("another checksum")
    return sealed["event"]


def _checksum(event: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(event).encode())


ENDED = ("complete", "failed", "pruned", "left out")


class Key(NamedTuple):
    """A repetition: one process with one run folder."""

    trial: int
    seed: int

    @property
    def name(self) -> str:
        """Name of the run's folder and of the log."""
        return f"trial-{self.trial:04d}-seed-{self.seed}"


@dataclass
class Repetition:
    """State of a repetition. ``status``: waiting, running, or one of ``ENDED``."""

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
        """Whether the repetition has ended for good."""
        return self.status in ENDED


@dataclass
class Trial:
    """A trial with its repetitions by their seeds. ``told`` is the event that ended it."""

    number: int
    assignment: Assignment
    repetitions: dict[int, Repetition]
    told: Event | None = None


class State:
    """The events of a journal, folded: trials, their repetitions and the status of each. A study has no other state."""

    def __init__(self, seeds: int) -> None:
        """``seeds``: repetitions of a trial."""
        self.seeds = seeds
        self.trials: list[Trial] = []

    def fold(self, event: Event) -> None:
        """Apply the next event."""
        match event["kind"]:
            case "asked":
                assert event["trial"] == len(self.trials), "trials are asked for in order, once each"
                repetitions = {seed: Repetition() for seed in range(self.seeds)}
                self.trials.append(Trial(event["trial"], event["assignment"], repetitions))
            case "started":
                repetition = self.repetition(event)
                repetition.status, repetition.slot, repetition.started = "running", event["slot"], event["time"]
                repetition.attempts += 1
            case "stopping":
                self.repetition(event).stopping = {"status": event["status"], "reason": event["reason"]}
            case "ended":
                self._end(event)
            case "confirming":
                self.trials[event["trial"]].repetitions |= {seed: Repetition() for seed in event["seeds"]}
            case "told":
                self.trials[event["trial"]].told = event

    def _end(self, event: Event) -> None:
        repetition = self.repetition(event)
        assert not repetition.over, f"{event} ends what has ended"
        repetition.seconds += event.get("seconds", 0.0)
        repetition.slot = None
        if event["status"] == "interrupted":
            repetition.status = "waiting"
            repetition.interruptions += event["counts"]
        else:
            repetition.status, repetition.reason, repetition.values = event["status"], event["reason"], event["values"]

    def repetition(self, key: Event | Key) -> Repetition:
        """The repetition that a key or an event is about."""
        trial, seed = key if isinstance(key, Key) else (key["trial"], key["seed"])
        return self.trials[trial].repetitions[seed]

    def with_status(self, *statuses: str) -> list[tuple[Key, Repetition]]:
        """Repetitions with one of these statuses, in order."""
        return [
            (Key(trial.number, seed), repetition)
            for trial in self.trials
            for seed, repetition in trial.repetitions.items()
            if repetition.status in statuses
        ]
