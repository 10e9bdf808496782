"""The record of a run: metrics.jsonl, TensorBoard events, curves, summary. The driver alone writes it."""

import json
import os
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_bridge.atomic import write_json
from rl_bridge.plots import spared
from rl_bridge.tracking.curves import draw_curves
from rl_bridge.tracking.events import EventLog
from rl_bridge.tracking.provenance import not_followed
from rl_bridge.tracking.records import METRICS, last_attempt, read_records, repaired
from rl_bridge.tracking.scrubbing import scrubbed
from rl_bridge.tracking.signals import tell


class Recorder:
    """Appends records. What a checkpoint remembers of it is ``position``: a resumed run cuts off what came after."""

    def __init__(
        self, folder: Path, position: Mapping[str, Any] | None = None, *, again: bool = False, repair: bool = False
    ) -> None:
        """``position``: where a resumed run goes on; None is the beginning, of a run begun ``again`` too.

        ``repair``: leave out records that are damaged, instead of an error.

        Raises:
            ValueError: the records up to ``position`` are not those that were written.
        """
        self.folder = folder
        file = folder / METRICS
        self._attempt = last_attempt(file) + 1
        self._logged = position["logged"] if position else 0
        size, self._crc = (position["metrics_bytes"], position["crc32"]) if position else (0, 0)
        if position:
            size, self._crc = repaired(file, position, repair=repair, report=tell)
        # It is closed by `close`.
        self._metrics = open(file, "a", encoding="utf-8", opener=not_followed)  # noqa: SIM115
        self._metrics.truncate(size)
        self._events = EventLog(folder / "events", purge_step=self._logged if again else None)
        self._events_failed = False

    @property
    def attempt(self) -> int:
        """The number of this session of the run, from 1."""
        return self._attempt

    @property
    def logged(self) -> int:
        """How many steps were recorded."""
        return self._logged

    def position(self) -> dict[str, int]:
        """Where the record ends now. Up to there it is on the disk."""
        self._metrics.flush()
        os.fsync(self._metrics.fileno())
        return {"metrics_bytes": self._metrics.tell(), "logged": self._logged, "crc32": self._crc}

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one step's record."""
        self.note(record)
        if not self._events_failed:
            try:
                self._events.write(record, self._logged)
            except OSError as error:
                self._give_up_events(error)
        self._logged += 1

    def note(self, record: Mapping[str, Any]) -> None:
        """Append a line that is no step's."""
        about = {"run": self.folder.name, "attempt": self._attempt, "time": round(time.time(), 3)}
        line = json.dumps({**without_secrets(record), **about}) + "\n"
        self._metrics.write(line)
        self._metrics.flush()
        self._crc = zlib.crc32(line.encode(), self._crc)

    def notes(self) -> set[str]:
        """The texts of the notes so far, of all sessions."""
        self._metrics.flush()
        lines = map(json.loads, (self.folder / METRICS).read_text("utf-8").splitlines())
        return {str(line["note"]) for line in lines if "note" in line}

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json and draw the curves."""
        self._metrics.flush()
        records = read_records(self.folder / METRICS)
        levels = {"held_out": summary["accuracy_before"]} if "accuracy_before" in summary else None
        if records:
            with spared("curves.png"):
                draw_curves(records, self.folder / "curves.png", title=self.folder.name, levels=levels)
        write_json(self.folder / "summary.json", summary)

    def close(self) -> None:
        """Flush and close."""
        try:
            self._metrics.close()
        finally:
            try:
                self._events.close()
            except OSError as error:
                if not self._events_failed:
                    self._give_up_events(error)

    def _give_up_events(self, error: OSError) -> None:
        """TensorBoard's events are a copy of metrics.jsonl: a run that has its record goes on without them."""
        self._events_failed = True
        tell(f"no more TensorBoard events: {error}; to catch up: `rl-fn export {self.folder} --to tensorboard`")


def without_secrets(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with its texts scrubbed; its names are metrics', and stay."""
    return {name: scrubbed(value) if isinstance(value, str | list) else value for name, value in record.items()}
