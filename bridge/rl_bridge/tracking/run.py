"""One run in one folder: steps that are logged, shown, checkpointed, stopped by Ctrl-C and taken up again."""

import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, Self

from tqdm import tqdm

from rl_bridge.atomic import write_json
from rl_bridge.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from rl_bridge.tracking.curves import draw_curves
from rl_bridge.tracking.events import EventLog

SHOWN = {"reward": "reward", "nll": "nll", "kl": "KL", "entropy": "entropy", "clip_fraction": "clip"}


class Stateful(Protocol):
    """What a checkpoint saves: engines and data streams have this pair."""

    def training_state(self) -> dict[str, Any]: ...
    def load_training_state(self, state: dict[str, Any]) -> None: ...


class Stopped(KeyboardInterrupt):
    """The user pressed Ctrl-C; a checkpoint of the last whole step of the run ``name`` is on disk."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


class Run:
    """Use as a context manager. ``steps`` is the loop, ``log`` its record, ``cached_result`` what is computed once."""

    def __init__(self, folder: Path, config: Any, *, resume: bool = False, checkpoint_every: int = 25) -> None:
        """``resume`` goes on from the newest checkpoint of ``folder``; a new run's folder must not exist yet."""
        self.folder = folder
        self._every = checkpoint_every
        self._checkpoints = folder / "checkpoints"
        self._started = time.monotonic()
        self._stop = False
        self._cached: dict[str, Any] = {}
        self._resumed = self._load() if resume else None
        if not resume:
            folder.mkdir(parents=True)
            write_json(folder / "config.json", asdict(config))
        self._metrics = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._metrics.truncate(self._resumed["metrics_bytes"] if self._resumed else 0)
        self._events = EventLog(folder / "events", purge_step=self._resumed["logged"] if self._resumed else None)
        self._logged = self._resumed["logged"] if self._resumed else 0
        self._bar: tqdm | None = None
        self._stage = ""
        self._step_started = 0.0

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._previous)
        if self._bar is not None:
            self._bar.close()
        self._metrics.close()
        self._events.close()

    @property
    def seconds(self) -> float:
        """Time spent on this run, earlier sessions of it included."""
        earlier = self._resumed["seconds"] if self._resumed else 0.0
        return earlier + time.monotonic() - self._started

    def steps(self, stage: str, total: int, *, state: Mapping[str, Stateful]) -> Iterator[int]:
        """The steps 0 … total − 1 of a stage that are still to be done.

        A checkpoint holds the ``state`` of everything named. A stage that the resumed checkpoint has behind it yields
        nothing; the one it was made in takes its state back and goes on with the next step.
        """
        first = 0
        if self._resumed is not None and stage in self._resumed["finished"]:
            return
        if self._resumed is not None and stage == self._resumed["stage"]:
            first = self._resumed["step"]
            for name, holder in state.items():
                holder.load_training_state(self._resumed["state"][name])
        finished = self._resumed["finished"] if self._resumed else []
        self._stage = stage
        self._bar = tqdm(total=total, initial=first, desc=stage, unit="step", dynamic_ncols=True, mininterval=0.5)
        for step in range(first, total):
            self._step_started = time.monotonic()
            yield step
            self._bar.update()
            done = step + 1
            if done == total or done % self._every == 0 or self._stop:
                self._save(stage, done, state, finished)
            if self._stop:
                raise Stopped(f"stopped after step {done} of {total} of {stage}", self.folder.name)
        self._bar.close()
        # A checkpoint of the next stage remembers that this one is behind it.
        if self._resumed is None:
            self._resumed = {"finished": [], "stage": "", "seconds": 0.0}
        self._resumed["finished"] = [*finished, stage]

    def log(self, step: int, metrics: Mapping[str, float], *, tokens: int | None = None) -> None:
        """Record one step: a line of metrics.jsonl, TensorBoard events, the progress bar."""
        record = dict(metrics)
        if tokens is not None:
            record["tokens_per_second"] = tokens / (time.monotonic() - self._step_started)
        self._write({"stage": self._stage, "step": step, "seconds": round(self.seconds, 3), **record})
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
        """Write summary.json and draw the curves."""
        self._metrics.flush()
        records = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text("utf-8").splitlines()]
        levels = {"held_out": summary["accuracy_before"]} if "accuracy_before" in summary else None
        draw_curves(records, self.folder / "curves.png", title=self.folder.name, levels=levels)
        write_json(self.folder / "summary.json", summary)

    def _write(self, record: dict[str, Any]) -> None:
        self._metrics.write(json.dumps(record) + "\n")
        self._metrics.flush()
        self._events.write(record, self._logged)
        self._logged += 1

    def _save(self, stage: str, step: int, state: Mapping[str, Stateful], finished: list[str]) -> None:
        content = {
            "stage": stage,
            "step_of_stage": step,
            "finished": finished,
            "state": {name: holder.training_state() for name, holder in state.items()},
            "cached_results": self._cached,
            "seconds": self.seconds,
            "metrics_bytes": self._metrics.tell(),
            "logged": self._logged,
        }
        save_checkpoint(self._checkpoints, self._logged, content)

    def _load(self) -> dict[str, Any]:
        path = latest_checkpoint(self._checkpoints)
        if path is None:
            raise ValueError(f"{self.folder} has no checkpoint to resume from")
        loaded = load_checkpoint(path)
        self._cached = loaded["cached_results"]
        return {**loaded, "step": loaded["step_of_stage"]}

    def _interrupt(self, *_: object) -> None:
        """Finish the step and stop there; a second Ctrl-C does not wait."""
        if self._stop:
            raise KeyboardInterrupt
        self._stop = True
        tqdm.write("stopping after this step (press Ctrl-C again to stop at once)")


def free_folder(output: Path, name: str) -> Path:
    """``output/name``, or the first of ``name-2``, ``name-3``, … that does not exist yet: no run overwrites another."""
    folder, number = output / name, 1
    while folder.exists():
        number += 1
        folder = output / f"{name}-{number}"
    return folder
