"""Storages that change their size without an operation, which no dispatch mode sees: ``UntypedStorage.resize_``."""

import threading
from typing import Any, Protocol

import torch


class Watcher(Protocol):
    """Is told of storages that were resized in its thread."""

    def resized(self, storage: torch.UntypedStorage, before: int) -> None:
        """Of the storage with its new size, and the bytes that it had before."""
        ...


_lock = threading.Lock()
_watchers: dict[int, list[Watcher]] = {}
"""By thread, as dispatch modes are: each may stand there more than once."""


def watch_resizes(watcher: Watcher) -> None:
    """Begin to tell the watcher. torch's method is exchanged while anyone watches, and at no other time."""
    with _lock:
        if not _watchers:
            torch.UntypedStorage.resize_ = _resize  # pyright: ignore[reportAttributeAccessIssue]
        _watchers.setdefault(threading.get_ident(), []).append(watcher)


def unwatch_resizes(watcher: Watcher) -> None:
    """End what the last ``watch_resizes`` of this watcher in this thread began."""
    with _lock:
        here = _watchers[threading.get_ident()]
        here.reverse()
        here.remove(watcher)
        here.reverse()
        if not here:
            del _watchers[threading.get_ident()]
        if not _watchers:
            del torch.UntypedStorage.resize_


def _resize(storage: torch.UntypedStorage, size: int) -> Any:
    before = storage.nbytes()
    resized = torch._C.StorageBase.resize_(storage, size)  # pyright: ignore[reportAttributeAccessIssue]
    for watcher in {id(one): one for one in _watchers.get(threading.get_ident(), ())}.values():
        watcher.resized(storage, before)
    return resized
