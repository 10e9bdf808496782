"""Numbers that a user's code computes with any library, as Python and JSON have them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

FLOAT32 = 3.4028234663852886e38
"""The largest number of float32, in which a run computes and which rewards become: a larger one would be infinite."""


def plain_scalar(value: Any) -> Any:
    """The number of a scalar of numpy, torch or jax; any other value as it is.

    >>> import numpy as np
    >>> plain_scalar(np.float32(0.5)), plain_scalar(np.array(3)), plain_scalar("3"), plain_scalar([3])
    (0.5, 3, '3', [3])
    """
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


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
