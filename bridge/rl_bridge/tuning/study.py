"""A study in its folder: one tuner at a time, from its beginning or from its journal, to its end or to a signal."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from rl_bridge.tracking.lock import RunLock, require_own_files
from rl_bridge.tracking.signals import Stopped, StopRequest, tell
from rl_bridge.tuning.journal import JOURNAL, Event, Journal
from rl_bridge.tuning.records import RunRecords
from rl_bridge.tuning.samplers.protocol import Sampler
from rl_bridge.tuning.scheduler import Plan, Scheduler
from rl_bridge.tuning.state import ENDED
from rl_bridge.tuning.trials import RUNS, Command, Place, TrialProcesses

POLL = 0.2
"""Seconds between two looks at the processes."""


@dataclass(frozen=True)
class Study:
    """``about``: what a study that goes on must have unchanged, as JSON: space, goals, sampler, command."""

    folder: Path
    plan: Plan
    about: Mapping[str, Any]
    sampler: Callable[[], Sampler]
    command: Command
    places: Sequence[Place]
    grace: float = 60.0


def run_study(study: Study, *, resume: bool = False) -> list[Event]:
    """Run a study to its end; returns the events of its journal.

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
        journal = Journal(folder / JOURNAL)
        try:
            _begin(journal, study)
            _to_its_end(journal, study)
            return list(journal.events)
        finally:
            journal.close()
    finally:
        lock.release()


def _begin(journal: Journal, study: Study) -> None:
    """The journal's first event says what the study is."""
    about = json.loads(json.dumps(dict(study.about)))
    if not journal.events:
        journal.append({"kind": "study", "time": round(time.time(), 3), **about})
        return
    before = {name: value for name, value in journal.events[0].items() if name not in ("kind", "time")}
    changed = [name for name in {**about, **before} if about.get(name) != before.get(name)]
    if changed:
        pairs = "; ".join(f"{name} was {before.get(name)} and is {about.get(name)}" for name in changed)
        raise ValueError(f"{study.folder} is another study: {pairs}. Give this one another --name")


def _to_its_end(journal: Journal, study: Study) -> None:
    plan = study.plan
    processes = TrialProcesses(study.folder, study.command, study.places, grace=study.grace)
    records = RunRecords(study.folder / RUNS, plan)
    past = journal.events[1:]
    scheduler = Scheduler(plan, study.sampler(), processes, records, journal.append, past, report=tell)
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
    finally:
        # Nothing is left after an error or a second signal.
        processes.kill()
    if scheduler.missing is not None:
        raise ValueError(f"{scheduler.missing}. The study ended at this run; give another one its own --name")
    if stop.number is not None and closing:
        done = sum(trial.told is not None for trial in scheduler.state.trials)
        raise Stopped(f"stopped after {done} of {plan.trials} trials", study.folder.name, stop.number)


def _show(bar: tqdm, scheduler: Scheduler) -> None:
    ended, before = len(scheduler.state.those(*ENDED)), bar.postfix
    shown = {"running": str(len(scheduler.state.those("running")))}
    if (best := scheduler.incumbent()) is not None and best.told is not None:
        values = best.told["values"]
        shown |= {goal.name: f"{values[goal.name]['mean']:.4g}" for goal in scheduler.plan.goals}
    bar.set_postfix(shown, refresh=False)
    if (bar.n, before) != (ended, bar.postfix):
        bar.n = ended
        bar.refresh()
