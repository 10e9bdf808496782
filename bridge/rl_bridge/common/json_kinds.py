"""Kinds of JSON values: what a file that a person may have edited must hold before anything is computed from it."""

import json
import math
from collections.abc import Mapping
from typing import Any

Kind = str | list[Any] | tuple[Any, ...] | Mapping[str, Any]
"""Words of ``_FITS``, with " or " between several; ``[kind]``, a list; ``(kind, kind)``, a list of so many entries;
``{name: kind}``, an object, in which ``name?`` may be absent and ``*`` is any other entry."""
_EXACT = 2**53
"""Whole numbers up to here are the same as floats, in a page's JavaScript too."""
_LONGEST = 60


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) <= _EXACT)


_FITS = {
    "a number": _is_number,
    "a finite number": lambda value: _is_number(value) and math.isfinite(value),
    "a whole number": lambda value: _is_number(value) and isinstance(value, int),
    "text": lambda value: isinstance(value, str),
    "a boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "anything": lambda value: True,
    "no other entry": lambda value: False,
}


def require_kind(value: Any, kind: Kind, where: str, name: str = "") -> None:
    """Refuse a value of another kind.

    Raises:
        ValueError: the message has ``where``, the name of the entry, its value and what was expected.

    >>> require_kind({"step": 3, "tokens": {"id": [7, "x"]}}, {"tokens": {"id": ["a whole number"]}}, "a.jsonl, line 2")
    Traceback (most recent call last):
    ValueError: a.jsonl, line 2: tokens.id[1] is "x": expected a whole number
    """
    words, parts = _parts(value, kind, name)
    if parts is None:
        raise ValueError(f"{where}: {name or 'it'} is {_text(value)}: expected {words}")
    for entry, part, of_part in parts:
        require_kind(part, of_part, where, entry)
    if isinstance(kind, Mapping):
        for entry in kind:
            if entry != "*" and not entry.endswith("?") and entry not in value:
                place = f"{name}.{entry}" if name else entry
                raise ValueError(f"{where} has no {place}: expected {_words(kind[entry])}")


def _parts(value: Any, kind: Kind, name: str) -> tuple[str, list[tuple[str, Any, Kind]] | None]:
    """(The kind in words, (name, value, kind) of each entry that has a kind); None for a value of another kind."""
    words = _words(kind)
    if isinstance(kind, str):
        return words, [] if any(_FITS[word](value) for word in kind.split(" or ")) else None
    if isinstance(kind, Mapping):
        if not isinstance(value, dict):
            return words, None
        of_entries = {key: kind.get(key, kind.get(f"{key}?", kind.get("*"))) for key in value}
        before = f"{name}." if name else ""
        return words, [(f"{before}{key}", value[key], of) for key, of in of_entries.items() if of is not None]
    if not isinstance(value, list) or (isinstance(kind, tuple) and len(value) != len(kind)):
        return words, None
    kinds = kind if isinstance(kind, tuple) else kind * len(value)
    return words, [(f"{name}[{place}]", part, of) for place, (part, of) in enumerate(zip(value, kinds, strict=True))]


def _words(kind: Kind) -> str:
    if isinstance(kind, str):
        return kind
    if isinstance(kind, Mapping):
        return "an object"
    return f"a list of {len(kind)} entries" if isinstance(kind, tuple) else "a list"


def _text(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
