"""Steps with an update that was skipped because a loss or a gradient was not finite: counted, kept, the cause named."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rl_bridge.common.files import replacing

KEPT = 5
"""Batches of a run that stay on the disk, the newest."""
WHOSE = {"critic_skipped": "the critic", "skipped": "the trained model"}
"""Entry of a step's record → the model of which an update was skipped."""


def whose(record: Mapping[str, Any]) -> list[str]:
    """The models of which the step with this record skipped an update.

    >>> whose({"loss": 0.5, "critic_skipped": 1.0})
    ['the critic']
    """
    return [model for entry, model in WHOSE.items() if record.get(entry)]


class Skips:
    """``folder`` gets the batch of each skipped step, ``step-N-0.safetensors``.

    What is no tensor is JSON in the file's metadata, under ``about``, with stage, step and the models that skipped.
    """

    def __init__(self, folder: Path, limit: int, state: Mapping[str, Any] | None = None) -> None:
        """``limit``: skipped steps in a row that are too many. ``state``: of a resumed run."""
        self._folder, self._limit = folder, limit
        self._state: dict[str, Any] = {"total": 0, "in_row": 0, "last": -2, "models": []} | dict(state or {})
        if state:
            # A run that was stopped for its skips gets all of them again.
            self._state["in_row"] = 0

    @property
    def total(self) -> int:
        """Skipped steps of the whole run."""
        return self._state["total"]

    def state(self) -> dict[str, Any]:
        """What a checkpoint remembers."""
        return dict(self._state)

    def add(self, number: int, models: Sequence[str], batch: Any, about: Mapping[str, Any]) -> None:
        """Count the step with record ``number``, of which these ``models`` skipped an update, and keep its batch."""
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
    """Put a batch's tensors into ``tensors`` by their names; returns what is no tensor."""
    parts = batch._asdict() if hasattr(batch, "_asdict") else batch if isinstance(batch, dict) else None
    if isinstance(batch, torch.Tensor):
        tensors[name or "batch"] = batch.detach().cpu().clone().contiguous()
        return {}
    if parts is None:
        return {} if batch is None else {name: batch}
    found: dict[str, Any] = {}
    for key, value in parts.items():
        found |= _take_apart(value, f"{name}.{key}" if name else str(key), tensors)
    return found
