"""One process a run folder: a lock that the operating system takes back when its holder dies."""

import fcntl
import json
import os
import socket
from datetime import datetime
from pathlib import Path

NAME = ".lock"
_held: set[int] = set()


class RunLock:
    """Held from ``RunLock(folder)`` to ``release()``. Its file says who holds it."""

    def __init__(self, folder: Path) -> None:
        """Take the lock of a folder that exists.

        Raises:
            ValueError: another process, or another run of this one, holds it.
        """
        self._file = folder / NAME
        self._descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 1000, 0).decode("utf-8", "replace").strip()
            os.close(self._descriptor)
            raise ValueError(
                f"{folder} is in use by {_named(holder)}; stop that run first, or give this one another --name"
            ) from None
        except BaseException:
            os.close(self._descriptor)
            raise
        _held.add(self._descriptor)
        about = {"host": socket.gethostname(), "pid": os.getpid(), "since": f"{datetime.now():%Y-%m-%d %H:%M:%S}"}
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(about).encode(), 0)

    def release(self) -> None:
        """Give the lock back. Calling this again does nothing."""
        if self._descriptor in _held:
            _held.remove(self._descriptor)
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)


def _named(holder: str) -> str:
    try:
        about = json.loads(holder)
    except json.JSONDecodeError:  # the moment between the lock and its note
        return "another process"
    return f"process {about['pid']} on {about['host']} since {about['since']}"


def _forget() -> None:
    """A forked child that outlives this process must not keep the lock."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)
