"""Values of a loop's record: numbers of any library as Python's, and what JSON can hold."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rl_bridge.common.scalars import plain_scalar


class Measured(Protocol):
    """An object with metrics, as ``Groups``."""

    def metrics(self) -> Mapping[str, float]: ...


def numbers_of(part: Mapping[str, Any] | Measured) -> Mapping[str, Any]:
    """The numbers of what ``run.log`` was given, by name.

    Raises:
        TypeError: an object without metrics.
    """
    if isinstance(part, Mapping):
        return part
    if isinstance(part, type) or not callable(getattr(part, "metrics", None)):
        raise TypeError(
            "run.log takes metrics of an update, groups, or a dictionary of numbers by name, got "
            f"{type(part).__name__} {repr(part)[:80]}"
        )
    return part.metrics()


def number_of(name: str, value: Any) -> float:
    """A scalar of any library as Python's number.

    Raises:
        TypeError: it is none.
    """
    plain = plain_scalar(value)
    if not isinstance(plain, bool | int | float):
        raise TypeError(
            f"run.log takes numbers: {name!r} is a {type(value).__name__}{_shape(value)}; a mean or another number of "
            "it has a curve"
        )
    return plain


def _shape(value: Any) -> str:
    return f" of shape {list(value.shape)}" if hasattr(value, "shape") else ""


def json_of(name: str, value: Any) -> Any:
    """A value in JSON's types: scalars and arrays of any library are numbers and lists, a path is text.

    Raises:
        TypeError: JSON has no such value.
    """

    def plain(part: Any) -> Any:
        if callable(to_list := getattr(part, "tolist", None)):
            return to_list()
        if isinstance(part, Path):
            return str(part)
        raise TypeError(f"a {type(part).__name__} is none of JSON's types")

    try:
        return json.loads(json.dumps(value, default=plain))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name!r} cannot be kept as JSON, numbers, texts, lists and objects of these: {error}"
        ) from error
