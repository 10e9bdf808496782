"""Options of another kind than their annotation: choices, numbers, flags, texts and other options, each by its name."""

import functools
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_WORDS: dict[Any, tuple[Any, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "a text"),
    NoneType: (NoneType, ""),
}
"""Kind of an annotation → the class of its values, and its words. True and False are no numbers."""

_hints = functools.cache(get_type_hints)


def check_options(options: Any) -> None:
    """Refuse an option of another kind than its annotation, which the command line refuses where it is read.

    Paths, tuples and dictionaries are not looked at.

    >>> from rl_bridge.modules.trainable import OptimizerConfig
    >>> check_options(OptimizerConfig(learning_rate=1e-3))

    Raises:
        TypeError: with the option's name, its kinds and the value.
        ValueError: a value beside the choices that there are.
    """
    for option in fields(options):
        check_argument(option.name, getattr(options, option.name), _hints(type(options))[option.name])


def check_argument(name: str, value: Any, annotation: Any) -> None:
    """Refuse a value that an annotation does not have, as ``check_options`` does.

    >>> check_argument("rank", 16.5, int)
    Traceback (most recent call last):
    TypeError: rank is a whole number, got 16.5

    Raises:
        TypeError, ValueError: as for ``check_options``.
    """
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    words, choices = [], []
    for kind in kinds:
        if get_origin(kind) is Literal:
            choices += get_args(kind)
            if any(type(value) is type(choice) and value == choice for choice in get_args(kind)):
                return
        elif kind in _WORDS or (isinstance(kind, type) and is_dataclass(kind)):
            of_kind, in_words = _WORDS.get(kind) or (kind, f"{kind.__name__}(…)")
            if isinstance(value, of_kind) and not (isinstance(value, bool) and kind in (int, float)):
                return
            words += [in_words] if in_words else []
        else:
            return
    expected = " or ".join([*words, *([f"one of {', '.join(map(str, choices))}"] if choices else [])])
    error = TypeError if words else ValueError
    raise error(f"{name} is {expected}, got {value!r}")
