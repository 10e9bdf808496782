"""metrics.jsonl as a file: read, checked, and cut down to its whole lines."""

import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl_bridge.common.append_log import parsed_or_none, read_log, whole_lines
from rl_bridge.common.files import replacing
from rl_bridge.common.json_kinds import Kind

METRICS = "metrics.jsonl"
STEP: dict[str, Kind] = {
    "stage": "text",
    "step": "a whole number",
    "seconds": "a finite number",
    "trained_tokens?": "a finite number",
    "weights_version?": "a whole number",
    "optimizer_step?": "a whole number",
    "attempt?": "a whole number",
    "time?": "a finite number",
    "run?": "text",
    "*": "a number or a boolean or null",
}
"""The entries of a step's record. Metrics may be NaN."""

NOTE: dict[str, Kind] = {"step?": "a whole number"}
"""The entries of a line that is no step's, so far as anything is read from them."""


def kind_of(record: Mapping[str, Any]) -> dict[str, Kind]:
    """The entries that a line is to have: steps alone have seconds, so that one which has lost its stage is no note."""
    return STEP if {"stage", "seconds"} & record.keys() else NOTE


ABOUT = {"stage", "step", "run", "attempt", "time", "seconds", "weights_version", "optimizer_step"}
"""The entries of a step's record that are no metrics: the stage, the run and its attempt, and clocks."""


def read_records(file: Path) -> list[dict[str, Any]]:
    """The records of a run's steps, in order; other lines are left out, and so is a torn last one.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is damaged; the message has its number.
    """
    if not file.is_file():
        raise FileNotFoundError(f"there is no {file}")
    return [record for record in read_log(file) if "stage" in record]


def last_attempt(file: Path) -> int:
    """The number of the session that wrote the last whole line; 0 if there is none."""
    records = map(parsed_or_none, reversed(whole_lines(file)))
    attempts = (record["attempt"] for record in records if record and "attempt" in record)
    return int(next(attempts, 0))


def repaired(
    file: Path, position: Mapping[str, Any], *, repair: bool, report: Callable[[str], None]
) -> tuple[int, int]:
    """(Bytes, CRC-32) of the records up to a checkpoint's ``position``.

    Where the file has been damaged since, ``repair`` keeps it as ``metrics.jsonl.damaged`` and goes on with the lines
    that can be read.

    Raises:
        ValueError: the records are damaged, and are not to be repaired.
    """
    size, crc32 = position["metrics_bytes"], position["crc32"]
    content = file.read_bytes() if file.exists() else b""
    if len(content) >= size and zlib.crc32(content[:size]) == crc32:
        return size, crc32
    lines = content[:size].splitlines()
    bad = [number for number, line in enumerate(lines, 1) if parsed_or_none(line) is None]
    if len(content) < size:
        reason = f"{file} has {len(content)} bytes, the checkpoint was made after {size}"
    else:
        reason = f"{file} is damaged{f' in line {bad[0]}' if bad else ': it has another checksum than was written'}"
    if not repair:
        raise ValueError(f"{reason}; --resume-anyway goes on without what is damaged")
    aside = file.with_name(f"{METRICS}.damaged")
    if file.exists():
        file.replace(aside)
    whole = b"".join(line + b"\n" for line in lines if parsed_or_none(line) is not None)
    with replacing(file) as temporary:
        temporary.write_bytes(whole)
    report(f"{reason}; going on with {whole.count(10)} of {position['logged']} records, the file is now {aside.name}")
    return len(whole), zlib.crc32(whole)
