"""Short hashes of what a run depends on besides its options: rows of data, models, the source of a reward."""

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rl_bridge.user_files import content_of

PLACE = "_where"
"""The key of a row that says where the row came from; every other one can be read by a reward."""
_CHUNK = 1 << 22
_known: dict[tuple[str, int, int, int], str] = {}
"""(path, inode, size, time of the last change) → hash: policy, reference and critic may be of one folder."""


def of_rows(*groups: Iterable[Mapping[str, Any]]) -> str:
    """Of rows of data in their order. Where a row came from does not count.

    >>> of_rows([{"prompt": "1+1=", "_where": "a.jsonl, row 1"}]) == of_rows([{"prompt": "1+1="}])
    True
    """
    digest = hashlib.sha256()
    for rows in groups:
        for row in rows:
            counted = {key: value for key, value in row.items() if key != PLACE}
            digest.update(json.dumps(counted, sort_keys=True, default=repr).encode() + b"\n")
        digest.update(b"\0")
    return digest.hexdigest()[:16]


def of_folder(folder: Path, tell: Callable[[str], None] | None = None) -> str:
    """Of the files of a model's folder by their names: configuration, tokenizer, templates, every byte of the weights.

    A file of the hub's cache is named by its content, and is not read. ``tell`` gets a line before many bytes are.
    """
    files = [file for file in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")) if _counts(file)]
    unread = sum(file.stat().st_size for file in files if not _is_blob(file))
    if tell is not None and unread > 1 << 30:
        tell(f"reading {unread / 1e9:.1f} GB of {folder} once: a resumed run is to have the same weights")
    with ThreadPoolExecutor(8) as pool:  # hashing leaves the interpreter to others
        hashes = pool.map(_of_file, files)
        lines = sorted(f"{file.relative_to(folder)} {found}" for file, found in zip(files, hashes, strict=True))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _counts(file: Path) -> bool:
    return file.is_file() and not file.name.startswith(".") and file.suffix != ".md"


def _is_blob(file: Path) -> bool:
    return file.is_symlink() and file.resolve().parent.name == "blobs"


def _of_file(file: Path) -> str:
    if _is_blob(file):
        return file.resolve().name
    about = file.stat()
    key = (str(file.resolve()), about.st_ino, about.st_size, about.st_mtime_ns)
    if key not in _known:
        digest = hashlib.sha256()
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
        _known[key] = digest.hexdigest()
    return _known[key]


def of_function(function: Callable[..., Any]) -> str:
    """Of a function's name and its file, with the modules that this imports. One of this library: of its name alone."""
    # An object that is called has the source of its class.
    named: Any = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    name = f"{named.__module__}.{named.__qualname__}"
    if named.__module__.split(".")[0] in ("rl_bridge", "rl_fn", "builtins"):
        return name
    file = inspect.getsourcefile(named)
    content = content_of(Path(file)) if file is not None and Path(file).is_file() else ""
    return f"{named.__qualname__}:{content[:16]}"
