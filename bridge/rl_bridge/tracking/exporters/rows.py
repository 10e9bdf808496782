"""Lines of a file that is appended to, as rows for an exporter: whole lines alone, and never one twice."""

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_bridge.tracking.records import METRICS
from rl_bridge.tracking.scrubbing import environment_secrets, scrubbed_text
from rl_bridge.tracking.system import SYSTEM

STREAMS = {"metrics": METRICS, "system": SYSTEM}
"""Name of a stream → its file in the run's folder."""
_ABOUT = ("stage", "step", "run", "attempt", "time", "weights_version", "optimizer_step", "seconds")
"""What of a record is no metric: what it is about, and clocks."""
CHUNK = 500
"""Rows that are sent together."""


@dataclass(frozen=True)
class Row:
    """One line as numbers. Not a number and infinity are numbers here."""

    number: int
    """Of the row in its stream, from 0."""
    time: float
    """Seconds since 1970, when it was recorded."""
    metrics: Mapping[str, float]
    """``stage/name`` → value, or ``system/name`` → value."""
    clocks: Mapping[str, float]
    """step, weights_version, tokens (trained on so far), seconds (of training): what a curve can be drawn against."""
    identity: str
    """Of the line's bytes and its place: the same line has the same one."""


class Cut(Exception):
    """A file no longer begins with what was read from it."""


@dataclass
class Tail:
    """How far a file was read. ``size`` and ``crc32`` say what was there; ``rows`` and ``tokens`` count it."""

    stream: str
    size: int = 0
    crc32: int = 0
    rows: int = 0
    tokens: int = 0
    _last: bytes = field(default=b"", repr=False)

    def state(self) -> dict[str, int]:
        """What a cursor remembers."""
        return {"size": self.size, "crc32": self.crc32, "rows": self.rows, "tokens": self.tokens}

    def begins(self, folder: Path) -> bool:
        """Whether the file still begins with what was read, by its checksum."""
        file = folder / STREAMS[self.stream]
        if not self.size:
            return True
        if not file.exists() or file.stat().st_size < self.size:
            return False
        with file.open("rb") as stream:
            content = stream.read(self.size)
        self._last = content[content.rfind(b"\n", 0, -1) + 1 :]
        return zlib.crc32(content) == self.crc32

    def read(self, folder: Path) -> Iterator[Row]:
        """The rows of whole lines that were appended since; a caller that stops early goes on where it stopped.

        Raises:
            Cut: the file was cut, and perhaps written to again.
            ValueError: a line cannot be read.
        """
        file = folder / STREAMS[self.stream]
        if not file.exists() and not self.size:
            return
        with file.open("rb") as stream:
            stream.seek(self.size - len(self._last))
            # A line has its time and its attempt: after a cut another one stands here.
            if stream.read(len(self._last)) != self._last:
                raise Cut(f"{file} no longer begins with the {self.size} bytes that were exported")
            while (line := stream.readline()).endswith(b"\n"):
                row = self._row(line, file)
                self.size, self.crc32, self._last = self.size + len(line), zlib.crc32(line, self.crc32), line
                if row is not None:
                    self.rows += 1
                    yield row

    def _row(self, line: bytes, file: Path) -> Row | None:
        try:
            record: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{file}, byte {self.size}: {error}: {line[:60]!r}") from error
        identity = f"{self.stream}-{self.rows}-{zlib.crc32(line):08x}"
        if self.stream == "system":
            values = {f"system/{name}": value for name, value in _numbers(record, ("time",))}
            return Row(self.rows, record["time"], values, {"sample": self.rows}, identity)
        if "stage" not in record:
            return None
        self.tokens += int(record.get("trained_tokens", 0))
        clocks: dict[str, float] = {"step": self.rows, "tokens": self.tokens}
        clocks |= {name: record[name] for name in ("weights_version", "optimizer_step", "seconds") if name in record}
        metrics = {f"{record['stage']}/{name}": value for name, value in _numbers(record, _ABOUT)}
        return Row(self.rows, record["time"], metrics, clocks, identity)


def _numbers(record: Mapping[str, Any], without: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    hidden = environment_secrets()
    for name, value in record.items():
        if name not in without and isinstance(value, int | float):
            yield scrubbed_text(name, hidden), float(value)
