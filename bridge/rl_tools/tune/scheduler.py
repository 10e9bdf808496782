"""The scheduler of a study: a state machine over a journal, a sampler and processes that it is given."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rl_bridge.common.statistics import LEAST, over_seeds
from rl_bridge.common.terminal import given
from rl_tools.tune.goals import WHOLE_RUN, Constraint, Goal, MissingGoal, Points, Pruning
from rl_tools.tune.journal import Event, Key, State, Trial
from rl_tools.tune.samplers import Sampler, result_of
from rl_tools.tune.space import Assignment


@dataclass(frozen=True)
class Plan:
    """Goals, size and limits of a study.

    ``slots``: processes at a time. ``time_limit``: seconds of a process, None for no limit. ``retries``: how often a
    repetition goes on whose process something outside of the study killed. ``confirm``: how many seeds that no trial
    had the best trial gets at the end.
    """

    goals: tuple[Goal, ...]
    constraints: tuple[Constraint, ...] = ()
    trials: int = 20
    seeds: int = 1
    slots: int = 1
    time_limit: float | None = None
    retries: int = 2
    pruning: Pruning = Pruning()
    confirm: int = 0

    def __post_init__(self) -> None:
        """Refuse counts below 1, goals that are there twice, and pruning by one goal of several or by no curve."""
        if min(self.trials, self.seeds, self.slots) < 1 or min(self.retries, self.confirm) < 0:
            raise ValueError(
                "need trials, seeds and slots (--parallel) of at least 1, retries ≥ 0 and confirm ≥ 0, got "
                f"{given(self, 'trials', 'seeds', 'slots', 'retries', 'confirm')}"
            )
        if not self.goals:
            raise ValueError("a study needs at least 1 goal, got none")
        if self.time_limit is not None and not 0 < self.time_limit < math.inf:
            raise ValueError(f"--time-limit is a finite number of seconds above 0, got {self.time_limit:g}")
        names = [goal.name for goal in self.goals]
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise ValueError(f"the goal {twice[0]} is there twice: give it once, to --maximize or --minimize")
        if self.pruning.kind != "none" and len(self.goals) > 1:
            raise ValueError(f"pruning compares one goal, got {', '.join(goal.name for goal in self.goals)}")
        at_the_end = [goal.metric for goal in self.goals if goal.metric in WHOLE_RUN]
        if self.pruning.kind != "none" and at_the_end:
            raise ValueError(
                f"the pruner {self.pruning.kind} compares a metric of each step, and {at_the_end[0]} is of a whole "
                "run: give another goal, or --pruner none"
            )
        if self.pruning.kind == "paired" and self.seeds < LEAST:
            raise ValueError(f"the pruner paired compares at least {LEAST} seeds, got {self.seeds}: give --seeds")


@dataclass(frozen=True)
class Exit:
    """A process that has ended. ``code`` is negative for a signal. ``reason``: the last lines of its log."""

    key: Key
    code: int
    reason: str = ""

    @property
    def signal(self) -> int | None:
        """The signal that ended it; a shell, and our trainers, exit with 128 + its number."""
        return -self.code if self.code < 0 else self.code - 128 if 128 < self.code < 160 else None


class Processes(Protocol):
    """Starts and stops the repetitions' processes."""

    def start(self, key: Key, assignment: Assignment, slot: int) -> None:
        """Start a process, which goes on from the run's last checkpoint where there is one."""
        ...

    def stop(self, key: Key) -> None:
        """Ask a process to end; it is reported by ``ended``."""
        ...

    def ended(self) -> list[Exit]:
        """The processes that ended since the last call."""
        ...

    def recover(self, key: Key) -> Exit | None:
        """Wait until a process of an earlier tuner is gone; how it ended, if that is known."""
        ...


class Records(Protocol):
    """Reads the repetitions' run folders."""

    def finished(self, key: Key) -> bool:
        """Whether the run came to its end."""
        ...

    def values(self, key: Key) -> dict[str, float]:
        """The goals' and constraints' values of a finished run; ValueError where one is missing or not finite."""
        ...

    def curve(self, key: Key) -> Points:
        """Step → loss of the first goal so far."""
        ...

    def steps(self, key: Key) -> int:
        """Steps made so far, of the stage that the curve is of."""
        ...


class Scheduler:
    """Runs a study, by ``step`` again and again until this returns True.

    ``write`` puts an event on the disk, before anything follows from the event. A scheduler that is made with the
    events of an earlier one goes on where the earlier one was killed.
    """

    def __init__(
        self,
        plan: Plan,
        sampler: Sampler,
        processes: Processes,
        records: Records,
        write: Callable[[Event], None],
        events: Sequence[Event] = (),
        *,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.plan, self.state = plan, State(plan.seeds)
        self._sampler, self._processes, self._records = sampler, processes, records
        self._write, self._report = write, report
        self._exhausted = self._closing = False
        self.missing: str | None = None
        """Why the study ended at its first run: the run has no such goal."""
        for event in events:
            self.state.fold(event)

    def recover(self, now: float) -> None:
        """Record how the processes ended that an earlier tuner left running."""
        for key, _ in self.state.with_status("running"):
            ended = self._processes.recover(key)
            # A guard whose tuner is gone ends its process by a signal.
            self._end(ended or Exit(key, -9), now, ours=ended is None or ended.signal is not None)

    def step(self, now: float) -> bool:
        """Record ended processes, stop late and hopeless ones, start waiting ones; True at the end of the study."""
        for ended in self._processes.ended():
            self._end(ended, now, ours=self._closing)
        if not self._closing:
            self._limit(now)
            self._prune()
        for trial in self.state.trials:
            if trial.told is None:
                self._leave_out(trial)
                self._tell(trial)
        if self._closing:
            return not self.state.with_status("running")
        self._fill(now)
        return not self.state.with_status("running", "waiting")

    def close(self) -> None:
        """Stop all processes; ``step`` returns True when they are gone."""
        self._closing = True
        for key, _ in self.state.with_status("running"):
            self._processes.stop(key)

    def incumbent(self) -> Trial | None:
        """The best complete trial by the first goal; of those in which the constraints hold."""
        usable = [t for t in self.state.trials if t.told is not None and result_of(t.told).usable]
        complete = [t for t in usable if t.told is not None and t.told["status"] == "complete"]
        return min(complete, key=lambda t: t.told["losses"][0] if t.told else 0.0, default=None)

    def _record(self, **event: Any) -> Event:
        self._write(event)
        self.state.fold(event)
        return event

    def _end(self, ended: Exit, now: float, *, ours: bool) -> None:
        """``ours``: the study stopped the process, or nobody knows why it ended."""
        repetition = self.state.repetition(ended.key)
        about = {"kind": "ended", **ended.key._asdict(), "seconds": round(max(now - repetition.started, 0.0), 3)}
        about |= {"time": round(now, 3), "exit": ended.code, "values": {}}
        if self._records.finished(ended.key):
            try:
                about |= {"status": "complete", "reason": "", "values": self._records.values(ended.key)}
            except ValueError as error:
                about |= {"status": "failed", "reason": str(error)}
                # Where no run had the goal so far, the next one will hardly have it: its name is wrong.
                if isinstance(error, MissingGoal) and not self.state.with_status("complete"):
                    self.missing = str(error)
                    self.close()
        elif repetition.stopping is not None:
            about |= repetition.stopping
        elif ours:
            reason = "the study was stopped" if self._closing else "the tuner ended"
            about |= {"status": "interrupted", "reason": reason, "counts": 0}
        elif ended.signal is not None and repetition.interruptions < self.plan.retries:
            about |= {"status": "interrupted", "reason": f"killed by signal {ended.signal}", "counts": 1}
        elif ended.signal is not None:
            times = repetition.interruptions + 1
            about |= {"status": "failed", "reason": f"killed by signal {ended.signal}, {times} times"}
        else:
            without = "ended without a summary" if ended.code == 0 else f"exit status {ended.code}"
            about |= {"status": "failed", "reason": f"{without}: {ended.reason}" if ended.reason else without}
        self._record(**about)
        if about["status"] != "complete":
            self._report(f"{ended.key.name}: {about['status']}: {about['reason']}")

    def _stop(self, key: Key, status: str, reason: str) -> None:
        self._record(kind="stopping", **key._asdict(), status=status, reason=reason)
        self._processes.stop(key)

    def _limit(self, now: float) -> None:
        for key, repetition in self.state.with_status("running"):
            limit = self.plan.time_limit
            if limit is not None and repetition.stopping is None and now - repetition.started > limit:
                self._stop(key, "failed", f"had not ended after {limit:g} s")

    def _prune(self) -> None:
        if self.plan.pruning.kind == "none":
            return
        best, curves = self.incumbent(), None
        running = dict.fromkeys(
            key.trial
            for key, repetition in self.state.with_status("running")
            if repetition.stopping is None and self.state.trials[key.trial].told is None
        )
        for number in running:
            if curves is None:
                curves = {trial.number: self._curves(trial) for trial in self.state.trials}
            others = {other: curve for other, curve in curves.items() if other != number}
            incumbent = None if best is None else curves[best.number]
            steps = {seed: self._records.steps(Key(number, seed)) for seed in curves[number]}
            if (reason := self.plan.pruning.verdict(curves[number], incumbent, others, steps)) is not None:
                for key, repetition in self.state.with_status("running"):
                    if key.trial == number and repetition.stopping is None:
                        self._stop(key, "pruned", reason)

    def _curves(self, trial: Trial) -> dict[int, Points]:
        """Seed → curve, of the seeds that every trial has."""
        started = [
            seed for seed, repetition in trial.repetitions.items() if repetition.attempts and seed < self.plan.seeds
        ]
        return {seed: self._records.curve(Key(trial.number, seed)) for seed in started}

    def _leave_out(self, trial: Trial) -> None:
        """One failed or pruned repetition decides about its trial: the others are not worth their time."""
        decided = next(
            (repetition for repetition in trial.repetitions.values() if repetition.status in ("failed", "pruned")), None
        )
        if decided is None:
            return
        why = {"status": "left out", "reason": f"another seed {decided.status}"}
        for seed, repetition in trial.repetitions.items():
            key = Key(trial.number, seed)
            if repetition.status == "waiting":
                self._record(kind="ended", **key._asdict(), values={}, **why)
            elif repetition.status == "running" and repetition.stopping is None and not self._closing:
                self._stop(key, **why)

    def _tell(self, trial: Trial) -> None:
        repetitions = list(trial.repetitions.values())
        if not all(repetition.over for repetition in repetitions):
            return
        statuses = [repetition.status for repetition in repetitions]
        status = next((s for s in ("failed", "pruned") if s in statuses), "complete")
        event: Event = {"kind": "told", "trial": trial.number, "status": status, "losses": None, "violations": []}
        event["reason"] = next((repetition.reason for repetition in repetitions if repetition.status == status), "")
        if status == "complete":
            by_goal = {name: [repetition.values[name] for repetition in repetitions] for name in repetitions[0].values}
            bands = {name: over_seeds(values) for name, values in by_goal.items()}
            mean = {name: band["mean"] for name, band in bands.items()}
            event["values"] = {name: {**band, "seeds": by_goal[name]} for name, band in bands.items()}
            event["losses"] = [goal.loss(mean[goal.name]) for goal in self.plan.goals]
            event["violations"] = [c.violation(mean[c.goal.name]) for c in self.plan.constraints]
        elif status == "pruned":
            last = [points[max(points)] for points in self._curves(trial).values() if points]
            event["losses"] = [sum(last) / len(last)] if last else None
        # The records that the sampler writes hold with the event behind them, or not at all.
        self._sampler.tell(trial.number, result_of(event))
        self._record(**event)

    def _confirm(self) -> None:
        """When all trials are told, the best one gets seeds on which nothing was chosen."""
        best = self.incumbent()
        ended = self._exhausted or len(self.state.trials) >= self.plan.trials
        if best is None or not ended or any(trial.told is None for trial in self.state.trials):
            return
        seeds = range(self.plan.seeds, self.plan.seeds + self.plan.confirm)
        if fresh := [seed for seed in seeds if seed not in best.repetitions]:
            self._record(kind="confirming", trial=best.number, seeds=fresh)

    def _fill(self, now: float) -> None:
        used = {repetition.slot for _, repetition in self.state.with_status("running")}
        for slot in (slot for slot in range(self.plan.slots) if slot not in used):
            waiting = self.state.with_status("waiting")
            if not waiting and not self._exhausted and len(self.state.trials) < self.plan.trials:
                number = len(self.state.trials)
                assignment = self._sampler.ask(number)
                if assignment is None:
                    self._exhausted = True
                else:
                    self._record(kind="asked", trial=number, assignment=dict(assignment))
                    waiting = self.state.with_status("waiting")
            if not waiting:
                self._confirm()
                waiting = self.state.with_status("waiting")
            if not waiting:
                return
            key = waiting[0][0]
            self._record(kind="started", **key._asdict(), slot=slot, time=round(now, 3))
            self._processes.start(key, self.state.trials[key.trial].assignment, slot)
