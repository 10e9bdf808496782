"""The interface of exporters: one run in the store of one library, made of the rows of files that are appended to."""

import enum
import importlib
import zlib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rl_bridge.common.append_log import parsed
from rl_bridge.common.json_kinds import require_kind
from rl_bridge.common.scrubbing import environment_secrets, scrubbed_text
from rl_bridge.run.options import TRACKERS
from rl_bridge.run.records import ABOUT, METRICS, STEP, kind_of
from rl_tools.export.system import SYSTEM

STREAMS = {"metrics": METRICS, "system": SYSTEM}
"""Name of a stream → its file in the run's folder."""
_STEP = {**STEP, "time": STEP["time?"]}
"""Every row has a time in the store; the rest is as a report reads it."""
CHUNK = 500
"""Rows that are sent together."""


@dataclass(frozen=True)
class Row:
    """One line as numbers. Not a number and infinity are numbers here."""

    number: int
    """Place of the row in its stream, from 0."""
    time: float
    """Seconds since 1970, when it was recorded."""
    metrics: Mapping[str, float]
    """``stage/name`` → value, or ``system/name`` → value."""
    clocks: Mapping[str, float]
    """step, weights_version, tokens (trained on so far), seconds (of training): axes of a curve."""
    identity: str
    """Made of the line's bytes and its place: the same line has the same identity."""


class Cut(Exception):
    """A file no longer begins with the bytes that were read from it."""


@dataclass
class Tail:
    """How far a file was read: whole lines alone, and never one twice.

    ``size`` and ``crc32`` are those of the bytes that were read; ``rows`` and ``tokens`` count them.
    """

    stream: str
    size: int = 0
    crc32: int = 0
    rows: int = 0
    tokens: int = 0
    _last: bytes = field(default=b"", repr=False)
    _lines: int = field(default=0, repr=False)

    def state(self) -> dict[str, int]:
        """The part that a cursor stores."""
        return {"size": self.size, "crc32": self.crc32, "rows": self.rows, "tokens": self.tokens}

    def begins(self, folder: Path) -> bool:
        """Whether the file still begins with the bytes that were read, by their checksum."""
        file = folder / STREAMS[self.stream]
        if not self.size:
            return True
        if not file.exists() or file.stat().st_size < self.size:
            return False
        with file.open("rb") as stream:
            content = stream.read(self.size)
        self._last, self._lines = content[content.rfind(b"\n", 0, -1) + 1 :], content.count(b"\n")
        return zlib.crc32(content) == self.crc32

    def read(self, folder: Path) -> Iterator[Row]:
        """The rows of whole lines that were appended since the last call. A caller may stop early and go on later.

        Raises:
            Cut: the file was cut, and perhaps written to again.
            ValueError: a line cannot be read.
        """
        file = folder / STREAMS[self.stream]
        if not file.exists() and not self.size:
            return
        with file.open("rb") as stream:
            stream.seek(self.size - len(self._last))
            # A line has its time and its attempt: after a cut the line here is another one.
            if stream.read(len(self._last)) != self._last:
                raise Cut(f"{file} no longer begins with the {self.size} bytes that were exported")
            while (line := stream.readline()).endswith(b"\n"):
                row = self._row(line, f"{file}, line {self._lines + 1}")
                self._lines += 1
                self.size, self.crc32, self._last = self.size + len(line), zlib.crc32(line, self.crc32), line
                if row is not None:
                    self.rows += 1
                    yield row

    def _row(self, line: bytes, where: str) -> Row | None:
        record = parsed(line[:-1], where)
        if self.stream == "system":
            require_kind(record, {"time": "a finite number"}, where)
        else:
            kind = kind_of(record)
            require_kind(record, _STEP if kind is STEP else kind, where)
        identity = f"{self.stream}-{self.rows}-{zlib.crc32(line):08x}"
        if self.stream == "system":
            values = {f"system/{name}": value for name, value in _numbers(record, {"time"})}
            return Row(self.rows, record["time"], values, {"sample": self.rows}, identity)
        if "stage" not in record:
            return None
        self.tokens += int(record.get("trained_tokens", 0))
        clocks: dict[str, float] = {"step": self.rows, "tokens": self.tokens}
        clocks |= {name: record[name] for name in ("weights_version", "optimizer_step", "seconds") if name in record}
        metrics = {f"{record['stage']}/{name}": value for name, value in _numbers(record, ABOUT)}
        return Row(self.rows, record["time"], metrics, clocks, identity)


def _numbers(record: Mapping[str, Any], without: Set[str]) -> Iterator[tuple[str, float]]:
    hidden = environment_secrets()
    for name, value in record.items():
        if name not in without and isinstance(value, int | float):
            yield scrubbed_text(name, hidden), float(value)


class GoesOn(enum.Enum):
    """When a new process may add to another one's rows. Otherwise all of the run is taken back and sent again."""

    ALWAYS = "always"
    """Sending a row twice changes nothing."""
    AFTER_CLOSE = "after close"
    """The other process must have closed the store: nobody knows which rows a killed one had sent."""
    NEVER = "never"
    """The store is one file that one process writes: the file is left alone until there are new rows."""


@dataclass(frozen=True)
class About:
    """Name, config and provenance of a run; scrubbed."""

    key: str
    """The same for one run's folder and another for every other, whatever their names."""
    name: str
    config: Mapping[str, Any]
    provenance: Sequence[Mapping[str, Any]]
    """An entry an attempt: command, git, data, versions, environment."""

    def options(self) -> dict[str, Any]:
        """The config with dotted names, and a list as its text.

        >>> About("k", "n", {"policy": {"steps": 3}, "tags": ["a"]}, []).options()
        {'policy.steps': 3, 'tags': "['a']"}
        """
        return dict(_flat(self.config, ""))


@dataclass(frozen=True)
class Place:
    """Where a library's store is."""

    output: Path
    """A folder for local stores, whole."""
    project: str


@dataclass(frozen=True)
class Artifact:
    """A model that the run made. ``sha256`` is of its files' names and checksums."""

    folder: Path
    version: int | None
    """Version of the weights: how many updates made them."""
    sha256: str
    files: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    """path, bytes, sha256 of each."""
    copied: bool = False
    """Whether the store gets the files too, and not their names and checksums alone."""

    def manifest(self) -> dict[str, Any]:
        """Version, checksum and files as JSON."""
        return {"version": self.version, "sha256": self.sha256, "files": [dict(file) for file in self.files]}


class Exporter(Protocol):
    """One run in a store. Made with (about, place, memory): the run's next exporter gets the dict ``memory`` back.

    Calls come in this order: ``clear`` where it is needed, ``open``, any number of ``send`` and ``artifact``, and
    ``close``, after an error too.
    """

    goes_on: GoesOn

    def has(self, rows: int) -> bool:
        """Whether the store still has the run, with at least this many rows of its metrics where it can tell."""
        ...

    def clear(self) -> None:
        """Take back everything of this run; no effect where the store has nothing."""
        ...

    def open(self) -> None:
        """Open the store for rows, with config and provenance in it."""
        ...

    def send(self, rows: Sequence[Row]) -> None:
        """Send rows of one stream; on return they are the library's own responsibility, or in the store."""
        ...

    def artifact(self, artifact: Artifact) -> None:
        """Send the run's model."""
        ...

    def close(self, ended: bool) -> None:
        """Put everything into the store, and close it. ``ended``: the run came to its end."""
        ...


def exporter_of(name: str) -> type[Any]:
    """The class of an exporter, with nothing of its library loaded."""
    assert name in TRACKERS, name
    return importlib.import_module(f"rl_tools.export.{name}").RunExporter


def library(name: str) -> Any:
    """Import a library, or part of one, when it is needed.

    Raises:
        ModuleNotFoundError: it is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error.name or name} is not installed: pip install '.[trackers]'") from error


def _flat(value: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    options: list[tuple[str, Any]] = []
    for name, part in value.items():
        if isinstance(part, Mapping):
            options += _flat(part, f"{prefix}{name}.")
        else:
            options.append((prefix + name, part if isinstance(part, str | int | float | None) else str(part)))
    return options
