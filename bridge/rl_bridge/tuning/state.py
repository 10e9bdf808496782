"""What a journal says: trials, their repetitions, and where each stands. Nothing else is remembered of a study."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rl_bridge.tuning.journal import Event
from rl_bridge.tuning.space import Assignment

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
