"""What an offline run's file holds: W&B's writer says nothing when the disk is full."""

import struct
from collections.abc import Iterator
from pathlib import Path

BLOCK, HEADER = 32768, 7
WHOLE, LAST = 1, 4


def records(file: Path) -> Iterator[bytes]:
    """Whole records of a ``.wandb`` file, LevelDB's log format; a torn one at its end is left out."""
    data, place, parts = file.read_bytes(), HEADER, b""
    while place + HEADER <= len(data):
        left = BLOCK - place % BLOCK
        if left < HEADER:
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + HEADER])
        parts += data[place + HEADER : place + HEADER + size]
        place += HEADER + size
        if kind in (WHOLE, LAST) and place <= len(data):
            yield parts
            parts = b""
