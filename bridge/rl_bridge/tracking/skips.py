"""Steps that were skipped because a loss or a gradient was not finite: counted, their batches kept, the cause named."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rl_bridge.atomic import replacing

KEPT = 5
"""Batches of a run that stay on the disk, the newest."""


class Skips:
    """``folder`` gets a file for each skipped step, ``step-N.safetensors`` with ``step-N.json`` beside it."""

    def __init__(self, folder: Path, limit: int, state: dict[str, int] | None = None) -> None:
        """``limit``: skipped steps in a row that are too many. ``state``: of a resumed run."""
        self._folder, self._limit = folder, limit
        self._state = {"total": 0, "in_row": 0, "last": -2} | (state or {})
        if state:
            # A run that was stopped for its skips gets all of them again.
            self._state["in_row"] = 0

    @property
    def total(self) -> int:
        """Skipped steps of the whole run."""
        return self._state["total"]

    def state(self) -> dict[str, int]:
        """What a checkpoint remembers."""
        return dict(self._state)

    def add(self, number: int, batch: Any, about: dict[str, Any]) -> None:
        """Count the step with record ``number``, once however often the step was skipped, and keep its batches."""
        state = self._state
        if number != state["last"]:
            state["in_row"] = state["in_row"] + 1 if number == state["last"] + 1 else 1
            state["last"], state["total"] = number, state["total"] + 1
        if batch is not None:
            self._write(number, batch, about)

    def cause(self) -> str | None:
        """Why the run has to stop; None if it may go on."""
        if self._state["in_row"] < self._limit:
            return None
        return (
            f"loss or gradient was not finite in {self._state['in_row']} steps in a row, so none of them changed a "
            f"weight; their batches are in {self._folder}"
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
