"""The rows in a file, each with its number: JSON, JSONL, CSV, Parquet, Arrow."""

import csv
import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from rl_bridge.data.messages import rows_of_table


class Unreadable(NamedTuple):
    """The reason why a row cannot be read, in the row's place."""

    reason: str


class _TwiceError(ValueError):
    """A key that an object of JSON has twice: Python keeps the last value in silence."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _TwiceError(f"the key {twice!r} is there twice, so that one of its values would be lost")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_object)
"""Made once: ``json.loads`` makes one for each row."""


def _loaded(content: bytes) -> Any:
    return _DECODER.decode(content.decode(json.detect_encoding(content), "surrogatepass"))


def _twice_in(value: Any) -> Unreadable | None:
    """The first object with a key twice, of those that ``_marked`` has made."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return value if isinstance(value, Unreadable) else next(filter(None, map(_twice_in, inside)), None)


def _marked(pairs: list[tuple[str, Any]]) -> Any:
    try:
        return _object(pairs)
    except _TwiceError as error:
        return Unreadable(str(error))


def _json(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        rows = _loaded(path.read_bytes())
    except _TwiceError:  # which of the rows, is asked in this case alone
        rows = json.loads(path.read_bytes(), object_pairs_hook=_marked)
        rows = [_twice_in(row) or row for row in rows] if isinstance(rows, list) else rows
    except RecursionError:
        raise ValueError(f"{path}: not a list of rows: it is nested too deep to be read") from None
    except ValueError as error:
        several = " (one row a line is .jsonl)" if str(error).startswith("Extra data: line 2 ") else ""
        raise ValueError(f"{path}: not valid JSON: {_in_utf_8(error)}{several}") from error
    if not isinstance(rows, list):
        raise ValueError(f"{path}: expected a list of rows, got {type(rows).__name__} (one row a line is .jsonl)")
    yield from enumerate(rows, 1)


def _in_utf_8(error: ValueError) -> str:
    """The error in words; of a text that begins as another encoding does, which ``json`` takes it for, the encoding."""
    if isinstance(error, UnicodeDecodeError) and error.encoding != "utf-8":
        return f"it is {error.encoding.upper()} and not UTF-8: save it as UTF-8"
    return str(error)


def _jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    # Bytes, so that a line that is not UTF-8 is an error of this line, and a byte order mark is none.
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield number, _loaded(line)
                except _TwiceError as error:
                    yield number, Unreadable(str(error))
                except RecursionError:
                    yield number, Unreadable("nested too deep to be read")
                except ValueError as error:
                    yield number, Unreadable(f"not valid JSON: {_in_utf_8(error)}")


def _csv(path: Path) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(2**31 - 1)  # a cell may hold a conversation
    with path.open("rb") as lines:
        decoded = (line.decode("utf-8" if place else "utf-8-sig") for place, line in enumerate(lines))
        reader = csv.DictReader(decoded, strict=True)
        try:
            names = reader.fieldnames or ()
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path}, row 1: not valid CSV: {error}") from error
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{path}: the header names the column {twice[0]!r} twice, so one of them would be lost")
        for number in count(1):
            try:
                row = next(reader, None)
            except (csv.Error, UnicodeDecodeError) as error:
                raise ValueError(f"{path}, row {number}: not valid CSV: {error}") from error
            if row is None:
                return
            if None in row or None in row.values():
                expected = len(reader.fieldnames or ())
                yield number, Unreadable(f"expected {expected} columns as in the header line")
            else:
                yield number, dict(row)


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


def _arrow_rows(path: Path, reader: Any) -> list[Any]:
    import pyarrow

    try:
        return rows_of_table(reader(path))
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: cannot be read as {path.suffix[1:]}: {error}") from error


_READERS = {".json": _json, ".jsonl": _jsonl, ".csv": _csv, ".parquet": _parquet, ".arrow": _arrow}


def rows_in(path: Path) -> Iterator[tuple[int, Any]]:
    """The rows of a file, each with its number from 1; the suffix says how it is read.

    Raises:
        ValueError: with the file, and the row where there is one.
    """
    with path.open("rb") as content:
        begin = content.read(512).removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if begin.startswith((b"<!doctype html", b"<html")):
        raise ValueError(
            f"{path} is a page of HTML and not {path.suffix[1:]}: a link to a file's page, or one that asks to log in, "
            "was saved; save the file itself (of the hub: its link has /resolve/ in place of /blob/)"
        )
    yield from _READERS[path.suffix.lower()](path)
