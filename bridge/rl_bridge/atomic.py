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

    Works for a file and for a folder (make it with ``mkdir``); an old folder of that name is removed first. One process
    at a time writes to a path: what a dead one left under the temporary name is removed by the next.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    _remove(temporary)
    try:
        yield temporary
        if path.is_dir():
            shutil.rmtree(path)
        os.replace(temporary, path)
    finally:
        _remove(temporary)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
