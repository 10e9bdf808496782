"""A run's folder read for a report, while the run may still be writing to it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_bridge.tracking.records import METRICS
from rl_bridge.trainers.policy_inputs.completion_log import COMPLETIONS

CONFIG, SUMMARY, SAMPLES, MEMORY = "config.json", "summary.json", "samples.json", "memory.jsonl"
FILES = (CONFIG, METRICS, SUMMARY, SAMPLES, COMPLETIONS, MEMORY)
"""All that a report reads of a run."""


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """What a run's folder holds. Files that are not there yet are empty."""

    folder: Path
    config: dict[str, Any]
    records: list[dict[str, Any]]
    """Of steps, in order."""
    notes: list[dict[str, Any]]
    """Lines of the record that are no step's."""
    summary: dict[str, Any]
    """Of a run that has ended."""
    samples: dict[str, Any]
    completions: list[dict[str, Any]]
    memory: list[dict[str, Any]]

    @property
    def name(self) -> str:
        """That of the folder."""
        return self.folder.resolve().name

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return bool(self.summary)

    @property
    def seed(self) -> Any:
        """Of the run's config; None where it has none."""
        return self.config.get("seed")


def read_run(folder: Path) -> RunFiles:
    """Everything that a report needs of a run.

    Raises:
        ValueError: the folder is no run's, or a file is damaged; the message names file and line.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder")
    missing = [name for name in (CONFIG, METRICS) if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} has no {' and no '.join(missing)}: it is not a run's folder")
    lines = read_lines(folder / METRICS)
    for number, line in enumerate(lines, 1):
        for name, kind in {"step": int, "seconds": int | float}.items():
            if "stage" in line and not isinstance(line.get(name), kind):
                raise ValueError(f"{folder / METRICS}, line {number} has no {name}, as a step's record has")
    completions = read_lines(folder / COMPLETIONS)
    for number, line in enumerate(completions, 1):
        if not isinstance(line.get("samples"), list) or not isinstance(line.get("step"), int):
            raise ValueError(f"{folder / COMPLETIONS}, line {number} has no step or no samples")
    memory = read_lines(folder / MEMORY)
    for number, line in enumerate(memory, 1):
        if not isinstance(line.get("step"), int):
            raise ValueError(f"{folder / MEMORY}, line {number} has no step")
    return RunFiles(
        folder=folder,
        config=read_object(folder / CONFIG),
        records=[line for line in lines if "stage" in line],
        notes=[line for line in lines if "stage" not in line],
        summary=read_object(folder / SUMMARY),
        samples=read_object(folder / SAMPLES),
        completions=completions,
        memory=memory,
    )


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; [] where there is no file.

    A last line without its end is left out: it is being written.

    Raises:
        ValueError: a whole line cannot be read.
    """
    if not file.is_file():
        return []
    *whole, _ = file.read_bytes().split(b"\n")
    return [_parsed(line, f"{file}, line {number}") for number, line in enumerate(whole, 1)]


def read_object(file: Path) -> dict[str, Any]:
    """The object that a JSON file holds; {} where there is no file.

    Raises:
        ValueError: it cannot be read.
    """
    return _parsed(file.read_bytes(), str(file)) if file.is_file() else {}


def _parsed(text: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:  # of JSON or of UTF-8
        place = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) and b"\n" in text else ""
        raise ValueError(f"{where}{place} is damaged: {text[:60]!r}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where} is damaged: {text[:60]!r} is no object")
    return value
