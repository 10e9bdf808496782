"""One run in one folder: steps that are logged, shown, checkpointed, stopped by a signal and taken up again."""

import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, Self

from tqdm import tqdm

from rl_bridge.atomic import write_json
from rl_bridge.checkpoints import Checkpointer
from rl_bridge.engines.base import Engine
from rl_bridge.tracking.recorder import BEGINNING, Recorder

SHOWN = {"reward": "reward", "nll": "nll", "kl": "KL", "entropy": "entropy", "clip_fraction": "clip"}
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stateful(Protocol):
    """What a checkpoint saves of the driver: data streams have this pair. Engines save themselves."""

    def checkpoint_state(self) -> dict[str, Any]: ...
    def load_checkpoint_state(self, state: dict[str, Any]) -> None: ...


class Stopped(KeyboardInterrupt):
    """The user pressed Ctrl-C, or SIGTERM came; a checkpoint of the last whole step of the run ``name`` is on disk."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


class Run:
    """Use as a context manager. ``steps`` is the loop, ``log`` its record, ``cached_result`` what is computed once.

    A ``Recorder`` writes the record, a ``Checkpointer`` the checkpoints.
    """

    def __init__(self, folder: Path, config: Any, *, resume: bool = False, checkpoint_every: int = 25) -> None:
        """``resume`` goes on from the newest whole checkpoint, or begins again if the run was killed before its first.

        A new run's folder must not exist yet.
        """
        self.folder = folder
        self._every = checkpoint_every
        self._checkpointer = Checkpointer(folder / "checkpoints", report=tqdm.write)
        self._started = time.monotonic()
        self._stop = False
        self._from: Path | None = None
        self._resumed: dict[str, Any] | None = None
        if resume:
            self._from = self._newest()
        else:
            folder.mkdir(parents=True)
        if self._from is None:
            write_json(folder / "config.json", asdict(config))
        else:
            self._resumed = self._checkpointer.read(self._from)
        self._finished: list[str] = self._resumed["finished"] if self._resumed else []
        self._cached: dict[str, Any] = self._resumed["cached_results"] if self._resumed else {}
        self._recorder = Recorder(folder, self._resumed["record"] if self._resumed else BEGINNING if resume else None)
        self._bar: tqdm | None = None
        self._stage = ""
        self._step_started = 0.0

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._interrupt) for number in SIGNALS}
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._bar is not None:
            self._bar.close()
        self._recorder.close()
        try:
            self._checkpointer.wait()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(str(failure))

    @property
    def seconds(self) -> float:
        """Time spent on this run, earlier sessions of it included."""
        earlier = self._resumed["seconds"] if self._resumed else 0.0
        return earlier + time.monotonic() - self._started

    def steps(self, stage: str, total: int, *, state: Mapping[str, Engine | Stateful]) -> Iterator[int]:
        """The steps 0 … total − 1 of a stage that are still to be done.

        A checkpoint holds the ``state`` of everything named. A stage that the resumed checkpoint has behind it yields
        nothing; the one it was made in takes its state back and goes on with the next step.
        """
        first = 0
        if stage in self._finished:
            return
        if self._resumed is not None and stage == self._resumed["stage"]:
            first = self._resumed["step_of_stage"]
            self._restore(state)
        self._stage = stage
        self._bar = tqdm(total=total, initial=first, desc=stage, unit="step", dynamic_ncols=True, mininterval=0.5)
        for step in range(first, total):
            self._step_started = time.monotonic()
            yield step
            self._bar.update()
            done = step + 1
            if done == total or done % self._every == 0 or self._stop:
                self._save(stage, done, state)
            if self._stop:
                self._checkpointer.wait()
                raise Stopped(f"stopped after step {done} of {total} of {stage}", self.folder.name)
        self._bar.close()
        # A checkpoint of the next stage remembers that this one is behind it.
        self._finished = [*self._finished, stage]

    def log(self, step: int, metrics: Mapping[str, float], *, tokens: int | None = None) -> None:
        """Record one step: a line of metrics.jsonl, TensorBoard events, the progress bar."""
        record = dict(metrics)
        if tokens is not None:
            record["tokens_per_second"] = tokens / (time.monotonic() - self._step_started)
        self._recorder.write({"stage": self._stage, "step": step, "seconds": round(self.seconds, 3), **record})
        if self._bar is not None:
            shown = {label: f"{record[name]:.3f}" for name, label in SHOWN.items() if name in record}
            if "tokens_per_second" in record:
                shown["tok/s"] = f"{record['tokens_per_second']:.0f}"
            self._bar.set_postfix(shown, refresh=False)

    def print(self, text: str) -> None:
        """Print a line without breaking the progress bar."""
        tqdm.write(text)

    def cached_result(self, name: str, compute: Callable[[], Any]) -> Any:
        """A result that is computed once in a run's life. Its checkpoints keep it."""
        if name not in self._cached:
            # As JSON has it: a checkpoint is read back without unpickling arbitrary classes.
            self._cached[name] = json.loads(json.dumps(compute(), default=str))
        return self._cached[name]

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json and draw the curves, once the last checkpoint is on the disk."""
        self._checkpointer.wait()
        self._recorder.finish(summary)

    def _save(self, stage: str, step: int, state: Mapping[str, Engine | Stateful]) -> None:
        engines, others = _split(state)
        driver = {
            "stage": stage,
            "step_of_stage": step,
            "finished": self._finished,
            "state": {name: holder.checkpoint_state() for name, holder in others.items()},
            "cached_results": self._cached,
            "seconds": self.seconds,
            "record": self._recorder.position(),
        }
        self._checkpointer.save(self._recorder.logged, engines, driver)

    def _restore(self, state: Mapping[str, Engine | Stateful]) -> None:
        assert self._from is not None
        engines, others = _split(state)
        saved = self._checkpointer.read(self._from)["state"]
        if saved.keys() != others.keys():
            raise ValueError(f"{self._from} has the states of {sorted(saved)}, this run has {sorted(others)}")
        # Before the engines: other data than the checkpoint was made on is found out sooner.
        for name, holder in others.items():
            holder.load_checkpoint_state(saved[name])
        self._checkpointer.load(self._from, engines)

    def _newest(self) -> Path | None:
        """What to go on from. A run that was killed before its first checkpoint begins again: nothing of it is lost."""
        path = self._checkpointer.latest()
        if path is None:
            if not (self.folder / "config.json").exists():
                raise ValueError(f"{self.folder} has no checkpoint to resume from: there is no such run")
            tqdm.write(f"{self.folder} was stopped before its first checkpoint: it begins with the first step")
        return path

    def _interrupt(self, number: int, _: object) -> None:
        """Finish the step and stop there; a second signal does not wait."""
        if self._stop:
            raise KeyboardInterrupt
        self._stop = True
        again = "press Ctrl-C again" if number == signal.SIGINT else "signal again"
        tqdm.write(f"stopping after this step ({again} to stop at once)")


def free_folder(output: Path, name: str) -> Path:
    """``output/name``, or the first of ``name-2``, ``name-3``, … that does not exist yet: no run overwrites another."""
    folder, number = output / name, 1
    while folder.exists():
        number += 1
        folder = output / f"{name}-{number}"
    return folder


def _split(state: Mapping[str, Engine | Stateful]) -> tuple[dict[str, Engine], dict[str, Stateful]]:
    engines = {name: holder for name, holder in state.items() if isinstance(holder, Engine)}
    return engines, {name: holder for name, holder in state.items() if not isinstance(holder, Engine)}
