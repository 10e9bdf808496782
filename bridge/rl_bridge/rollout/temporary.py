"""Folders that end with their process: by ``close``, at its exit, or after a SIGKILL when another process makes one."""

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import weakref
from pathlib import Path

KINDS = ("vllm", "served", "weights")
"""Checkpoints and logs of engines, checkpoints of servers, copies of weights."""
IN_USE = "in_use"
"""The file in a folder whose lock says that its owner lives: a process that ends, by whatever, loses the lock."""

_HELD: set[int] = set()
"""Locks of this process. One that a forked process has not closed would outlive its owner."""


def _forked() -> None:
    for lock in _HELD:
        os.close(lock)
    _HELD.clear()


os.register_at_fork(after_in_child=_forked)


class TemporaryFolder:
    """``rl_fn-KIND-…``, locked from the moment that it has this name. ``close`` removes it; again, it does nothing."""

    def __init__(self, kind: str, parent: Path | None = None, *, private: bool = True) -> None:
        """Make one beside those of other processes, and remove what killed ones left there.

        Args:
            kind: of ``KINDS``.
            parent: None is where temporary files are.
            private: no other user can read it.
        """
        assert kind in KINDS, kind
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        sweep(parent)
        name = f"rl_fn-{kind}-{os.getpid()}-{secrets.token_hex(4)}"
        # Nobody sweeps a folder before it has its name, and then it is locked.
        made = parent / f".{name}"
        made.mkdir(mode=0o700 if private else 0o777)
        lock = _locked(made, create=True)
        assert lock is not None, "nobody else knows this folder"
        self.path = made.rename(parent / name)
        self.close = weakref.finalize(self, _remove, self.path, lock)


def sweep(parent: Path) -> None:
    """Remove the folders of processes of this user that were killed."""
    for folder in (found for kind in KINDS for found in parent.glob(f"rl_fn-{kind}-*")):
        with contextlib.suppress(OSError):  # its owner removes it just now
            if folder.lstat().st_uid == os.geteuid() and (lock := _locked(folder)) is not None:
                _remove(folder, lock)


def _locked(folder: Path, *, create: bool = False) -> int | None:
    """The lock of a folder; None: another process has it."""
    file = os.open(folder / IN_USE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    _HELD.add(file)
    return file


def _remove(folder: Path, lock: int) -> None:
    if lock not in _HELD:
        return  # in a process that was forked from the owner
    # The lock's file goes last: what a kill leaves in between can still be swept.
    with contextlib.suppress(OSError):
        for inside in folder.iterdir():
            if inside.is_dir() and not inside.is_symlink():
                shutil.rmtree(inside, ignore_errors=True)
            elif inside.name != IN_USE:
                inside.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    _HELD.discard(lock)
    os.close(lock)
