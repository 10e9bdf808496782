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
            if isinstance(value, int | float) and name != "step":
                self._writer.add_scalar(f"{record['stage']}/{name}", value, number)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()
