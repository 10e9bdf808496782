"""How much of a run an exporter has sent, beside the run; one exporter at a time."""

import fcntl
import hashlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any, Self

from rl_bridge.atomic import write_json
from rl_bridge.tracking.scrubbing import scrubbed

FOLDER = "exports"


class Cursor:
    """Use as a context manager: the lock is held inside.

    ``state`` is None before the first export. A cursor that cannot be read counts as none: everything is sent again.
    """

    def __init__(self, run: Path, name: str, destination: str, *, wait: float = 0.0) -> None:
        """``destination``: each has a cursor of its own. ``wait``: seconds for another exporter to end."""
        digest = hashlib.sha256(destination.encode()).hexdigest()[:8]
        self.file = run / FOLDER / f"{name}-{digest}.json"
        self._lock, self._wait, self._name = self.file.with_suffix(".lock"), wait, name
        self._descriptor: int | None = None
        self.state: dict[str, Any] | None = None

    def __enter__(self) -> Self:
        """Raises ValueError if another process exports this run to this place."""
        self._lock.parent.mkdir(exist_ok=True)
        self._descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o644)
        deadline = time.monotonic() + self._wait
        while not self._taken(self._descriptor):
            if time.monotonic() >= deadline:
                holder = os.pread(self._descriptor, 100, 0).decode()
                os.close(self._descriptor)
                raise ValueError(
                    f"{self._lock.parent.parent} is being exported to {self._name} by process {holder}, "
                    f"which did not end in {self._wait:.0f} s"
                )
            time.sleep(0.1)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, str(os.getpid()).encode(), 0)
        try:
            self.state = json.loads(self.file.read_text("utf-8"))
        except (FileNotFoundError, ValueError):
            self.state = None
        return self

    def __exit__(self, *error: object) -> None:
        assert self._descriptor is not None
        os.close(self._descriptor)

    def write(self, state: dict[str, Any]) -> None:
        """Remember, whole or not at all."""
        self.state = state
        write_json(self.file, state)

    @staticmethod
    def _taken(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def key_of(run: Path) -> str:
    """What a run is called in every store, made once: a folder that was moved keeps it."""
    file = run / FOLDER / "key"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        # Part of file names and of ids, where libraries take few characters.
        name = re.sub(r"[^\w.-]+", "-", scrubbed(run.resolve().name))
        made = f"{name}-{hashlib.sha256(f'{run.resolve()} {time.time_ns()}'.encode()).hexdigest()[:8]}"
        temporary = file.with_name(f".key.{os.getpid()}")
        temporary.write_text(made, "utf-8")
        try:
            os.link(temporary, file)
        except FileExistsError:
            pass  # another exporter was faster, and its key is everyone's
        finally:
            temporary.unlink()
    return file.read_text("utf-8")
