"""A study in its folder: one tuner at a time, the processes of its trials, and their records."""

import fcntl
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from rl_bridge.common.children import Child
from rl_bridge.common.files import RunLock, require_own_files
from rl_bridge.common.terminal import Stopped, StoppedAtOnce, StopRequest, tell
from rl_bridge.run.records import METRICS, read_records
from rl_tools.tune.goals import Points, history, value_of
from rl_tools.tune.journal import CONTENTS, ENDED, JOURNAL, Event, Journal, Key
from rl_tools.tune.samplers import Sampler
from rl_tools.tune.scheduler import Exit, Plan, Scheduler
from rl_tools.tune.space import Assignment


class RunRecords:
    """The run folders of a study, read for its goals. ``runs``: the folder of all of them."""

    def __init__(self, runs: Path, plan: Plan) -> None:
        self._runs, self._plan = runs, plan
        self._read: dict[Key, tuple[int, list[dict[str, Any]]]] = {}

    def finished(self, key: Key) -> bool:
        """A run writes its summary last, whole or not at all."""
        return (self._runs / key.name / "summary.json").exists()

    def values(self, key: Key) -> dict[str, float]:
        """Goal → value.

        Raises:
            ValueError: a goal or a constraint has no value, or none that is finite.
        """
        summary = json.loads((self._runs / key.name / "summary.json").read_text("utf-8"))
        goals = [*self._plan.goals, *(constraint.goal for constraint in self._plan.constraints)]
        return {goal.name: value_of(goal, self.records(key), summary) for goal in goals}

    def curve(self, key: Key) -> Points:
        """Step → loss of the first goal."""
        goal = self._plan.goals[0]
        return {step: goal.loss(value) for step, value in history(self.records(key), goal.metric).items()}

    def steps(self, key: Key) -> int:
        """Steps made so far, of the stage that has the first goal."""
        records, metric = self.records(key), self._plan.goals[0].metric
        stage = next((record["stage"] for record in reversed(records) if metric in record), None)
        return max((record["step"] + 1 for record in records if record["stage"] == stage), default=0)

    def records(self, key: Key) -> list[dict[str, Any]]:
        """Records of the run's steps so far. A line that is being written is left for the next call."""
        file = self._runs / key.name / METRICS
        if not file.exists():
            return []
        size = file.stat().st_size
        if self._read.get(key, (-1, []))[0] != size:
            self._read[key] = size, read_records(file)
        return self._read[key][1]


LAST_LINES = 3
LOGS, RUNS = "logs", "runs"


@dataclass(frozen=True)
class Place:
    """Where the process of a slot runs."""

    device: str | None = None
    """For CUDA_VISIBLE_DEVICES."""
    threads: int = 1
    """For OMP_NUM_THREADS."""
    cores: tuple[int, ...] = ()
    """The process is bound to these cores; none leaves it free."""


def places(slots: int, *, devices: Sequence[str] = (), pin: bool = False) -> list[Place]:
    """A place for each slot: the devices in turn, the cores in equal parts.

    Raises:
        ValueError: cores cannot be divided into so many parts, or a device has no name or no process.
    """
    if not all(map(str.strip, devices)) or len(devices) > slots:
        names = ",".join(devices)
        raise ValueError(f"--devices names at most one device for each process (--parallel {slots}), got {names!r}")
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    share = max(1, len(cores) // slots)
    if pin and len(cores) < slots:
        raise ValueError(f"{len(cores)} cores cannot be divided among {slots} processes")
    return [
        Place(
            devices[slot % len(devices)] if devices else None,
            share,
            tuple(cores[slot * share : (slot + 1) * share]) if pin else (),
        )
        for slot in range(slots)
    ]


Command = Callable[[Key, Assignment, Path, bool], list[str]]
"""``command(key, assignment, runs, resume)``: a process's command line. Its run folder is ``runs / key.name``."""


class TrialProcesses:
    """The processes of a study: each repetition has its own session, run folder, log, device and exit status.

    ``folder``: of the study. ``grace``: seconds from SIGTERM to SIGKILL.
    """

    def __init__(self, folder: Path, command: Command, at: Sequence[Place], *, grace: float = 60.0) -> None:
        self._folder, self._command, self._places, self._grace = folder, command, at, grace
        self._running: dict[Key, Child] = {}
        for name in (LOGS, RUNS):
            (folder / name).mkdir(exist_ok=True)

    def start(self, key: Key, assignment: Assignment, slot: int) -> None:
        """Start a process under a guard. A run that has a folder is resumed."""
        runs, place = self._folder / RUNS, self._places[slot]
        resume = (runs / key.name).exists()
        self._file(key, "exit").unlink(missing_ok=True)
        environment = os.environ | {"OMP_NUM_THREADS": str(place.threads), "PYTHONUNBUFFERED": "1"}
        if place.device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = place.device
        self._running[key] = Child(
            self._command(key, assignment, runs, resume),
            log=self._file(key, "log"),
            env=environment,
            grace=self._grace,
            record=self._folder / LOGS / key.name,
            cores=place.cores,
        )

    def stop(self, key: Key) -> None:
        """SIGTERM, and SIGKILL after the grace. The guard sees to both."""
        if key in self._running:
            self._running[key].request_end()

    def ended(self) -> list[Exit]:
        """The processes that ended since the last call."""
        return [self._reaped(key) for key, process in list(self._running.items()) if process.dead.is_set()]

    def kill(self) -> None:
        """SIGKILL to all running processes, without grace."""
        for key, process in list(self._running.items()):
            process.kill()
            self._reaped(key)

    def recover(self, key: Key) -> Exit | None:
        """Wait until the guard of an earlier tuner has ended its process, and read the exit status.

        Raises:
            TimeoutError: the guard is still there after twice the grace.
        """
        file = self._file(key, "lock")
        deadline = time.monotonic() + 2 * self._grace + 10
        while file.exists() and _is_held(file):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{key.name} is still running, {2 * self._grace + 10:g} s after its tuner was gone")
            time.sleep(0.05)
        status = self._file(key, "exit")
        code = json.loads(status.read_text())["code"] if status.exists() else None
        return None if code is None else Exit(key, code, last_lines(self._file(key, "log")))

    def _reaped(self, key: Key) -> Exit:
        status = self._running.pop(key).status
        assert status is not None
        return Exit(key, status, last_lines(self._file(key, "log")))

    def _file(self, key: Key, kind: str) -> Path:
        return self._folder / LOGS / f"{key.name}.{kind}"


def last_lines(log: Path) -> str:
    """The end of a log, in one line."""
    if not log.exists():
        return ""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - 4000))
        text = stream.read().decode("utf-8", "replace")
    # A progress bar writes over its line: the text behind the last \r is on the screen.
    lines = [line.rpartition("\r")[2].strip() for line in text.split("\n")]
    return " | ".join([line for line in lines if line][-LAST_LINES:])


def _is_held(file: Path) -> bool:
    with file.open("rb") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def training_command(trainer: str, words: Callable[[Assignment], list[str]], first_seed: int = 0) -> Command:
    """The command line of ``rl-fn train`` for a repetition. ``words``: of an assignment."""

    def command(key: Key, assignment: Assignment, runs: Path, resume: bool) -> list[str]:
        options: list[Any] = ["--seed", first_seed + key.seed, "--name", key.name, "--output", runs]
        command_line = [sys.executable, "-m", "rl_tools.cli", "train", trainer, *words(assignment), *map(str, options)]
        return [*command_line, "--resume"] if resume else command_line

    return command


POLL = 0.2
"""Seconds between two looks at the processes."""


@dataclass(frozen=True)
class Study:
    """A study to run. ``about``: the settings that must be unchanged when it goes on, as JSON."""

    folder: Path
    plan: Plan
    about: Mapping[str, Any]
    sampler: Callable[[Journal], Sampler]
    command: Command
    places: Sequence[Place]
    grace: float = 60.0

    def __post_init__(self) -> None:
        """Refuse a wait that never ends."""
        if not 0 <= self.grace < math.inf:
            raise ValueError(f"--grace is a finite number of seconds from 0 on, got {self.grace:g}")


def run_study(study: Study, *, resume: bool = False) -> list[Event]:
    """Run a study to its end, from its beginning or from its journal; returns the events of the journal.

    Raises:
        ValueError: the folder exists and is not to be resumed, has another study or a link in it, or is in use.
        Stopped: a signal came; all processes have ended, and the study can go on.
    """
    folder = study.folder
    if not resume:
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            raise ValueError(f"{folder} exists: go on with --resume, or give this study another --name") from None
    elif not folder.is_dir():
        raise ValueError(f"there is no study in {folder} to resume")
    require_own_files(folder)
    lock = RunLock(folder)
    try:
        journal = Journal(folder / JOURNAL, len(study.plan.goals))
        _begin(journal, study)
        _to_its_end(journal, study)
        return list(journal.events)
    finally:
        lock.release()


def _begin(journal: Journal, study: Study) -> None:
    """Write the study's settings as the journal's first event, or compare them with this event."""
    about = json.loads(json.dumps(dict(study.about)))
    if not journal.events:
        journal.append({"kind": "study", "time": round(time.time(), 3), **about})
        return
    before = {name: value for name, value in journal.events[0].items() if name not in ("kind", "time")}
    # A journal of an earlier version has no hashes of files.
    names = [name for name in {**about, **before} if name in before or not name.startswith(CONTENTS)]
    changed = [name for name in names if about.get(name) != before.get(name)]
    if changed:
        pairs = "; ".join(f"{name} was {before.get(name)} and is {about.get(name)}" for name in changed)
        raise ValueError(f"{study.folder} is another study: {pairs}. Give this one another --name")


def _to_its_end(journal: Journal, study: Study) -> None:
    plan = study.plan
    processes = TrialProcesses(study.folder, study.command, study.places, grace=study.grace)
    records = RunRecords(study.folder / RUNS, plan)
    past = journal.events[1:]
    scheduler = Scheduler(plan, study.sampler(journal), processes, records, journal.append, past, report=tell)
    stop = StopRequest()
    bar = tqdm(
        total=plan.trials * plan.seeds + plan.confirm, desc="tune", unit="run", dynamic_ncols=True, mininterval=0.5
    )
    try:
        with stop, bar:
            scheduler.recover(time.time())
            closing = False
            while not scheduler.step(time.time()):
                if stop.number is not None and not closing:
                    closing = True
                    scheduler.close()
                _show(bar, scheduler)
                time.sleep(POLL)
            _show(bar, scheduler)
    except StoppedAtOnce as stopped:
        place = f"go on with the same command and --name {study.folder.name} --resume"
        stopped.add_note(f"{_ended(scheduler)} of {plan.trials} trials have ended; {place}")
        raise
    finally:
        # Nothing is left after an error or a second signal.
        processes.kill()
    if scheduler.missing is not None:
        raise ValueError(f"{scheduler.missing}. The study ended at this run; give another one its own --name")
    if stop.number is not None and closing:
        raise Stopped(f"stopped after {_ended(scheduler)} of {plan.trials} trials", study.folder.name, stop.number)


def _ended(scheduler: Scheduler) -> int:
    return sum(trial.told is not None for trial in scheduler.state.trials)


def _show(bar: tqdm, scheduler: Scheduler) -> None:
    ended, before = len(scheduler.state.with_status(*ENDED)), bar.postfix
    postfix = {"running": str(len(scheduler.state.with_status("running")))}
    if (best := scheduler.incumbent()) is not None and best.told is not None:
        values = best.told["values"]
        postfix |= {goal.name: f"{values[goal.name]['mean']:.4g}" for goal in scheduler.plan.goals}
    bar.set_postfix(postfix, refresh=False)
    if (bar.n, before) != (ended, bar.postfix):
        bar.n = ended
        bar.refresh()
