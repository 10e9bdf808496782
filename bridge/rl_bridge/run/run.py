"""One run in one folder: steps that are logged, shown, checkpointed, stopped by a signal and taken up again."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from rl_bridge.checkpoints import Checkpointer
from rl_bridge.common.scrubbing import environment_secrets, scrubbed_text
from rl_bridge.common.terminal import Stopped, StopRequest, remarks, tell
from rl_bridge.engines.engine import Engine
from rl_bridge.executors import Executor
from rl_bridge.run.best import Best
from rl_bridge.run.folder import Opened, begin_or_resume
from rl_bridge.run.options import OBSERVED, RunOptions, require_output, require_used
from rl_bridge.run.progress import Bar
from rl_bridge.run.recorder import Recorder, Skips, whose


class Observer(Protocol):
    """An object that a run calls, as trackers and profilers are: a subclass has the methods that it needs.

    An observer that raises in ``metrics``, ``recorded`` or ``ended`` ends no run: its error is told once and kept in
    the record, and ``ended`` is the only method that is still called. An error in ``started`` is the run's.

    >>> import tempfile
    >>> class Rewards(Observer):
    ...     def __init__(self):
    ...         self.rewards = []
    ...
    ...     def recorded(self, record):
    ...         self.rewards.append(record["reward"])
    >>> rewards, folder = Rewards(), Path(tempfile.mkdtemp()) / "run"
    >>> with Run(folder, RunOptions(), observers=[rewards]) as run:
    ...     for step in run.steps("policy", 3, state={}):
    ...         run.log(step, {"reward": step / 2})
    run folder: ...
    >>> rewards.rewards
    [0.0, 0.5, 1.0]
    """

    serves: Sequence[str] = ()
    """Names of the options of ``RunOptions`` that this observer reads: a pipeline refuses those that none reads."""

    def started(self, run: "Run") -> None:
        """The run has its folder, and no step was taken in this session."""

    def metrics(self, number: int) -> Mapping[str, float]:
        """More metrics of the record with this number, from 0, before it is written; those of the run itself stay."""
        return {}

    def recorded(self, record: Mapping[str, Any]) -> None:
        """A step's metrics were recorded, with its ``stage``, ``step`` and ``seconds``."""

    def ended(self, error: BaseException | None) -> None:
        """The record and the last checkpoint are on the disk. ``error``: the error that ended the run early."""


class Observers:
    """The observers of one run."""

    def __init__(self, observers: Sequence[Observer], note: Callable[[str], None]) -> None:
        """``note`` gets a line about each observer that fails while the run goes on."""
        self._all, self._note = observers, note
        self._started, self._active = list[Observer](), list[Observer]()

    def start(self, run: "Run") -> None:
        """Begin with each."""
        for observer in self._all:
            self._started.append(observer)
            observer.started(run)
            self._active.append(observer)

    def metrics(self, number: int) -> dict[str, float]:
        """More metrics of a record, of all observers."""
        metrics: dict[str, float] = {}

        def add(observer: Observer) -> None:
            # What is no number fails here, and not where the record is written.
            metrics.update({name: float(value) for name, value in observer.metrics(number).items()})

        self._each(self._active, add, self._note)
        return metrics

    def recorded(self, record: Mapping[str, Any]) -> None:
        """Give a copy of a record to each."""
        self._each(self._active, lambda observer: observer.recorded(dict(record)), self._note)

    def end(self, error: BaseException | None) -> None:
        """End each whose ``started`` was called, also where that failed."""
        self._each(self._started, lambda observer: observer.ended(error), tell)

    @staticmethod
    def _each(observers: list[Observer], call: Callable[[Observer], None], note: Callable[[str], None]) -> None:
        for observer in tuple(observers):
            try:
                call(observer)
            except Exception as error:
                observers.remove(observer)
                message = " ".join(f"{type(error).__name__}: {error}".split())
                message = scrubbed_text(message, environment_secrets())
                note(f"{type(observer).__name__} failed, and the run goes on without it: {message}")


class Stateful(Protocol):
    """A part of the driver that a checkpoint saves, as a data stream. Engines save themselves."""

    def checkpoint_state(self) -> dict[str, Any]: ...
    def load_checkpoint_state(self, state: dict[str, Any]) -> None: ...


class Run:
    """Use as a context manager. ``steps`` is the loop, ``log`` its record, ``cached_result`` for one-time results.

    A ``Recorder`` writes the record, a ``Checkpointer`` the checkpoints. One process at a time has a run's folder.
    """

    def __init__(
        self,
        folder: Path,
        config: Any,
        *,
        fingerprints: Mapping[str, str] | None = None,
        resume: bool = False,
        resume_anyway: bool = False,
        checkpoint_every: int = 25,
        keep: int = 2,
        stop_after_skips: int = 3,
        executor: Executor | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        """``resume`` goes on from the newest whole checkpoint, or begins again if the run was killed before its first.

        A new run's folder is empty or does not exist yet. ``fingerprints``: name → hash of an input of the run that is
        no option, such as its data. ``resume_anyway`` resumes with other options and fingerprints too, and without
        damaged records. ``keep``: number of the newest checkpoints that stay. ``stop_after_skips``: see ``log``.
        ``executor``: the place of the run's engines, for observers that measure there. ``observers``: called while the
        run goes on.

        Raises:
            ValueError: another process has the folder, there is nothing to resume, or the checkpoint was made with
                other options; the message names each with both values.
        """
        self.folder, self.executor = folder, executor
        self._every, self._anyway = checkpoint_every, resume_anyway
        self._checkpointer = Checkpointer(folder / "checkpoints", keep=keep, report=tell)
        self._started = time.monotonic()
        self._opened: Opened = begin_or_resume(
            folder, config, self._checkpointer, fingerprints or {}, resume=resume, anyway=resume_anyway
        )
        self._resumed = self._opened.state
        state = self._resumed or {}
        ended = state.get("finished", {})
        self._finished: dict[str, int | None] = ended if isinstance(ended, dict) else dict.fromkeys(ended)
        """Stages that have ended, and the steps of each; None in a checkpoint of an earlier version."""
        self._cached: dict[str, Any] = state.get("cached_results", {})
        self._first_update: int | None = state.get("first_update")
        self._skips = Skips(folder / "skipped", stop_after_skips, state.get("skips"))
        self._best = Best(state.get("best"))
        self._elsewhere: str | None = None
        """Why the best checkpoint has none of the engines that it was to be loaded into."""
        self._recorder: Recorder = self._opened.recorder
        self._observers = Observers(observers, self.note)
        self._signals = StopRequest()
        self._bar: Bar | None = None
        self._stage, self._state = "", {}
        self._unsaved: tuple[str, int, Mapping[str, Engine | Stateful], dict[str, int]] | None = None
        """Stage, steps, state and versions of a step that the loop left behind its record, before its checkpoint."""
        self._step_started, self._moved = 0.0, False
        self._logged: dict[str, int] = {}
        """Versions of the engines' weights at the last record."""
        self.done = 0
        """Steps of this stage that are done: recorded, or behind the loop."""
        if lost := self._lose_best():
            self.note(f"{lost}: the best of the steps that follow takes its place")

    def __enter__(self) -> Self:
        self._signals.__enter__()
        try:
            self._observers.start(self)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._signals.__exit__()
        if self._bar is not None:
            self._bar.close()
        failures = []
        end = partial(self._observers.end, error)
        for close in (self._recorder.close, self._checkpointer.close, end, self._opened.lock.release):
            try:
                close()
            except BaseException as failure:  # Ctrl-C in a tracker's last seconds must not keep the folder
                failures.append(failure)
        raised = error if error is not None or not failures else failures.pop(0)
        if raised is not None:
            begun = self._recorder.logged > 0 or isinstance(raised, Stopped) or not self._opened.unmake(self.folder)
            for note in [*map(str, failures), *([self._how_to_go_on()] if begun else [])]:
                raised.add_note(note)
        if error is None and raised is not None:
            raise raised

    @property
    def seconds(self) -> float:
        """Time spent on this run, earlier sessions of it included."""
        earlier = self._resumed["seconds"] if self._resumed else 0.0
        return earlier + time.monotonic() - self._started

    def steps(self, stage: str, total: int, *, state: Mapping[str, Engine | Stateful]) -> Iterator[int]:
        """The steps 0 … total − 1 of a stage that are still to be done.

        A checkpoint holds the ``state`` of everything named. A stage that ended before the resumed checkpoint yields
        nothing; the checkpoint's own stage takes its state back and goes on with the next step, unless that is of a
        best step behind which the loop was left: the stage ended there, and only ``resume_anyway`` goes on with it.

        Raises:
            ValueError: the engines' hosts do not share the run's folder.
        """
        if stage in self._finished:
            ended = self._finished[stage]
            self.done = total if ended is None else ended
            return
        self._save_best()
        if self._stage not in ("", stage, *self._finished):
            self._finished = {**self._finished, self._stage: self.done}  # the loop left that stage before its last step
        self.done = 0
        self._stage, self._state = stage, state
        self._checkpointer.require_shared(_split(state)[0])
        if self._resumed is not None and stage == self._resumed["stage"]:
            self.done = self._resumed["step_of_stage"]
            self._restore(state)
            if self._resumed.get("left") and self.done < total and not self._anyway:
                tell(
                    f"{stage} ended behind step {self.done - 1}, its best so far, where the loop left it: its steps go "
                    "on with --resume-anyway (resume_anyway=True)"
                )
                total = self.done
        else:
            updated = next((engine for engine in _split(state)[0].values() if _is_updated(engine)), None)
            self._first_update = None if updated is None else updated.call("weights_version")
        self._bar = Bar(stage, self.done, total)
        for step in range(self.done, total):
            self._step_started, before = time.monotonic(), self._recorder.logged
            try:
                yield step
            except GeneratorExit:
                if self._recorder.logged > before:
                    self._unsaved = stage, step + 1, state, self._logged
                raise
            self._bar.update()
            self.done = done = step + 1
            stop, cause = self._signals.number, self._skips.cause()
            recorded, is_best = self._recorder.logged > before, self._best.is_new(self._recorder.logged)
            if recorded and is_best and not self._moved and _versions(state) != self._logged:
                self._moved = True
                self.note(
                    "weights moved between run.log and the end of the step: the best checkpoint has those of the end, "
                    "and its record measured others; log behind the updates"
                )
            due = done == total or done % self._every == 0 or is_best or stop is not None or cause is not None
            # A checkpoint has its record's number: that of a best step is not written again by steps without a record.
            if due and (recorded or not is_best):
                self._save(stage, done, state)
            if cause is not None:
                self._checkpointer.wait()
                raise FloatingPointError(f"{cause}; stopped after step {done} of {total} of {stage}")
            if stop is not None:
                self._checkpointer.wait()
                raise Stopped(f"stopped after step {done} of {total} of {stage}", self.folder.name, stop)
        self._bar.close()
        # A checkpoint of the next stage remembers that this one has ended.
        self._finished = {**self._finished, stage: self.done}

    def log(self, step: int, metrics: Mapping[str, float], *, tokens: int | None = None, batch: Any = None) -> None:
        """Record one step: a line of metrics.jsonl, TensorBoard events, the progress bar.

        A record with ``skipped`` or ``critic_skipped`` counts as a skipped step: an update's loss or gradient was not
        finite. After ``stop_after_skips`` such steps in a row the run writes a checkpoint and stops with
        FloatingPointError. ``batch``: kept as a file in the run's folder if the step was skipped; the last few of a run
        stay. ``tokens``: number of tokens that went through the trainer in this step.
        """
        record = dict(metrics)
        if tokens is not None:
            record["tokens_per_second"] = tokens / (time.monotonic() - self._step_started)
            record["trained_tokens"] = tokens
        if models := whose(record):
            self._skips.add(self._recorder.logged, models, batch, {"stage": self._stage, "step": step})
        engines = {name: engine for name, engine in _split(self._state)[0].items() if engine.slots}
        self._logged = _versions(engines)
        version = next((self._logged[name] for name, engine in engines.items() if _is_updated(engine)), None)
        self.done = step + 1
        if version is not None and self._first_update is not None:
            record |= {"weights_version": version, "optimizer_step": version - self._first_update}
        record = {"stage": self._stage, "step": step, "seconds": round(self.seconds, 3), **record}
        record = {**record, **self._observers.metrics(self._recorder.logged), **record}
        self._recorder.write(record)
        self._observers.recorded(record)
        self._best.see(record, self._recorder.logged)
        if self._bar is not None:
            self._bar.show(record, self._skips.total)

    def keep_best(self, metric: str, mode: Literal["max", "min"] = "max") -> None:
        """Never remove the checkpoint of the step whose record has the best ``metric`` so far.

        Of several stages it is that of the last one which has the metric.
        """
        self._best.watch(metric, mode)

    def load_best(self, engines: Mapping[str, Engine]) -> float | None:
        """Give engines the state of the best checkpoint, before an export; returns its metric, None if there is none.

        ``engines``: by their names in the ``state`` of ``steps``. A checkpoint that is damaged or gone, or that is of a
        stage with other engines, is noted: the run has its result all the same.
        """
        self._save_best()
        self._checkpointer.wait()
        self._elsewhere = None
        if (lost := self._lose_best() or self.best_lost) is not None:
            self.note(f"{lost}: the engines stay as they are")
        if self._best.record is None:
            return None
        path = self._checkpointer.path(self._best.record)
        if others := [name for name in engines if not (path / name).is_dir()]:
            self._elsewhere = f"the best step is of the stage {self._best.stage!r}, which has no {others[0]!r}"
            self.note(f"{self._elsewhere}: the engines stay as they are")
            return None
        self._checkpointer.load(path, engines)
        return self._best.value

    def _save_best(self) -> None:
        """The checkpoint of the best step, if that is the one which the loop left."""
        unsaved, self._unsaved = self._unsaved, None
        if unsaved is None or not self._best.is_new(self._recorder.logged):
            return
        stage, step, state, versions = unsaved
        try:
            why = None if _versions(state) == versions else "the weights have moved since then"
            if why is None:
                self._save(stage, step, state, left=True)
        except Exception as error:  # of engines that were released, or died
            why = f"{type(error).__name__}: {error}"
        if why is not None:
            where = f"step {step - 1} of {stage}"
            self._best.lose(f"the best checkpoint is lost, the loop left {where} before it was written: {why}")

    @property
    def best_lost(self) -> str | None:
        """Why no best checkpoint was loaded, where there was one: lost, and no step was better since, or of others."""
        return self._best.lost or self._elsewhere

    def _lose_best(self) -> str | None:
        """Forget the best checkpoint if it is damaged or gone, and say so."""
        if self._best.record is None:
            return None
        reason = self._checkpointer.damage_of(self._checkpointer.path(self._best.record))
        if reason is not None:
            self._best.lose(f"the best checkpoint is lost, {reason}")
        return None if reason is None else self._best.lost

    def print(self, text: str) -> None:
        """Print a line without breaking the progress bar."""
        tell(text)

    def note(self, text: str) -> None:
        """Print a line and keep it in the record."""
        tell(text)
        self._recorder.note({"step": self._recorder.logged, "note": text})

    def keep_remarks(self, texts: Sequence[str]) -> None:
        """Keep lines that were printed before there was a record, unless an earlier session has them there."""
        before = self._recorder.notes()
        for text in texts:
            if text not in before:
                self._recorder.note({"step": self._recorder.logged, "note": text})

    def cached_result(self, name: str, compute: Callable[[], Any]) -> Any:
        """A result that is computed once in a run's life. Its checkpoints keep it."""
        if name not in self._cached:
            # JSON's types alone: a checkpoint is read back without unpickling arbitrary classes.
            self._cached[name] = json.loads(json.dumps(compute(), default=str))
        return self._cached[name]

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json and draw the curves, once the last checkpoint is on the disk."""
        self._checkpointer.wait()
        self._recorder.finish(summary)
        model = [f"model: {self.folder / 'model'}"] if (self.folder / "model").exists() else []
        tell("; ".join([f"run: {self.folder}", *model, f"to look at it: rl-fn report {self.folder}"]))

    def _save(self, stage: str, step: int, state: Mapping[str, Engine | Stateful], *, left: bool = False) -> None:
        engines, others = _split(state)
        driver = {
            "stage": stage,
            "step_of_stage": step,
            "left": left,
            "finished": self._finished,
            "state": {name: holder.checkpoint_state() for name, holder in others.items()},
            "meshes": _meshes(engines),
            "cached_results": self._cached,
            "seconds": self.seconds,
            "record": self._recorder.position(),
            "first_update": self._first_update,
            "skips": self._skips.state(),
            "best": self._best.state(),
            **self._opened.identity,
        }
        self._checkpointer.save(self._recorder.logged, engines, driver, pinned=self._best.pinned())

    def _restore(self, state: Mapping[str, Engine | Stateful]) -> None:
        path = self._opened.path
        assert path is not None
        engines, others = _split(state)
        driver = self._checkpointer.read(path)
        saved = driver["state"]
        if saved.keys() != others.keys():
            raise ValueError(f"{path} has the states of {sorted(saved)}, this run has {sorted(others)}")
        # Before the engines, whose loading takes longer: other data is refused at once.
        for name, holder in others.items():
            try:
                holder.load_checkpoint_state(saved[name])
            except ValueError as error:
                if not self._anyway:
                    raise
                tell(f"{name} begins anew: {error}")
        self._checkpointer.load(path, engines)
        before, now = driver.get("meshes", {}), _meshes(engines)
        both = [name for name in now if name in before]
        moved = [f"{name} from {before[name]} to {now[name]}" for name in both if before[name] != now[name]]
        if moved:
            tell(f"another mesh: {'; '.join(moved)}; the numbers are the same to rounding, not to the bit")
            self._recorder.note({"step": self._recorder.logged, "meshes": moved})

    def _how_to_go_on(self) -> str:
        again = f"go on with the same command and --name {self.folder.name} --resume"
        path = self._checkpointer.newest()
        return f"{'no checkpoint was written yet' if path is None else f'the newest checkpoint is {path}'}; {again}"


class DryRun(Exception):
    """A run with ``dry_run`` has come to the place where its folder would be made."""


def open_run(
    pipeline: RunOptions, fingerprints: Mapping[str, str], executor: Executor, observers: Sequence[Observer]
) -> Run:
    """The run of a pipeline in a folder of its own, with the options that all pipelines share.

    The remarks about its inputs are in its record.

    Raises:
        ValueError: besides what ``Run`` raises: options that none of the observers reads.
        DryRun: the options say that the run ends here.
    """
    served = {option for observer in observers for option in observer.serves}
    ignored = [option for option in OBSERVED if option not in served]
    require_used(pipeline, ignored, "without an observer that reads it, as rl_tools.trainers.observers_of makes them")
    require_output(pipeline.output, writable=True)
    if pipeline.dry_run:
        raise DryRun
    run = Run(
        pipeline.folder(),
        pipeline,
        fingerprints=fingerprints,
        resume=pipeline.resume,
        resume_anyway=pipeline.resume_anyway,
        checkpoint_every=pipeline.checkpoint_every,
        keep=pipeline.keep_checkpoints,
        stop_after_skips=pipeline.stop_after_skips,
        executor=executor,
        observers=observers,
    )
    run.keep_remarks(remarks())
    return run


def _split(state: Mapping[str, Engine | Stateful]) -> tuple[dict[str, Engine], dict[str, Stateful]]:
    engines = {name: holder for name, holder in state.items() if isinstance(holder, Engine)}
    return engines, {name: holder for name, holder in state.items() if not isinstance(holder, Engine)}


def _meshes(engines: Mapping[str, Engine]) -> dict[str, str]:
    return {name: str(engine.mesh) for name, engine in engines.items()}


def _is_updated(engine: Engine) -> bool:
    """Whether the engine has an optimiser and a version."""
    return engine.methods.keys() >= {"optimizer_step", "weights_version"}


def _versions(state: Mapping[str, Engine | Stateful]) -> dict[str, int]:
    """Versions of all weights of a state, by engine."""
    engines = _split(state)[0].items()
    return {name: engine.call("weights_version") for name, engine in engines if "weights_version" in engine.methods}
