"""Readers of rows of the user's own: a function that yields rows, of a file or in hand, or the rows themselves.

    read_rows("problems.py:rows")
    read_rows(rows)

Whatever a reader gives is checked row by row as the rows of a file are, and an error names the reader and the row. A
dataset of ``datasets`` in hand, or returned by a reader, is read as its files are: None that a struct has under keys of
other rows is taken out. A reader that yields such rows one by one takes it out itself.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_bridge.common.terminal import tell
from rl_bridge.common.user_files import callable_in, the_users_code
from rl_bridge.common.user_marks import content_of, mark_of
from rl_bridge.data.messages import without_keys_of_others

Reader = Callable[..., Iterable[Mapping[str, Any]]]
"""A function without arguments, or of the split's name, that yields or returns rows as dicts."""
RowSource = str | Reader | Iterable[Mapping[str, Any]]
"""The rows of a run: a name that ``read_rows`` knows, a reader, or rows in hand."""
MOST = 1_000_000
"""Rows of a source without a length, such as a generator: one that never ends would fill the memory."""
_FILE = re.compile(r"(.+\.py):([A-Za-z_]\w*)(?:@(.+))?")


def is_file_of_reader(source: str) -> bool:
    """Whether the source is ``FILE.py:name``, with ``@SPLIT`` behind it or not.

    >>> is_file_of_reader("problems.py:rows@test"), is_file_of_reader("org/problems:test")
    (True, False)
    """
    return _FILE.fullmatch(source) is not None


def name_of(source: RowSource) -> str:
    """The source as errors name it.

    >>> name_of("rows.jsonl"), name_of([{"prompt": "1+1="}])
    ('rows.jsonl', 'the rows')
    """
    if isinstance(source, str):
        return source
    if not callable(source):
        return "the rows"
    function = source.func if isinstance(source, functools.partial) else source
    return getattr(function, "__qualname__", type(function).__qualname__)


def rows_of(source: RowSource) -> Iterator[tuple[str, Any]]:
    """The rows of a reader or in hand, each with its place as an error names it. A row may be no dict.

    Raises:
        FileNotFoundError: no such file.
        TypeError: the source is no reader, or gives no rows.
        ValueError: the file fails to load or has no such function; the function takes other arguments than a split, or
            raises: with the number of the row; or it gives more than ``MOST`` rows and has no length.
    """
    name, split = name_of(source), None
    if isinstance(source, str):
        match = _FILE.fullmatch(source)
        assert match is not None
        path, function, split = str(Path(match[1]).resolve()), match[2], match[3]
        source = callable_in(path, function, "data", "function {!r} that reads rows")
    rows, number, milestone = source, 0, 100_000
    try:
        with the_users_code():
            if callable(source):
                rows = _called(source, name, split)
            of_table = _is_table(rows)
            for number, row in enumerate(_iterable(rows, name), 1):
                if number == milestone:
                    tell(f"{name}: {number:,} rows so far; they are all read before the run begins")
                    milestone *= 10
                if number > MOST and not hasattr(rows, "__len__"):
                    raise _WrongUse(
                        f"{name} has given {MOST:,} rows and goes on: all are read before the run begins. What never "
                        f"ends is cut, as by itertools.islice(rows, 10_000); for more than {MOST:,} return a list"
                    )
                # A reader may give one dict again and again, changed.
                row = dict(row) if isinstance(row, Mapping) else row
                yield f"{name}, row {number}", without_keys_of_others(row) if of_table else row
    except _WrongUse:
        raise
    except (Exception, SystemExit) as error:
        raise ValueError(f"{name}: row {number + 1} cannot be read: {type(error).__name__}: {error}") from error


def _is_table(rows: Any) -> bool:
    """Whether these are rows of the package ``datasets``, whose structs have the keys of all rows."""
    return any(kind.__module__.partition(".")[0] == "datasets" for kind in type(rows).__mro__)


class _WrongUse(TypeError):
    """A source that is no reader: not an error of the reader's own."""


def _called(reader: Reader, name: str, split: str | None) -> Any:
    """The reader's value."""
    try:
        parameters = list(inspect.signature(reader).parameters.values())
    except (TypeError, ValueError):  # A function in C may have no signature.
        parameters = []
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(required) > 1 or (required and not places):
        raise _WrongUse(f"{name} needs {', '.join(required)}: a reader takes no argument, or the name of a split")
    if split is not None and not places:
        raise _WrongUse(f"{name} takes no argument, so that there is no split {split!r}")
    arguments = [split or "train"] if required or split is not None else []
    return reader(*arguments)


def _iterable(rows: Any, name: str) -> Iterable[Any]:
    """The rows, or the error that what was given is none."""
    if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
        raise _WrongUse(f"{name} gives {type(rows).__name__}: a reader yields or returns rows, each a dict")
    return rows


def reader_fingerprint(source: RowSource | None, what: str = "data reader") -> dict[str, str]:
    """By ``what``: the function's name and a hash of its file, with the user's modules that the file imports.

    Empty for sources without a reader. The rows have a fingerprint of their own.
    """
    if isinstance(source, str):
        match = _FILE.fullmatch(source)
        is_file = match is not None and Path(match[1]).is_file()  # else reading says what is wrong
        return {what: f"{match[2]}:{content_of(Path(match[1]))[:16]}"} if match is not None and is_file else {}
    if source is None or not callable(source):
        return {}
    return {what: mark_of(source)}
