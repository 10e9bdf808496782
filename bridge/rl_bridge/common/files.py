"""Files that are written whole or not at all, locks of files and folders, and folders that end with their process."""

import contextlib
import errno
import json
import os
import secrets
import shutil
import socket
import stat
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

MODEL_SUFFIXES = (".json", ".safetensors", ".txt", ".model", ".jinja")
"""Ends of the names of files that a model and its tokenizer are read from. The hub's cache has more files."""
VOCABULARIES = ("vocab.txt", "merges.txt", "dict.txt")
"""Names of those that end by ``.txt``, as a licence may."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path`` to write to; on success it takes its place, on an error it is removed.

    Works for a file and for a folder (make it with ``mkdir``). The new content is on the disk before it gets the name.
    An old folder makes room under the name ``.NAME.old`` and is removed last; ``sweep`` brings it back after a kill in
    between. One process at a time writes to a path: the next one removes temporary files of a dead one.

    Raises:
        IsADirectoryError: a file was to take the place of a folder, which stays as it is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, old = _temporary(path), _old(path)
    _bring_back(path)
    _remove(temporary)
    try:
        yield temporary
        _sync(temporary)
        if path.is_dir() and not temporary.is_dir():
            raise IsADirectoryError(f"{path} is a folder, and a file was to be written there: name a file in it")
        if path.is_dir():
            os.rename(path, old)
        os.replace(temporary, path)
        sync_folder(path.parent)
        _remove(old)
    finally:
        _remove(temporary)


def sweep(folder: Path) -> None:
    """Remove half-written files of a dead process in a folder, and bring back folders that it had not yet replaced."""
    for left in folder.glob(".*.old"):
        _bring_back(left.with_name(left.name[1 : -len(".old")]))
    for left in folder.glob(".*.tmp"):
        _remove(left)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON."""
    with replacing(path) as temporary:
        text = json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n"
        # Half of a surrogate pair has no UTF-8. Python writes its code point as JSON does.
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def _old(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _bring_back(path: Path) -> None:
    """Finish a replacement that a kill between the two renames interrupted."""
    old = _old(path)
    if old.exists() and not path.exists():
        os.rename(old, path)
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Wait until a file, or a folder with all that is in it, is on the disk."""
    if path.is_dir():
        for part in path.iterdir():
            _sync(part)
        sync_folder(path)
    else:
        sync_file(path)


def sync_file(file: Path) -> None:
    """Wait until a file's bytes are on the disk."""
    with file.open("rb+") as stream:
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class InUse(Exception):
    """Another process, or another part of this one, has the lock; the message is who."""


class Lock:
    """The lock of a file, from ``Lock(file)`` to ``release()``, or as a context manager. The file names the holder.

    The operating system takes the lock back when its holder dies. A forked process does not have the lock.
    """

    def __init__(self, file: Path, *, wait: float = 0.0) -> None:
        """Take the lock, at most ``wait`` seconds from now.

        Raises:
            InUse: somebody else had it all the time.
            OSError: the file is a link, or cannot be written.
        """
        self.process = os.getpid()
        """The process that took the lock."""
        # Any thread may release the lock, which is the process's.
        self._lock = FileLock(file, wait, thread_local=False, on_acquired=self._say_who)
        try:
            self._lock.acquire()
        except Timeout:
            raise InUse(_holder(file)) from None

    def release(self) -> None:
        """Give the lock back. Calling this again does nothing, nor does it in a forked process."""
        if self._lock.is_locked:
            os.ftruncate(self._descriptor, 0)
            self._lock.release()

    def _say_who(self, descriptor: int) -> None:
        self._descriptor = descriptor
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": f"{datetime.now():%Y-%m-%d %H:%M:%S}"}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def _holder(file: Path) -> str:
    try:
        holder = json.loads(file.read_text("utf-8"))
        return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (OSError, ValueError, TypeError, KeyError):  # the moment between the lock and its note
        return "another process"


NAME = ".lock"


class RunLock(Lock):
    """The lock of the folder of a run or a study."""

    def __init__(self, folder: Path) -> None:
        """Take the lock of a folder that exists.

        Raises:
            ValueError: another process, or another run of this one, holds it; or its file is a link.
        """
        try:
            super().__init__(folder / NAME)
        except InUse as holder:
            raise ValueError(
                f"{folder} is in use by {holder}; stop that run first, or give this one another --name"
            ) from None
        except OSError as error:
            if error.errno == errno.ELOOP:  # the file behind the link would be emptied
                raise ValueError(f"{folder / NAME} is a link; a run writes to its own files: remove it") from None
            raise


def require_own_files(folder: Path) -> None:
    """Refuse a folder with links or special files in it: a run or a study writes to everything in its folder.

    The folder itself may be a link, as the user names it. A file that lines are added to may have no second name, which
    would be somebody's copy (``cp -al``).

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


KINDS = ("vllm", "served", "weights")
"""Checkpoints and logs of engines, checkpoints of servers, copies of weights."""
IN_USE = "in_use"
"""The file in a folder whose lock says that its owner lives: a process that ends, by whatever, loses the lock."""


class TemporaryFolder:
    """The folder ``rl_fn-KIND-…``, which ends with its process, and is locked from the moment that it has this name.

    ``close`` removes the folder (again: no effect), or the process's exit; after a SIGKILL, the next process that makes
    such a folder.
    """

    def __init__(self, kind: str, parent: Path | None = None, *, private: bool = True) -> None:
        """Make one beside those of other processes, and remove those of killed ones.

        Args:
            kind: of ``KINDS``.
            parent: None is where temporary files are.
            private: no other user can read it.
        """
        assert kind in KINDS, kind
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        sweep_folders(parent)
        name = f"rl_fn-{kind}-{os.getpid()}-{secrets.token_hex(4)}"
        # Nobody sweeps a folder before it has its name, and by then the folder is locked.
        hidden = parent / f".{name}"
        hidden.mkdir(mode=0o700 if private else 0o777)
        lock = Lock(hidden / IN_USE)
        self.path = hidden.rename(parent / name)
        self.close = weakref.finalize(self, _remove_folder, self.path, lock)


def sweep_folders(parent: Path) -> None:
    """Remove the folders of processes of this user that were killed."""
    for folder in (path for kind in KINDS for path in parent.glob(f"rl_fn-{kind}-*")):
        with contextlib.suppress(OSError, InUse):  # its owner removes it just now, or lives
            if folder.lstat().st_uid == os.geteuid() and (folder / IN_USE).is_file():
                _remove_folder(folder, Lock(folder / IN_USE))


def _remove_folder(folder: Path, lock: Lock) -> None:
    # A fork of the owner leaves the folder alone. At the owner's exit filelock may have released the lock already.
    if lock.process != os.getpid():
        return
    # The lock's file goes last: a folder that a kill leaves in between can still be swept.
    with contextlib.suppress(OSError):
        for inside in folder.iterdir():
            if inside.is_dir() and not inside.is_symlink():
                shutil.rmtree(inside, ignore_errors=True)
            elif inside.name != IN_USE:
                inside.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    lock.release()
