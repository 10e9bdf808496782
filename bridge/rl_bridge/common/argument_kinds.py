"""Options and arguments of another kind than their annotation: choices, numbers, texts, objects, each by its name."""

import functools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import fields
from numbers import Integral, Real
from os import PathLike
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_PACKAGES = ("rl_bridge", "rl_fn", "rl_train")
_NUMBERS: dict[Any, tuple[Any, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "a text"),
    NoneType: (NoneType, ""),
}
"""Kind of an annotation → the class of its values, and its words. True and False are no numbers."""
_SEVERAL: dict[Any, tuple[Any, str]] = {Sequence: (object, "a list"), Mapping: (Mapping, "a dictionary")}
"""Kinds of several objects."""


@functools.cache
def _hints(of: Any) -> dict[str, Any]:
    """Annotations of a function, or of a class; not those of a user's class, whose names may stand in no module."""
    if not isinstance(of, type):
        return get_type_hints(of)
    hints: dict[str, Any] = {}
    for base in reversed(of.__mro__):
        if base.__module__.partition(".")[0] in _PACKAGES:
            hints |= get_type_hints(base)
        else:
            hints = {name: hint for name, hint in hints.items() if name not in vars(base).get("__annotations__", ())}
    return hints


def check_options(options: Any) -> None:
    """Refuse an option of another kind than its annotation, which the command line refuses where it is read.

    Paths, tuples, functions, what is in a list, and options that a user's class adds are not looked at.

    >>> from rl_bridge.modules.trainable import OptimizerConfig
    >>> check_options(OptimizerConfig(learning_rate=1e-3))

    Raises:
        TypeError: with the option's name, its kinds and the value.
        ValueError: a value beside the choices that there are.
    """
    hints = _hints(type(options))
    for option in fields(options):
        if option.name in hints:
            check_argument(option.name, getattr(options, option.name), hints[option.name])


def check_call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of a call as ``check_options`` refuses options. ``arguments``: ``locals()`` as the call begins.

    Raises:
        TypeError, ValueError: as for ``check_options``.
    """
    for name, annotation in _hints(function).items():
        if name in arguments:
            check_argument(name, arguments[name], annotation)


def check_argument(name: str, value: Any, annotation: Any) -> None:
    """Refuse a value that an annotation does not have, as ``check_options`` does.

    >>> check_argument("rank", 16.5, int)
    Traceback (most recent call last):
    TypeError: rank is a whole number, got 16.5

    Raises:
        TypeError, ValueError: as for ``check_options``.
    """
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    words, choices, of_objects = [], [], False
    for kind in kinds:
        key = get_origin(kind) or kind
        if key is Literal:
            choices += get_args(kind)
            if any(_is_choice(value, choice) for choice in get_args(kind)):
                return
        elif key in _NUMBERS or key in _SEVERAL or _is_own(key):
            of_kind, in_words = (_NUMBERS | _SEVERAL).get(key) or (key, f"{key.__name__}(…)")
            beside = _is_no_list(value) if key is Sequence else key in (int, float) and isinstance(value, bool)
            if (isinstance(value, of_kind) and not beside) or (key is bool and _is_flag(value)):
                return
            words += [in_words] if in_words else []
            of_objects = of_objects or key not in _NUMBERS
        else:
            return
    expected = " or ".join([*words, *([f"one of {', '.join(map(str, choices))}"] if choices else [])])
    text = f"{type(value).__name__} {repr(value)[:80]}" if of_objects else repr(value)
    if Sequence[str] in kinds and isinstance(value, str):
        expected += f", as {name}=({value!r},)"
    if str in kinds and isinstance(value, PathLike):
        expected += ", as str(path)"
    if not {int, float}.isdisjoint(kinds) and getattr(value, "ndim", None) == 0:
        expected += ", as value.item()"
    error = TypeError if words else ValueError
    raise error(f"{name} is {expected}, got {text}")


def require_default(arguments: Mapping[str, Any], defaults: Sequence[Any], without: str) -> None:
    """Refuse arguments of a call that nothing would read, unless they have their default values.

    >>> require_default({"updates": 1}, (1,), "with NLL()")

    Raises:
        ValueError: with the argument's name, its value and ``without``, which says why nothing reads it.
    """
    for (name, value), default in zip(arguments.items(), defaults, strict=True):
        if value != default:
            raise ValueError(f"{name}={value!r} has no effect {without}")


def require_kind(name: str, value: Any, kind: Any, expected: str) -> None:
    """Refuse an argument of a call that is no object of its kind.

    >>> require_kind("steps", 3, int, "a whole number")

    Raises:
        TypeError: with the argument's name, what is ``expected``, and the value.
    """
    if not isinstance(value, kind):
        text = repr(value)
        text = text if len(text) <= 80 else f"{text[:80]}…"
        raise TypeError(f"{name} is {expected}, got {type(value).__name__} {text}")


def _is_flag(value: Any) -> bool:
    """Whether this is NumPy's True or False. NumPy is not imported: it takes longer than a command's help."""
    return type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")


def _is_choice(value: Any, choice: Any) -> bool:
    """Whether these are one; a text of NumPy is a text, and 1 is not True."""
    alike = isinstance(value, type(choice)) and isinstance(value, bool) == isinstance(choice, bool)
    return alike and value == choice


def _is_no_list(value: Any) -> bool:
    """Whether this is not read by places: a text, or a generator. An array and a data set are lists."""
    whole = isinstance(value, str | bytes | Mapping | Set)
    return whole or not (hasattr(value, "__len__") and hasattr(value, "__getitem__"))


def _is_own(kind: Any) -> bool:
    """Whether this is a class of these packages, and no protocol, which objects of any class may have."""
    own = isinstance(kind, type) and kind.__module__.partition(".")[0] in _PACKAGES
    return own and not getattr(kind, "_is_protocol", False)
