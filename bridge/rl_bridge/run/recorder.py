"""The record of a run: metrics.jsonl, curves, summary, and updates that were skipped. The driver alone writes it."""

import json
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.utils.tensorboard.writer import SummaryWriter

from rl_bridge.common.append_log import AppendLog, read_log
from rl_bridge.common.files import replacing, write_json
from rl_bridge.common.plots import Figure, spared
from rl_bridge.common.scrubbing import scrubbed
from rl_bridge.common.statistics import running_mean
from rl_bridge.common.terminal import tell
from rl_bridge.run.records import METRICS, last_attempt, read_records, repaired

# Updates that are skipped, because a loss or a gradient is not finite.

KEPT = 5
"""Number of the newest batches of a run that stay on the disk."""
WHOSE = {"critic_skipped": "the critic", "skipped": "the trained model"}
"""Entry of a step's record → the model of which an update was skipped."""


def whose(record: Mapping[str, Any]) -> list[str]:
    """The models of which the step with this record skipped an update.

    >>> whose({"loss": 0.5, "critic_skipped": 1.0})
    ['the critic']
    """
    return [model for entry, model in WHOSE.items() if record.get(entry)]


class Skips:
    """Counts skipped steps. ``folder`` gets the batch of each, ``step-N-0.safetensors``.

    Values that are no tensors are JSON in the file's metadata, under ``about``, with stage, step and the models that
    skipped.
    """

    def __init__(self, folder: Path, limit: int, state: Mapping[str, Any] | None = None) -> None:
        """``limit``: skipped steps in a row that are too many. ``state``: of a resumed run."""
        self._folder, self._limit = folder, limit
        self._state: dict[str, Any] = {"total": 0, "in_row": 0, "last": -2, "models": []} | dict(state or {})
        if state:
            # A run that was stopped for its skips may have as many again.
            self._state["in_row"] = 0

    @property
    def total(self) -> int:
        """Skipped steps of the whole run."""
        return self._state["total"]

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return dict(self._state)

    def add(self, number: int, models: Sequence[str], batch: Any, about: Mapping[str, Any]) -> None:
        """Count the step with record ``number``, in which these ``models`` skipped an update, and keep its batch."""
        state = self._state
        in_row = state["in_row"] if number == state["last"] + 1 else 0
        state["models"] = sorted({*models, *(state["models"] if in_row else ())})
        state |= {"in_row": in_row + 1, "last": number, "total": state["total"] + 1}
        if batch is not None:
            self._write(number, batch, {**about, "skipped": list(models)})

    def cause(self) -> str | None:
        """Why the run has to stop; None if it may go on."""
        if self._state["in_row"] < self._limit:
            return None
        models = " and ".join(self._state["models"])
        return (
            f"loss or gradient of {models} was not finite in {self._state['in_row']} steps in a row, so no such update "
            f"changed a weight; the batches are in {self._folder}"
        )

    def _write(self, number: int, batch: Any, about: dict[str, Any]) -> None:
        tensors: dict[str, torch.Tensor] = {}
        others = _take_apart(batch, "", tensors)
        place = 0
        while (path := self._folder / f"step-{number:08d}-{place}.safetensors").exists():
            place += 1
        with replacing(path) as temporary:
            save_file(tensors, temporary, metadata={"about": json.dumps({**about, "others": others}, default=str)})
        for old in sorted(self._folder.glob("step-*.safetensors"))[:-KEPT]:
            old.unlink()


def _take_apart(batch: Any, name: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Put a batch's tensors into ``tensors`` by their names; returns the values that are no tensors."""
    parts = batch._asdict() if hasattr(batch, "_asdict") else batch if isinstance(batch, dict) else None
    if isinstance(batch, torch.Tensor):
        tensors[name or "batch"] = batch.detach().cpu().clone().contiguous()
        return {}
    if parts is None:
        return {} if batch is None else {name: batch}
    others: dict[str, Any] = {}
    for key, value in parts.items():
        others |= _take_apart(value, f"{name}.{key}" if name else str(key), tensors)
    return others


PANELS = (
    "reward",
    "held_out",
    "kl",
    "approx_kl",
    "entropy",
    "clip_fraction",
    "nll",
    "loss",
    "accuracy",
    "grad_norm",
    "tokens_per_second",
)


def draw_curves(
    records: Sequence[Mapping[str, Any]], path: Path, *, title: str, levels: Mapping[str, float] | None = None
) -> None:
    """Draw learning curves as one PNG: a panel a metric of ``PANELS``, a colour a stage, against seconds.

    ``levels`` are dashed lines: metric → its value before the stage that the run is about.
    """
    panels = [name for name in PANELS if any(name in record for record in records)]
    if not panels:
        raise ValueError(f"there is nothing to draw: no step has one of {', '.join(PANELS)}")
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.2 * columns, 2.8 * rows), layout="constrained")
    axes = np.atleast_1d(figure.subplots(rows, columns)).reshape(-1)
    stages = list(dict.fromkeys(record["stage"] for record in records))
    for axis, name in zip(axes, panels, strict=False):
        for number, stage in enumerate(stages):
            points = [(r["seconds"], r[name]) for r in records if r["stage"] == stage and name in r]
            if points:
                _curve(axis, np.array(points), f"C{number}", stage)
        if levels and name in levels:
            axis.axhline(levels[name], color="grey", linewidth=0.8, linestyle="--", label=f"before: {levels[name]:.3f}")
        axis.set_title(name.replace("_", " "), fontsize=10)
        axis.set_xlabel("seconds", fontsize=8)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    figure.suptitle(title)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)


def _curve(axis: Any, points: np.ndarray, colour: str, label: str) -> None:
    """Draw the raw points faintly and their running mean boldly, as the report does."""
    smooth = running_mean(points[:, 1].tolist())
    if smooth is not None:
        axis.plot(points[:, 0], points[:, 1], color=colour, alpha=0.25, linewidth=0.8)
        axis.plot(points[:, 0], smooth, color=colour, label=label)
    else:
        axis.plot(points[:, 0], points[:, 1], color=colour, marker="o", markersize=3, label=label)


class Recorder:
    """The record of a run. A checkpoint remembers its ``position``: a resumed run cuts off later lines."""

    def __init__(
        self, folder: Path, position: Mapping[str, Any] | None = None, *, again: bool = False, repair: bool = False
    ) -> None:
        """``position``: the end of a resumed run's records. None: the beginning, of a run begun ``again`` too.

        ``repair``: leave out damaged records, instead of an error.

        Raises:
            ValueError: the records up to ``position`` are damaged.
        """
        self.folder = folder
        file = folder / METRICS
        self.attempt = last_attempt(file) + 1
        """The number of this session of the run, from 1."""
        self.logged: int = position["logged"] if position else 0
        """Number of the recorded steps."""
        size, self._crc = (position["metrics_bytes"], position["crc32"]) if position else (0, 0)
        if position:
            size, self._crc = repaired(file, position, repair=repair, report=tell)
        self._metrics = AppendLog(file)
        self._metrics.cut(size)
        # A resumed run takes back the events of this record and of all later ones.
        self._events = SummaryWriter(str(folder / "events"), purge_step=self.logged if again else None)
        self._events_failed = False

    def position(self) -> dict[str, int]:
        """The present end of the record, which is on the disk up to there."""
        return {"metrics_bytes": self._metrics.sync(), "logged": self.logged, "crc32": self._crc}

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one step's record; its numbers are TensorBoard events ``stage/name`` against the record's number."""
        self.note(record)
        if not self._events_failed:
            try:
                for name, value in record.items():
                    if name not in ("stage", "step") and isinstance(value, int | float):
                        self._events.add_scalar(f"{record['stage']}/{name}", value, self.logged)
            except OSError as error:
                self._give_up_events(error)
        self.logged += 1

    def note(self, record: Mapping[str, Any]) -> None:
        """Append a line that is no step's."""
        about = {"run": self.folder.name, "attempt": self.attempt, "time": round(time.time(), 3)}
        self._crc = zlib.crc32(self._metrics.append({**without_secrets(record), **about}), self._crc)

    def notes(self) -> set[str]:
        """The texts of the notes so far, of all sessions."""
        return {str(line["note"]) for line in read_log(self.folder / METRICS) if "note" in line}

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json and draw the curves."""
        records = read_records(self.folder / METRICS)
        levels = {"held_out": summary["accuracy_before"]} if "accuracy_before" in summary else None
        if records:
            with spared("curves.png"):
                draw_curves(records, self.folder / "curves.png", title=self.folder.name, levels=levels)
        write_json(self.folder / "summary.json", summary)

    def close(self) -> None:
        """Flush and close."""
        self._metrics.close()
        try:
            self._events.close()
        except OSError as error:
            if not self._events_failed:
                self._give_up_events(error)

    def _give_up_events(self, error: OSError) -> None:
        """Go on without TensorBoard's events, which are a copy of metrics.jsonl."""
        self._events_failed = True
        tell(f"no more TensorBoard events: {error}; to catch up: `rl-fn export {self.folder} --to tensorboard`")


def without_secrets(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with its texts scrubbed; its keys, which are names of metrics, stay."""
    return {name: scrubbed(value) if isinstance(value, str | list) else value for name, value in record.items()}
