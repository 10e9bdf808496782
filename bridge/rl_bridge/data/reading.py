"""Rows from the user's files: JSON, JSONL, CSV, Parquet, Arrow, or a Hugging Face dataset; checked row by row."""

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")


def read_rows(source: str, *, fields: Sequence[str] = ("prompt",)) -> list[dict[str, Any]]:
    """All rows of ``source``, each with the ``fields``; a file by its suffix, else a Hugging Face dataset.

    ``source`` is a path, a folder written by ``Dataset.save_to_disk``, or ``NAME[:SPLIT]`` of a dataset that
    ``datasets.load_dataset`` finds (split ``train`` unless named). ``prompt`` must be text or a list of chat messages.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a row that cannot be read, lacks a field, or has an unusable prompt: with file and row number.
    """
    path = Path(source)
    if path.suffix.lower() in SUFFIXES:
        if not path.is_file():
            raise FileNotFoundError(f"no such file: {source}")
        numbered: Iterable[tuple[int, Any]] = _READERS[path.suffix.lower()](path)
    else:
        numbered = enumerate(_hugging_face(source, path), 1)
    rows = [_checked(row, f"{source}, row {number}", fields) for number, row in numbered]
    if not rows:
        raise ValueError(f"{source} has no rows")
    return rows


def _checked(row: Any, where: str, fields: Sequence[str]) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object with fields {', '.join(fields)}, got {type(row).__name__}")
    for field in fields:
        if row.get(field) in (None, "", []):
            raise ValueError(f"{where}: field {field!r} is missing or empty; the row has {sorted(map(str, row))}")
    prompt = row.get("prompt", "")
    messages = isinstance(prompt, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt)
    if not (isinstance(prompt, str) or messages):
        raise ValueError(f"{where}: prompt must be text or messages with role and content, got {prompt!r}")
    return {**row, "_where": where}


def _json(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        rows = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(rows, list):
        raise ValueError(f"{path}: expected a list of rows, got {type(rows).__name__} (one row a line is .jsonl)")
    yield from enumerate(rows, 1)


def _jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    # Bytes, so that a line that is not UTF-8 is an error of this line, and a byte order mark is none.
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{path}, row {number}: not valid JSON: {error}") from error


def _csv(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as lines:
        decoded = (line.decode("utf-8" if place else "utf-8-sig") for place, line in enumerate(lines))
        reader = csv.DictReader(decoded, strict=True)
        for number in count(1):
            try:
                row = next(reader, None)
            except (csv.Error, UnicodeDecodeError) as error:
                raise ValueError(f"{path}, row {number}: not valid CSV: {error}") from error
            if row is None:
                return
            if None in row or None in row.values():
                expected = len(reader.fieldnames or ())
                raise ValueError(f"{path}, row {number}: expected {expected} columns as in the header line")
            yield number, row


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow.parquet

    yield from enumerate(_arrow_rows(path, pyarrow.parquet.read_table), 1)


def _arrow(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow

    def read(name: Path) -> Any:
        try:
            return pyarrow.ipc.open_file(name).read_all()
        except pyarrow.ArrowInvalid:  # the other of Arrow's two formats
            return pyarrow.ipc.open_stream(name).read_all()

    yield from enumerate(_arrow_rows(path, read), 1)


def _arrow_rows(path: Path, read: Any) -> list[Any]:
    import pyarrow

    try:
        return read(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: cannot be read as {path.suffix[1:]}: {error}") from error


def _hugging_face(source: str, path: Path) -> Iterable[Any]:
    import datasets

    if path.is_dir() and (path / "state.json").is_file():
        return datasets.load_from_disk(str(path))
    name, _, split = source.partition(":")
    try:
        return datasets.load_dataset(name, split=split or "train")
    except Exception as error:
        known = ", ".join(SUFFIXES)
        raise ValueError(f"{source!r} is neither a file ({known}) nor a dataset that loads: {error}") from error


_READERS = {".json": _json, ".jsonl": _jsonl, ".csv": _csv, ".parquet": _parquet, ".arrow": _arrow}
