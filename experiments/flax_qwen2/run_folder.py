"""What a run leaves on disk, each file whole or absent: metrics, curve, summary, orbax checkpoints to go on from."""

import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from matplotlib.figure import Figure
from tqdm import tqdm

from rl_bridge.common import step_folders
from rl_bridge.common.files import replacing, write_json

State = TypeVar("State")
SHOWN = {"reward": "reward", "nll": "nll", "entropy": "entropy", "clip_fraction": "clip", "tokens_per_second": "tok/s"}


class RunFolder:
    """``runs/NAME``: config.json, metrics.jsonl, learning_curve.png, summary.json, checkpoints/."""

    def __init__(self, folder: Path, config: Mapping[str, Any], *, resume: bool, checkpoint_every: int) -> None:
        """A finished run of the same name is replaced; an unfinished one is only taken up, never thrown away."""
        self.folder = folder
        self.records: list[dict[str, Any]] = []
        self.cached_results: dict[str, Any] = {}
        self._every = checkpoint_every
        config = json.loads(json.dumps(config, default=str))
        unfinished = (folder / "checkpoints").exists() and not (folder / "summary.json").exists()
        if resume:
            if not (folder / "config.json").exists():
                raise ValueError(f"{folder} has no run to resume")
            before = json.loads((folder / "config.json").read_text())
            differs = {k: (before.get(k), config.get(k)) for k in before | config if before.get(k) != config.get(k)}
            if differs:
                raise ValueError(f"{folder} was started with other options (then, now): {differs}")
        elif unfinished:
            raise ValueError(f"{folder} holds an unfinished run: give --resume to go on with it, or another --name")
        elif folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", config)
        self._checkpoints = (folder / "checkpoints").absolute()
        self._checkpoints.mkdir(exist_ok=True)
        step_folders.sweep(self._checkpoints)
        self._clocks = (time.monotonic(), time.process_time())
        self._earlier = (0.0, 0.0)
        self._step_started = 0.0

    @property
    def seconds(self) -> tuple[float, float]:
        """Wall-clock and CPU seconds spent on this run, those before a resume included."""
        wall, cpu = (
            now - then for now, then in zip((time.monotonic(), time.process_time()), self._clocks, strict=True)
        )
        return self._earlier[0] + wall, self._earlier[1] + cpu

    def restore(self, like: Callable[[int], State]) -> tuple[State, int]:
        """The newest state, shaped and placed as ``like(step)``, and the number of steps behind it."""
        path = self._newest()
        if path is None:
            return like(0), 0
        step = step_folders.step_of(path)
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like(step))
        with ocp.StandardCheckpointer() as checkpointer:
            state = checkpointer.restore(path / "state", abstract)
        progress = json.loads((path / "progress.json").read_text())
        self.cached_results, self._earlier = progress["cached_results"], tuple(progress["seconds"])
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        self.records = [record for record in map(json.loads, lines) if record["step"] < step]
        return state, step

    def steps(self, first: int, total: int) -> Iterator[int]:
        """The steps still to be done, with a progress bar. Each is ended by ``done``."""
        with (
            tqdm(total=total, initial=first, unit="step", dynamic_ncols=True, mininterval=0.5) as self._bar,
            _stop_on_interrupt() as self._stop,
        ):
            for step in range(first, total):
                self._step_started = time.monotonic()
                yield step

    def done(self, step: int, stage: str, metrics: Mapping[str, Any], state: Any, *, tokens: Any) -> None:
        """Log a step; save ``state`` when due, and before a requested stop, which raises KeyboardInterrupt.

        Reading the metrics waits for the device.
        """
        values = {name: round(float(value), 6) for name, value in metrics.items()}
        values["tokens_per_second"] = round(float(tokens) / (time.monotonic() - self._step_started), 1)
        self.records.append({"step": step, "stage": stage, "seconds": round(self.seconds[0], 3)} | values)
        shown = {label: f"{values[name]:.3g}" for name, label in SHOWN.items() if name in values}
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update()
        if self._stop or self._bar.n == self._bar.total or (step + 1) % self._every == 0:
            self._save(step + 1, state)
        if self._stop:
            raise KeyboardInterrupt(f"stopped after step {step + 1} of {self._bar.total}; --resume goes on")

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._write_metrics()
        with replacing(self.folder / "learning_curve.png") as temporary:
            learning_curve({self.folder.name: self.records}).savefig(temporary, format="png", dpi=120)
        write_json(self.folder / "summary.json", summary)

    def _write_metrics(self) -> None:
        with replacing(self.folder / "metrics.jsonl") as temporary:
            temporary.write_text("".join(json.dumps(record) + "\n" for record in self.records))

    def _save(self, step: int, state: Any) -> None:
        self._write_metrics()
        path = step_folders.path_of(self._checkpoints, step)
        temporary = step_folders.begin(path, [])
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(temporary / "state", state)
        progress = {"cached_results": self.cached_results, "seconds": list(self.seconds)}
        step_folders.write_json(temporary / "progress.json", progress)
        step_folders.commit(path, step_folders.records(temporary), {"step": step}, keep=2)

    def _newest(self) -> Path | None:
        """The newest whole checkpoint, None before the first. What is damaged is named and put aside.

        Raises:
            ValueError: there are checkpoints, and all of them are damaged.
        """
        damaged: dict[Path, str] = {}
        for path in reversed(step_folders.checkpoints(self._checkpoints)):
            reason = step_folders.damage(path)
            if reason is None:
                for other, why in damaged.items():
                    step_folders.set_aside(other)
                    print(f"going on from {path.name}, because {why}", file=sys.stderr)
                return path
            damaged[path] = reason
        if damaged:
            raise ValueError(f"no checkpoint of {self.folder} is whole: {'; '.join(damaged.values())}")
        return None


def learning_curve(runs: dict[str, list[dict[str, Any]]]) -> Figure:
    """Sampled reward with held-out accuracy, and entropy, against the step; a colour a run."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, (name, records) in enumerate(runs.items()):
        colour = f"C{number}"
        for axis, metric, style in (
            (left, "reward", {"alpha": 0.35, "linewidth": 0.8}),
            (left, "held_out", {"marker": "o", "markersize": 3, "label": f"{name}, held-out"}),
            (right, "entropy", {"linewidth": 1.0}),
        ):
            points = [(record["step"], record[metric]) for record in records if metric in record]
            if points:
                axis.plot(*zip(*points, strict=True), color=colour, **style)
    left.axhline(0.95, color="grey", linewidth=0.8, linestyle="--")
    left.set(xlabel="step, warm start included", ylabel="exact match", ylim=(0, 1.02))
    left.legend(fontsize=7)
    right.set(xlabel="step, warm start included", ylabel="entropy of sampled tokens (nats)")
    return figure


@contextmanager
def _stop_on_interrupt() -> Iterator[list[int]]:
    """The list fills with the signal's number on Ctrl-C or SIGTERM, to be looked at between steps.

    Arrays donated to an update are gone until it returns, so the step is let to end; a second signal does not wait.
    """
    received: list[int] = []

    def handle(number: int, _: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
