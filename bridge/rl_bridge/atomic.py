"""Nothing half-written: a file or folder is made under a temporary name and renamed when it is whole."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path`` to write to; on success it takes its place, on an error it is removed.

    Works for a file and for a folder (make it with ``mkdir``). What is new is on the disk before it gets the name. An
    old folder makes room under the name ``.NAME.old`` and is removed last; ``sweep`` brings it back after a kill in
    between. One process at a time writes to a path: what a dead one left under a temporary name is removed by the next.

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
    """Remove what a dead process left half-written in a folder, and bring back what it had not yet replaced."""
    for left in folder.glob(".*.old"):
        _bring_back(left.with_name(left.name[1 : -len(".old")]))
    for left in folder.glob(".*.tmp"):
        _remove(left)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8")


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def _old(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _bring_back(path: Path) -> None:
    """Finish what a kill between the two renames interrupted."""
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
