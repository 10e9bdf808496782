"""TensorBoard events."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard.writer import SummaryWriter


class EventLog:
    """Scalars under ``stage/name``, against the number of the record."""

    def __init__(self, folder: Path, *, purge_step: int | None) -> None:
        """``purge_step``: a resumed run takes back what was recorded from there on."""
        self._writer = SummaryWriter(str(folder), purge_step=purge_step)

    def write(self, record: Mapping[str, Any], number: int) -> None:
        """One record's numbers."""
        for name, value in record.items():
            if name not in ("stage", "step") and isinstance(value, int | float):
                self._writer.add_scalar(f"{record['stage']}/{name}", value, number)

    def write_metrics(self, number: int, metrics: Mapping[str, float], time: float) -> None:
        """Numbers under their own names, at the time when they were measured."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, number, walltime=time)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()
