"""Folders ``step-N``: written under a temporary name, listed with checksums, renamed when whole. Loads no torch."""

import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rl_bridge.common.files import sync_file, sync_folder

FORMAT = 1
MANIFEST = "manifest.json"


class OtherFormat(ValueError):
    """A checkpoint that another version wrote: it may be whole, so it is neither passed over nor set aside."""


_NAME = re.compile(r"step-(\d{8,})")
_CHUNK = 1 << 24


def path_of(folder: Path, step: int) -> Path:
    """``folder/step-N``, in an order that sorts."""
    return folder / f"step-{step:08d}"


def temporary_path(path: Path) -> Path:
    """Where a checkpoint lies while it is being written. One process at a time writes to a run, so no id is in it."""
    return path.with_name(f"{path.name}.tmp")


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run by their names, oldest first."""
    paths = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(paths, key=step_of)


def step_of(path: Path) -> int:
    """The N of ``step-N``."""
    return int(path.name.removeprefix("step-"))


def begin(path: Path, parts: Sequence[str]) -> Path:
    """An empty temporary folder for ``path`` with a folder for each of ``parts``."""
    temporary = temporary_path(path)
    if temporary.exists():
        shutil.rmtree(temporary)
    for part in ("", *parts):
        (temporary / part).mkdir(parents=True)
    return temporary


def commit(
    path: Path,
    files: Mapping[str, Mapping[str, Any]],
    about: Mapping[str, Any],
    *,
    keep: int,
    pinned: Sequence[int] = (),
) -> None:
    """Write the manifest of ``path``'s temporary folder, give the folder its name, drop all but the newest ``keep``.

    The steps ``pinned`` stay however old they are.

    ``files``: name → {"bytes", "crc32"}. Everything is on the disk before the name is, so that the loss of power leaves
    a whole checkpoint or none.
    """
    temporary = temporary_path(path)
    content = {"format": FORMAT, **about, "files": dict(files)}
    write_json(temporary / MANIFEST, {**content, "crc32": _crc32_of(content)})
    for part in [temporary, *(p for p in temporary.rglob("*") if p.is_dir())]:
        sync_folder(part)
    if path.exists():
        _discard(path)
    os.rename(temporary, path)
    sync_folder(path.parent)
    older = [other for other in checkpoints(path.parent) if step_of(other) < step_of(path)]
    for other in older[: max(0, len(older) + 1 - keep)]:
        if step_of(other) not in pinned:
            _discard(other)
    sweep(path.parent)


def sweep(folder: Path) -> None:
    """Remove what dead processes left half-written or half-removed."""
    for remnant in folder.glob("step-*.tmp"):
        shutil.rmtree(remnant)


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that it does not count as newer than what a run writes from an older one on."""
    aside = path.with_name(f"{path.name}.damaged")
    if aside.exists():
        shutil.rmtree(aside)
    return path.rename(aside)


def damage(path: Path) -> str | None:
    """The fault of a checkpoint, with the name of the file; None if it is whole. Reads every byte.

    Raises:
        OtherFormat: another version wrote it.
    """
    try:
        manifest = read_manifest(path)
    except OtherFormat:
        raise
    except ValueError as error:
        return str(error)
    with ThreadPoolExecutor(8) as pool:  # reading and CRC-32 leave the interpreter to others
        reasons = pool.map(_damage_of_file, [path / name for name in manifest["files"]], manifest["files"].values())
        return next((reason for reason in reasons if reason is not None), None)


def _damage_of_file(file: Path, record: Mapping[str, Any]) -> str | None:
    if not file.is_file():
        return f"{file} is missing"
    if (size := file.stat().st_size) != record["bytes"]:
        return f"{file} has {size} bytes, {record['bytes']} were written"
    if crc32_of_file(file) != record["crc32"]:
        return f"{file} has another checksum than was written"
    return None


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        OtherFormat: another version wrote it.
        ValueError: the manifest is missing or damaged.
    """
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_text("utf-8"))
        crc32 = manifest.pop("crc32")
    except FileNotFoundError:
        raise ValueError(f"{file} is missing") from None
    except (ValueError, KeyError, AttributeError, TypeError, OSError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    # Another format may have its checksum of something else; a flipped bit of the number alone is damage.
    number, flipped = manifest.get("format"), crc32 == _crc32_of(manifest | {"format": FORMAT})
    if isinstance(number, int) and number != FORMAT and not flipped:
        raise OtherFormat(
            f"{file} is of format {number}, this version reads format {FORMAT}: go on with the version of rl-fn that "
            "wrote it; nothing was changed"
        )
    if crc32 != _crc32_of(manifest):
        raise ValueError(f"{file} has another checksum than was written")
    return manifest


def write_json(file: Path, value: Any) -> dict[str, Any]:
    """Write ``value`` to the disk; returns the file's record for the manifest."""
    with file.open("w", encoding="utf-8") as stream:
        json.dump(value, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    return record_of(file)


def record_of(file: Path) -> dict[str, Any]:
    """Size and checksum of a file as they are read back from it."""
    return {"bytes": file.stat().st_size, "crc32": crc32_of_file(file)}


def records(folder: Path) -> dict[str, dict[str, Any]]:
    """Records of all files below a folder that somebody else wrote, once they are on the disk."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    for file in files:
        sync_file(file)
    return {str(file.relative_to(folder)): record_of(file) for file in files}


def crc32_of_file(file: Path) -> str:
    """CRC-32 of a file's bytes, in hexadecimal."""
    value = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return f"{value:08x}"


def _discard(path: Path) -> None:
    """Remove a checkpoint under another name: a kill in the middle must not leave half of one under its own."""
    doomed = path.with_name(f"{path.name}.old.tmp")
    if doomed.exists():
        shutil.rmtree(doomed)
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def _crc32_of(content: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
