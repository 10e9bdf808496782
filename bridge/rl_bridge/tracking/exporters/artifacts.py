"""The model that a run made: its files, their checksums, the version of the weights."""

import hashlib
import json
from pathlib import Path

from rl_bridge.tracking.exporters.base import Artifact
from rl_bridge.tracking.records import METRICS

MODEL = "model"


def artifact_of(folder: Path, *, copied: bool) -> Artifact | None:
    """The model of the run in ``folder``; None before the run has ended or where it makes none."""
    made = folder / MODEL
    if not (folder / "summary.json").exists() or not made.is_dir():
        return None
    files = [
        {"path": path.relative_to(made).as_posix(), "bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(made.rglob("*"))
        if path.is_file()
    ]
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    return Artifact(made, _version(folder / METRICS), digest, files, copied)


def sha256_of(file: Path) -> str:
    """Of a file's bytes."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _version(file: Path) -> int | None:
    """Of the weights in the last record that has one."""
    for line in reversed(file.read_bytes().splitlines()):
        if (version := json.loads(line).get("weights_version")) is not None:
            return int(version)
    return None
