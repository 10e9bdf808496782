"""A log of JSON lines that is only added to: one way to write the file, and one to read its whole lines."""

import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from filelock import lock_descriptor, unlock_descriptor

_CHUNK = 1 << 16


class AppendLog:
    """Adds lines to a file. Each line is there as a whole, or torn where its writer was killed or its disk was full.

    The next append cuts a torn line off first. Several processes may add to one file: each append has the file's lock.
    """

    def __init__(self, file: Path) -> None:
        """Open a log, or begin one.

        Raises:
            OSError: the file is a link, which is not followed, or cannot be written to.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        self._descriptor: int | None = os.open(file, flags, 0o644)
        self._one_thread = threading.Lock()  # the file's lock is this process's, not a thread's

    def append(self, record: Mapping[str, Any], *, most: int | None = None) -> bytes:
        """Add a line, and return the bytes that were written.

        ``most``: bytes of the whole file. A line that would go beyond is left out: b"".
        """
        line = (json.dumps(record) + "\n").encode()
        with self._locked() as descriptor:
            size = os.fstat(descriptor).st_size
            whole = _size_of_whole_lines(descriptor, size)
            if whole != size:
                os.ftruncate(descriptor, whole)
            if most is not None and whole + len(line) > most:
                return b""
            written = 0
            while written < len(line):
                written += os.write(descriptor, line[written:])
            return line

    def cut(self, size: int) -> None:
        """Keep the first ``size`` bytes alone, such as those of a checkpoint from which a run goes on."""
        with self._locked() as descriptor:
            os.ftruncate(descriptor, size)

    def sync(self) -> int:
        """Wait until the lines are on the disk; returns the size of the file in bytes."""
        os.fsync(self._open_descriptor)
        return os.fstat(self._open_descriptor).st_size

    def close(self) -> None:
        """Close the file. Calling this again does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> Self:
        """The log, which is closed at the end."""
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """The file, whose lock this thread of this process has: nobody else is in the middle of a line."""
        with self._one_thread:
            lock_descriptor(self._open_descriptor, poll_interval=0.001)
            try:
                yield self._open_descriptor
            finally:
                unlock_descriptor(self._open_descriptor)

    @property
    def _open_descriptor(self) -> int:
        if self._descriptor is None:
            raise ValueError("the log is closed")
        return self._descriptor


def read_log(file: Path) -> list[dict[str, Any]]:
    """The records of a log, in order; [] where there is no file. A torn last line is left out.

    Raises:
        ValueError: a whole line is damaged; the message names the file and the line's number.
    """
    return [parsed(line, f"{file}, line {number}") for number, line in enumerate(whole_lines(file), 1)]


def whole_lines(file: Path) -> list[bytes]:
    """The lines of a log, without their ends; [] where there is no file.

    A last line that has no end is left out: its writer is still at work, or was killed.
    """
    return file.read_bytes().split(b"\n")[:-1] if file.exists() else []


def parsed(text: bytes, where: str) -> dict[str, Any]:
    """The object that a line, or a whole file, holds.

    Raises:
        ValueError: it holds none; the message begins with ``where``.
    """
    try:
        value = json.loads(text)
    except ValueError as error:  # of JSON or of UTF-8
        place = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) and b"\n" in text else ""
        raise ValueError(f"{where}{place} is damaged: {text[:60]!r}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where} is damaged: {text[:60]!r} is no object")
    return value


def parsed_or_none(line: bytes) -> dict[str, Any] | None:
    """The object that a line holds; None for a damaged one."""
    try:
        return parsed(line, "")
    except ValueError:
        return None


def _size_of_whole_lines(descriptor: int, size: int) -> int:
    """Bytes up to the end of the last whole line."""
    end = size
    while end > 0:
        start = max(0, end - (1 if end == size else _CHUNK))  # the last byte almost always ends a line
        place = os.pread(descriptor, end - start, start).rfind(b"\n")
        if place >= 0:
            return start + place + 1
        end = start
    return 0
