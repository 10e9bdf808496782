"""One process a folder of a run or a study, and nothing outside of it: its lock, and no links in it."""

import errno
import fcntl
import json
import os
import socket
import stat
from datetime import datetime
from pathlib import Path

NAME = ".lock"
_held: set[int] = set()


class RunLock:
    """Held from ``RunLock(folder)`` to ``release()``. Its file says who holds it.

    The operating system takes the lock back when its holder dies.
    """

    def __init__(self, folder: Path) -> None:
        """Take the lock of a folder that exists.

        Raises:
            ValueError: another process, or another run of this one, holds it; or its file is a link.
        """
        self._file = folder / NAME
        try:
            self._descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            if error.errno == errno.ELOOP:  # what it points to would be emptied
                raise ValueError(f"{self._file} is a link; a run writes to its own files: remove it") from None
            raise
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


def require_own_files(folder: Path) -> None:
    """Refuse a folder in which anything but files and folders of its own lies: a run or a study writes to all of it.

    The folder itself may be a link, for the user gives it. A file that lines are added to has no second name: its other
    name is a copy that somebody keeps (``cp -al``).

    Raises:
        ValueError: with the first such name.
    """
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in sorted([*folders, *files])):
            about = path.lstat()
            if not (stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode)):
                kind = "a link" if stat.S_ISLNK(about.st_mode) else "no plain file"
                raise ValueError(f"{path} is {kind}, and a run writes to its own files: remove it")
            if stat.S_ISREG(about.st_mode) and about.st_nlink > 1 and _is_added_to(path):
                raise ValueError(
                    f"{path} is a hard link, and a run adds lines to its own files, which would change the other one "
                    f"too: make it a file of its own (cp {path.name} new && mv new {path.name})"
                )


def _is_added_to(path: Path) -> bool:
    return path.suffix in (".jsonl", ".log") or path.parent.name == "events"


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
