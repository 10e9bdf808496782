"""One export of one run to one place: new records are sent; after a cut, all records again."""

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

from safetensors import SafetensorError, safe_open

from rl_bridge.common.append_log import parsed, read_log
from rl_bridge.common.files import InUse, Lock, write_json
from rl_bridge.common.json_kinds import require_kind
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

MODEL, SUMMARY = "model", "summary.json"


def ended(folder: Path) -> bool:
    """Whether the run in ``folder`` came to its end: its summary is there, and can be read.

    Raises:
        ValueError: the summary is damaged.
    """
    file = folder / SUMMARY
    if not file.exists():
        return False
    parsed(file.read_bytes(), str(file))
    return True


def artifact_of(folder: Path, *, copied: bool) -> Artifact | None:
    """The model of the run in ``folder``, with checksums and version; None before the run's end or without a model.

    Raises:
        ValueError: a file of weights is cut off or missing.
    """
    model = folder / MODEL
    if not model.is_dir() or not ended(folder):
        return None
    require_whole_weights(model)
    files = [
        {"path": path.relative_to(model).as_posix(), "bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(model.rglob("*"))
        if path.is_file()
    ]
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    return Artifact(model, _version(folder / METRICS), digest, files, copied)


WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".npz", ".h5", ".onnx"}
"""Ends of the names of files that hold weights."""


def require_whole_weights(model: Path) -> None:
    """Raise ValueError where a file of weights is cut off, or one is not there that an index or its shards name."""
    weights = sorted(model.glob("*.safetensors"))
    indices = sorted(model.glob("*.safetensors.index.json"))
    if (model / "config.json").exists() and not any(file.suffix in WEIGHTS for file in model.iterdir()):
        raise ValueError(f"{model} has a config.json and no weights: it is not whole")
    for file in weights:
        if not indices and (shard := re.fullmatch(r".*-\d{5}-of-\d{5}\.safetensors", file.name)):
            raise ValueError(
                f"{model} has a part of the weights, {shard[0]}, and no index of the parts: it is not whole"
            )
    for index in indices:
        places = parsed(index.read_bytes(), str(index))
        require_kind(places, {"weight_map": {"*": "text"}}, str(index))
        for name in sorted(set(places["weight_map"].values()) - {file.name for file in weights}):
            raise ValueError(f"{index} names {name}, which is not there: {model} is not whole")
    for file in weights:
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} cannot be read as safetensors: {error}") from error


def sha256_of(file: Path) -> str:
    """Checksum of a file's bytes."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _version(file: Path) -> int | None:
    """Version of the weights in the last record that has one."""
    for record in reversed(read_log(file)):
        if (version := record.get("weights_version")) is not None:
            return int(version)
    return None


FOLDER = "exports"
_TAIL = {**dict.fromkeys(("size", "crc32", "rows", "tokens"), "a whole number"), "*": "no other entry"}
_STATE = {"about": "text", "closed": "a boolean", "tails": dict.fromkeys(STREAMS, _TAIL), "memory": {}}


class Cursor:
    """How much of a run an exporter has sent; a file in the run's folder, and a context manager that holds its lock.

    ``state`` is None before the first export. A cursor that cannot be read counts as none: everything is sent again.
    """

    def __init__(self, run: Path, name: str, destination: str, *, wait: float = 0.0) -> None:
        """``destination``: each has its own cursor. ``wait``: seconds for another exporter to end."""
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
            state = parsed(self.file.read_bytes(), str(self.file))
            require_kind(state, _STATE, str(self.file))
            self.state = state
        except (FileNotFoundError, ValueError):
            self.state = None
        return self

    def __exit__(self, *error: object) -> None:
        assert self._held is not None
        self._held.release()

    def write(self, state: dict[str, Any]) -> None:
        """Write the state, whole or not at all."""
        self.state = state
        write_json(self.file, state)


def key_of(run: Path) -> str:
    """The key of a run in every store, made once: a folder that was moved keeps its key."""
    file = run / FOLDER / "key"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        # The key is part of file names and ids, where libraries take few characters.
        name = re.sub(r"[^\w.-]+", "-", scrubbed(run.resolve().name))
        key = f"{name}-{hashlib.sha256(f'{run.resolve()} {time.time_ns()}'.encode()).hexdigest()[:8]}"
        temporary = file.with_name(f".key.{os.getpid()}")
        temporary.write_text(key, "utf-8")
        try:
            os.link(temporary, file)
        except FileExistsError:
            pass  # another exporter was faster, and its key is everyone's
        finally:
            temporary.unlink()
    return file.read_text("utf-8")


PATIENCE = 10.0
"""Seconds that an export waits for another one of the same run, such as the live export of a run that just ended."""
Target = Literal["tensorboard", "wandb", "mlflow", "trackio"]


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Source and destination of an export. An export sends new records; the same export again changes nothing."""

    to: Target
    output: Path = Path("exported")
    """A folder for the local stores: event files, offline runs, databases."""
    project: str = "rl-fn"
    """The project, where the other program has projects; the experiment in MLflow."""
    artifacts: Literal["manifest", "files"] = "manifest"
    """Parts of the run's model: names, sizes and checksums of its files, or the files too."""
    again: bool = False
    """Take back all that was exported and send everything again."""


def folder_to_write(output: Path, option: str) -> Path:
    """The whole path of the folder that ``option`` names. Raises ValueError where it is a file, or lies below one."""
    whole = output.resolve()
    for file in filter(Path.is_file, [whole, *whole.parents]):
        raise ValueError(f"{option} {output}: {file} is a file, and a folder is needed to write to")
    return whole


class Session:
    """An export as a context manager; ``catch_up`` sends new records and may be called at any time."""

    def __init__(self, folder: Path, options: ExportOptions, *, wait: float = 0.0) -> None:
        """``wait``: seconds for another process that exports the same run to the same place.

        Raises:
            ValueError: there is no run, the output is no folder, or a file that an export would write to is a link.
        """
        if not (folder / METRICS).is_file():
            raise ValueError(f"{folder} has no {METRICS}: it is not a run's folder")
        for link in filter(Path.is_symlink, [folder / FOLDER, *(folder / FOLDER).glob("*")]):
            raise ValueError(f"{link} is a link, and an export writes to the run's own files: remove it")
        self._folder, self._options = folder, options
        output = folder_to_write(options.output, "--output")
        self._place = Place(output, options.project)
        self._cursor = Cursor(folder, options.to, f"{output}\n{options.project}", wait=wait)
        self._sent = 0
        self._resting = False
        """The store has everything. It is opened when there is more: it has to be written anew then."""

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
            is_whole = False
            try:
                is_whole = error is None and ended(self._folder)
            finally:
                self._exporter.close(is_whole)
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
        """Send new records; returns how many there were."""
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
        artifact = artifact_of(self._folder, copied=self._options.artifacts == "files")
        if artifact is not None and self._memory.get("artifact") != [artifact.sha256, artifact.copied]:
            if self._resting:
                self._open(anew=True)
                self._send()
            self._exporter.artifact(artifact)
            self._memory["artifact"] = [artifact.sha256, artifact.copied]
            self._remember()

    def _begin(self, state: Mapping[str, Any] | None, *, again: bool) -> None:
        ended(self._folder)  # a damaged summary is named before anything is sent
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
        """Open the store for rows. ``anew``: from the first row on."""
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
    """Name, config and provenance of a run, without secrets."""
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder} has no {file.name}: it is not a run's folder")
    config = parsed(file.read_bytes(), str(file))
    return About(
        key=key_of(folder),
        name=scrubbed(folder.resolve().name),
        config=scrubbed(config),
        provenance=scrubbed(read_provenance(folder)),
    )


def export(folder: Path, options: ExportOptions) -> tuple[int, int]:
    """Send new records of the run in ``folder``; returns (records in the store, records that were new to it).

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
