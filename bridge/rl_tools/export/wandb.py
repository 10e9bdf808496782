"""Weights & Biases: an offline run in the output's folder, for ``wandb sync``; or live, with ``WANDB_MODE=online``."""

import glob
import os
import shutil
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rl_tools.export.exporter import About, Artifact, GoesOn, Place, Row, library

BLOCK, HEADER = 32768, 7
WHOLE, LAST = 1, 4


def records(file: Path) -> Iterator[bytes]:
    """Whole records of a ``.wandb`` file, LevelDB's log format; a torn one at its end is left out.

    Records are counted because W&B's writer reports no error when the disk is full.
    """
    data, place, parts = file.read_bytes(), HEADER, b""
    while place + HEADER <= len(data):
        left = BLOCK - place % BLOCK
        if left < HEADER:
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + HEADER])
        parts += data[place + HEADER : place + HEADER + size]
        place += HEADER + size
        if kind in (WHOLE, LAST) and place <= len(data):
            yield parts
            parts = b""


PATIENCE = 10.0
"""Seconds for an offline run's file to be whole after the run's end."""
FLUSH, GROWTH = 1.0, 3.0
"""Seconds between two writes of W&B to that file; seconds of patience with a late write."""


class RunExporter:
    """A run in W&B. Rows have their own clocks (``clock/step``, ``clock/tokens`` …): a step of W&B's may not go back.

    An offline run is one file that one process writes: another process writes the file anew. A run that was taken back
    from a server keeps its id there for ever, so this run goes on under the next id.
    """

    def __init__(self, about: About, place: Place, memory: dict[str, Any]) -> None:
        self._about, self._place, self._memory = about, place, memory
        self._mode = os.environ.get("WANDB_MODE", "offline")
        self.goes_on = GoesOn.NEVER if self._mode == "offline" else GoesOn.AFTER_CLOSE
        self._run: Any = None
        self._logged = 0
        # Size of the offline run's file when it last grew, and the time since which a row waits to be in the file.
        self._size, self._stuck = 0, False
        self._unwritten_since: float | None = None

    @property
    def _id(self) -> str:
        generation = self._memory.get("generation", 1)
        return self._about.key if generation == 1 else f"{self._about.key}-{generation}"

    def has(self, rows: int) -> bool:
        """Whether the offline run's file has the rows. A server is not asked: the cursor counts sent rows."""
        return self._mode != "offline" or (bool(self._folders()) and self._kept() >= rows)

    def clear(self) -> None:
        """Remove offline runs that were not synced; a run on a server is deleted there, or left and named anew."""
        online = self._memory.get("online") == self._id
        synced = online
        for folder in self._folders():
            if any(folder.glob("*.wandb.synced")):
                synced = True
            else:
                shutil.rmtree(folder)
        if online and self._mode == "online":
            self._delete_from_server()
        if synced:
            self._memory["generation"] = self._memory.get("generation", 1) + 1

    def open(self) -> None:
        """Begin the run. The library collects nothing of its own: no console, no code, no machine, no git."""
        wandb = library("wandb")
        self._place.output.mkdir(parents=True, exist_ok=True)
        if self._mode == "online":
            self._memory["online"] = self._id
        settings = wandb.Settings(
            mode=self._mode,
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            save_code=False,
            disable_job_creation=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
            x_transaction_log_flush_interval=FLUSH,
        )
        provenance = {"key": self._about.key, "attempts": list(self._about.provenance)}
        self._run = wandb.init(
            project=self._place.project,
            id=self._id,
            name=self._about.name,
            config={**self._about.config, "rl_fn": provenance},
            dir=str(self._place.output),
            resume=None if self._mode == "offline" else "allow",
            reinit="create_new",
            settings=settings,
        )
        # Without step_sync, as a row of the machine's numbers has no step.
        self._run.define_metric("clock/*")
        self._run.define_metric("*", step_metric="clock/step", step_sync=False)
        self._run.define_metric("system/*", step_metric="clock/sample", step_sync=False)

    def send(self, rows: Sequence[Row]) -> None:
        """Log a row of history for each row.

        Raises:
            OSError: earlier rows do not get into the file of an offline run.
        """
        if self._mode == "offline":
            self._await_growth()
        for row in rows:
            clocks = {f"clock/{name}": value for name, value in row.clocks.items()}
            self._logged += 1
            self._run.log({**row.metrics, **clocks, "_timestamp": row.time})
        if rows and self._unwritten_since is None:
            self._unwritten_since = time.monotonic()

    def artifact(self, artifact: Artifact) -> None:
        """Log an artifact of type ``model`` with the manifest, and with the files if they are asked for."""
        wandb = library("wandb")
        model = wandb.Artifact(f"{self._about.key}-model", type="model", metadata=artifact.manifest())
        if artifact.copied:
            model.add_dir(str(artifact.folder))
        self._run.log_artifact(model)

    def close(self, ended: bool) -> None:
        """Wait until the library has written, or sent, everything.

        Raises:
            OSError: the file of an offline run lacks rows.
        """
        if self._run is None:
            return
        self._run.finish(exit_code=0)
        if self._mode != "offline" or self._stuck:
            return
        # The library's own process writes on after finish(), and reports no error of writing.
        deadline = time.monotonic() + PATIENCE
        while (written := self._kept()) != self._logged and time.monotonic() < deadline:
            time.sleep(0.05)
        if written != self._logged:
            raise OSError(f"W&B wrote {written} of {self._logged} rows to {self._place.output}; is the disk full?")

    def _await_growth(self) -> None:
        """Raise while the run goes on if the file cannot grow; W&B's own process reports no such error."""
        deadline = time.monotonic() + GROWTH
        while self._unwritten_since is not None and (size := self._bytes()) == self._size:
            if time.monotonic() < self._unwritten_since + 2 * FLUSH:
                return
            if time.monotonic() > deadline:
                self._stuck = True
                raise OSError(
                    f"W&B's file in {self._place.output} stays at {size} bytes, though rows come; is the disk full?"
                )
            time.sleep(0.05)
        self._size, self._unwritten_since = self._bytes(), None

    def _bytes(self) -> int:
        return sum(file.stat().st_size for folder in self._folders() for file in folder.glob("*.wandb"))

    def _kept(self) -> int:
        record = library("wandb.proto.wandb_internal_pb2").Record
        files = [file for folder in self._folders() for file in folder.glob("*.wandb")]
        return sum(record.FromString(part).HasField("history") for file in files for part in records(file))

    def _folders(self) -> list[Path]:
        return sorted((self._place.output / "wandb").glob(f"offline-run-*-{glob.escape(self._id)}"))

    def _delete_from_server(self) -> None:
        wandb = library("wandb")
        api = wandb.Api()
        api.run(f"{api.default_entity}/{self._place.project}/{self._id}").delete()
