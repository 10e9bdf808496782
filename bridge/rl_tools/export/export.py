"""One export of one run to one place: what is new is sent; after a cut, everything again."""

import hashlib
import itertools
import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from rl_bridge.common.append_log import read_log
from rl_bridge.common.files import InUse, Lock, write_json
from rl_bridge.common.scrubbing import scrubbed
from rl_bridge.run.provenance import read_provenance
from rl_bridge.run.records import METRICS
from rl_tools.export.exporter import (
    CHUNK,
    STREAMS,
    About,
    Artifact,
    Cut,
    Exporter,
    GoesOn,
    Place,
    Row,
    Tail,
    exporter_of,
)

# The model that a run made: its files, their checksums, the version of the weights.

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
    for record in reversed(read_log(file)):
        if (version := record.get("weights_version")) is not None:
            return int(version)
    return None


# How much of a run an exporter has sent, beside the run; one exporter at a time.

FOLDER = "exports"


class Cursor:
    """Use as a context manager: the lock is held inside.

    ``state`` is None before the first export. A cursor that cannot be read counts as none: everything is sent again.
    """

    def __init__(self, run: Path, name: str, destination: str, *, wait: float = 0.0) -> None:
        """``destination``: each has a cursor of its own. ``wait``: seconds for another exporter to end."""
        digest = hashlib.sha256(destination.encode()).hexdigest()[:8]
        self.file = run / FOLDER / f"{name}-{digest}.json"
        self._lock, self._wait, self._name = self.file.with_suffix(".lock"), wait, name
        self._held: Lock | None = None
        self.state: dict[str, Any] | None = None

    def __enter__(self) -> Self:
        """Raises ValueError if another process exports this run to this place."""
        self._lock.parent.mkdir(exist_ok=True)
        try:
            self._held = Lock(self._lock, wait=self._wait)
        except InUse as holder:
            raise ValueError(
                f"{self._lock.parent.parent} is being exported to {self._name} by {holder}, which did not end in "
                f"{self._wait:.0f} s"
            ) from None
        try:
            self.state = json.loads(self.file.read_text("utf-8"))
        except (FileNotFoundError, ValueError):
            self.state = None
        return self

    def __exit__(self, *error: object) -> None:
        assert self._held is not None
        self._held.release()

    def write(self, state: dict[str, Any]) -> None:
        """Remember, whole or not at all."""
        self.state = state
        write_json(self.file, state)


def key_of(run: Path) -> str:
    """What a run is called in every store, made once: a folder that was moved keeps it."""
    file = run / FOLDER / "key"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        # Part of file names and of ids, where libraries take few characters.
        name = re.sub(r"[^\w.-]+", "-", scrubbed(run.resolve().name))
        made = f"{name}-{hashlib.sha256(f'{run.resolve()} {time.time_ns()}'.encode()).hexdigest()[:8]}"
        temporary = file.with_name(f".key.{os.getpid()}")
        temporary.write_text(made, "utf-8")
        try:
            os.link(temporary, file)
        except FileExistsError:
            pass  # another exporter was faster, and its key is everyone's
        finally:
            temporary.unlink()
    return file.read_text("utf-8")


# One export of one run to one place: what is new is sent; after a cut, everything again.

PATIENCE = 10.0
"""Seconds that an export waits for another one of the same run, such as that of a run which has just ended."""
Target = Literal["tensorboard", "wandb", "mlflow", "trackio"]


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What is exported and where to. An export sends what is new; the same export again changes nothing."""

    to: Target
    output: Path = Path("exported")
    """A folder for the local stores: event files, offline runs, databases."""
    project: str = "rl-fn"
    """The project, where the other program has projects; the experiment in MLflow."""
    artifacts: Literal["manifest", "files"] = "manifest"
    """Of the run's model: names, sizes and checksums of its files, or the files too."""
    again: bool = False
    """Take back what was exported and send everything again."""


class Session:
    """Use as a context manager; ``catch_up`` sends what is new and may be called at any time."""

    def __init__(self, folder: Path, options: ExportOptions, *, wait: float = 0.0) -> None:
        """``wait``: seconds for another process that exports the same run to the same place.

        Raises:
            ValueError: there is no run, or what an export would write to is a link.
        """
        if not (folder / METRICS).is_file():
            raise ValueError(f"{folder} has no {METRICS}: it is not a run's folder")
        for link in filter(Path.is_symlink, [folder / FOLDER, *(folder / FOLDER).glob("*")]):
            raise ValueError(f"{link} is a link, and an export writes to the run's own files: remove it")
        self._folder, self._options = folder, options
        output = options.output.resolve()
        self._place = Place(output, options.project)
        self._cursor = Cursor(folder, options.to, f"{output}\n{options.project}", wait=wait)
        self._sent = 0
        self._resting = False
        """The store has everything, and is not opened before there is more: it would have to be written anew."""

    def __enter__(self) -> Self:
        self._cursor.__enter__()
        try:
            self._begin(self._cursor.state, again=self._options.again)
        except BaseException as error:
            if hasattr(self, "_exporter"):
                self.__exit__(type(error), error, None)
            else:
                self._cursor.__exit__()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._exporter.close(error is None and (self._folder / "summary.json").exists())
            if error is None:
                self._remember(closed=True)
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"and the store could not be closed: {failure}")
        finally:
            self._cursor.__exit__()

    @property
    def sent(self) -> int:
        """Records that this session sent."""
        return self._sent

    @property
    def records(self) -> int:
        """Records of the run that are in the store."""
        return self._tails["metrics"].rows

    def catch_up(self) -> int:
        """Send what is new; returns how many records that were."""
        before = self._sent
        try:
            self._send()
        except Cut:
            self._exporter.close(False)
            self._begin(None, again=True)
            self._send()
        return self._sent - before

    def send_artifact(self) -> None:
        """Send the model that the run has made, unless the store has this one already."""
        found = artifact_of(self._folder, copied=self._options.artifacts == "files")
        if found is not None and self._memory.get("artifact") != [found.sha256, found.copied]:
            if self._resting:
                self._open(anew=True)
                self._send()
            self._exporter.artifact(found)
            self._memory["artifact"] = [found.sha256, found.copied]
            self._remember()

    def _begin(self, state: Mapping[str, Any] | None, *, again: bool) -> None:
        about = about_of(self._folder)
        digest = hashlib.sha256(json.dumps([about.config, about.provenance], sort_keys=True).encode()).hexdigest()
        remembered = state or self._cursor.state
        self._memory: dict[str, Any] = dict(remembered["memory"]) if remembered else {}
        self._exporter: Exporter = exporter_of(self._options.to)(about, self._place, self._memory)
        tails = {name: Tail(name, **(state["tails"][name] if state and not again else {})) for name in STREAMS}
        unchanged = (
            state is not None
            and not again
            and state["about"] == digest
            and all(tail.begins(self._folder) for tail in tails.values())
            and (state["closed"] or self._exporter.goes_on is GoesOn.ALWAYS)
            and self._exporter.has(tails["metrics"].rows)
        )
        self._tails, self._about = tails, digest
        self._resting = unchanged and self._exporter.goes_on is GoesOn.NEVER
        if not self._resting:
            self._open(anew=not unchanged)

    def _open(self, *, anew: bool) -> None:
        """Be ready for rows. ``anew``: from the first one on."""
        self._resting = False
        if anew:
            self._tails = {name: Tail(name) for name in STREAMS}
            self._exporter.clear()
            self._memory.pop("artifact", None)
        self._exporter.open()
        self._remember()

    def _send(self) -> None:
        for name, tail in self._tails.items():
            for rows in _chunks(tail.read(self._folder)):
                if self._resting:
                    self._open(anew=True)
                    return self._send()
                self._exporter.send(rows)
                self._sent += len(rows) if name == "metrics" else 0
                self._remember()

    def _remember(self, *, closed: bool = False) -> None:
        tails = {name: tail.state() for name, tail in self._tails.items()}
        self._cursor.write({"about": self._about, "closed": closed, "tails": tails, "memory": self._memory})


def about_of(folder: Path) -> About:
    """What is exported of a run besides its rows, without secrets."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    return About(
        key=key_of(folder),
        name=scrubbed(folder.resolve().name),
        config=scrubbed(config),
        provenance=scrubbed(read_provenance(folder)),
    )


def export(folder: Path, options: ExportOptions) -> tuple[int, int]:
    """Send what is new of the run in ``folder``; returns (records in the store, records that were new to it).

    Raises:
        ValueError: there is no run, a record is damaged, or another process exports it to the same place.
        ModuleNotFoundError: the library is not installed.
    """
    with Session(folder, options, wait=PATIENCE) as session:
        session.catch_up()
        session.send_artifact()
    return session.records, session.sent


def _chunks(rows: Iterable[Row]) -> Iterable[list[Row]]:
    rows = iter(rows)
    while chunk := list(itertools.islice(rows, CHUNK)):
        yield chunk
