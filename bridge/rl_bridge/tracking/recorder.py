"""The record of a run: metrics.jsonl, TensorBoard events, curves, summary. The driver alone writes it."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_bridge.atomic import write_json
from rl_bridge.tracking.curves import draw_curves
from rl_bridge.tracking.events import EventLog

BEGINNING = {"metrics_bytes": 0, "logged": 0}
"""The position of a record that is begun again."""


class Recorder:
    """Appends records. What a checkpoint remembers of it is ``position``: a resumed run cuts off what came after."""

    def __init__(self, folder: Path, position: Mapping[str, int] | None = None) -> None:
        """``position``: where a resumed run goes on; None is a new run."""
        self.folder = folder
        self._logged = position["logged"] if position else 0
        file, size = folder / "metrics.jsonl", position["metrics_bytes"] if position else 0
        if size and (there := file.stat().st_size) < size:
            raise ValueError(f"{file} has {there} bytes, the checkpoint was made after {size}")
        self._metrics = file.open("a", encoding="utf-8")
        self._metrics.truncate(size)
        self._events = EventLog(folder / "events", purge_step=position["logged"] if position else None)

    @property
    def logged(self) -> int:
        """How many records there are."""
        return self._logged

    def position(self) -> dict[str, int]:
        """Where the record ends now. Up to there it is on the disk."""
        self._metrics.flush()
        os.fsync(self._metrics.fileno())
        return {"metrics_bytes": self._metrics.tell(), "logged": self._logged}

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record."""
        self._metrics.write(json.dumps(record) + "\n")
        self._metrics.flush()
        self._events.write(record, self._logged)
        self._logged += 1

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json and draw the curves."""
        self._metrics.flush()
        records = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text("utf-8").splitlines()]
        levels = {"held_out": summary["accuracy_before"]} if "accuracy_before" in summary else None
        draw_curves(records, self.folder / "curves.png", title=self.folder.name, levels=levels)
        write_json(self.folder / "summary.json", summary)

    def close(self) -> None:
        """Flush and close."""
        self._metrics.close()
        self._events.close()
