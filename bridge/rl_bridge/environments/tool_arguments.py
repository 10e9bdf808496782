"""Arguments of a tool's call, compared with the JSON schema by which the policy knows the tool."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin, is_typeddict

import numpy as np

KINDS: Mapping[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}
"""JSON's types and Python's, of which a bool is no number here."""


def fitting(value: Any, schema: Mapping[str, Any], place: str) -> Any:
    """The value as a schema describes it: 3.0 is the integer 3, as JSON has it. Without a type it may be any.

    >>> fitting([1, 2.0], {"type": "array", "items": {"type": "integer"}}, "a")
    [1, 2]
    >>> fitting([1, "2"], {"type": "array", "items": {"type": "integer"}}, "a")
    Traceback (most recent call last):
        ...
    ValueError: a[1]: expected integer, not "2"

    Raises:
        ValueError: it is none, with its place, with what is expected and with what it is.
    """
    if (value is None and schema.get("nullable")) or not schema.keys() & {"type", "anyOf", "enum"}:
        return value
    if isinstance(value, np.generic | tuple):  # of a parser that reads Python
        value = value.item() if isinstance(value, np.generic) else list(value)
    chosen = "enum" not in schema or all(_among(x, schema["enum"]) for x in _listed(value))
    for part in schema.get("anyOf", ()) if chosen else ():
        with contextlib.suppress(ValueError):
            return fitting(value, part, place)
    names = _names(schema)
    if isinstance(value, float) and value.is_integer() and "integer" in names and "number" not in names:
        value = int(value)
    kinds = tuple(kind for name in names for kind in KINDS[name])
    parts = schema.get("prefixItems")
    if (
        not isinstance(value, kinds)
        or (isinstance(value, bool) and bool not in kinds)
        or not chosen
        or (parts and isinstance(value, list) and len(value) != len(parts))
    ):
        raise ValueError(f"{place}: expected {_expected(schema)}, not {_json(value)}")
    if isinstance(value, dict) and (part := schema.get("additionalProperties")):
        return {key: fitting(x, part, f"{place}.{key}") for key, x in value.items()}
    if isinstance(value, list) and (part := schema.get("items")):
        return [fitting(x, part, f"{place}[{i}]") for i, x in enumerate(value)]
    if isinstance(value, list) and parts:
        return tuple(fitting(x, part, f"{place}[{i}]") for i, (x, part) in enumerate(zip(value, parts, strict=True)))
    return value


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _among(value: Any, choices: Sequence[Any]) -> bool:
    return any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in choices)


def _names(schema: Mapping[str, Any]) -> list[str]:
    return _listed(schema.get("type", [] if "anyOf" in schema else list(KINDS)))


def _expected(schema: Mapping[str, Any]) -> str:
    """A schema in words."""
    inside = [_expected(part) for part in [*schema.get("prefixItems", ()), schema.get("items")] if part]
    words = [f"{name} of {', '.join(inside)}" if inside and name == "array" else name for name in _names(schema)]
    words += [_expected(part) for part in schema.get("anyOf", ())]
    if "enum" in schema:
        words = [json.dumps(choice, ensure_ascii=False) for choice in schema["enum"]]
    return " or ".join([*words, *["null"] * bool(schema.get("nullable"))])


def _json(value: Any) -> str:
    words = json.dumps(value, ensure_ascii=False, default=repr)
    return words if len(words) <= 80 else f"{words[:80]}…"


def without_json(hint: Any) -> Iterator[Any]:
    """The types in an annotation of which no JSON value is: the schema would call an enum, a date or a set an object.

    >>> list(without_json(dict[str, list[int]] | set | Literal["a"]))
    [<class 'set'>]
    """
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind is Literal:
        return
    names = parts[0] if kind is dict and parts else str
    if names not in (str, Any) and not (get_origin(names) is Literal and set(map(type, get_args(names))) == {str}):
        yield hint
    elif parts:
        for part in parts:
            yield from without_json(part)
    elif not (kind in (Any, None, tuple, *sum(KINDS.values(), ())) or is_typeddict(kind) or _fits_dict(kind)):
        yield hint


def _fits_dict(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Mapping) and issubclass(dict, kind)
