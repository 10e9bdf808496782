"""A study's journal: one event a line, each on the disk before anything follows from it."""

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_bridge.atomic import sync_folder

JOURNAL = "journal.jsonl"
Event = dict[str, Any]


class Journal:
    """Appends events. A last line that a kill left torn is cut off; it was of nothing that had happened yet."""

    def __init__(self, file: Path) -> None:
        """Open a journal, or begin one.

        Raises:
            ValueError: a line before the last is damaged.
        """
        self.events, size = read_journal(file)
        new = not file.exists()
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.ftruncate(self._descriptor, size)
        os.fsync(self._descriptor)
        if new:
            sync_folder(file.parent)

    def append(self, event: Mapping[str, Any]) -> None:
        """Write an event, and wait until it is on the disk."""
        line = _line(event)
        written = 0
        while written < len(line):
            written += os.write(self._descriptor, line[written:])
        os.fsync(self._descriptor)
        self.events.append(dict(event))

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def read_journal(file: Path) -> tuple[list[Event], int]:
    """(The whole events of a journal, how many bytes they are); none where there is no file.

    Raises:
        ValueError: a line before the last is damaged.
    """
    content = file.read_bytes() if file.exists() else b""
    events: list[Event] = []
    size = 0
    lines = content.splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        event = _parsed(line)
        if event is None and number < len(lines):
            raise ValueError(f"{file}, line {number} is damaged: {line[:60]!r}")
        if event is not None:
            events.append(event)
            size += len(line)
    return events, size


def _line(event: Mapping[str, Any]) -> bytes:
    text = json.dumps(event, ensure_ascii=False)
    return f'{{"crc32": {zlib.crc32(text.encode())}, "event": {text}}}\n'.encode()


def _parsed(line: bytes) -> Event | None:
    """The event of a whole line with the right checksum."""
    try:
        event = json.loads(line)["event"]
    except (ValueError, KeyError, TypeError):
        return None
    return event if line == _line(event) else None
