"""A nested state taken apart: its tensors by name, and everything else as JSON. Nothing is pickled."""

from collections.abc import Mapping
from typing import Any

import torch


def take_apart(state: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """(What JSON holds, name → tensor). Dictionaries, lists, tuples, tensors, numbers, strings, None may be nested.

    >>> structure, tensors = take_apart({"step": 3, "weights": {"a": torch.ones(2)}})
    >>> tensors
    {'weights/a': tensor([1., 1.])}
    >>> put_together(structure, tensors)
    {'step': 3, 'weights': {'a': tensor([1., 1.])}}

    Raises:
        TypeError: something else is in it; the message says where.
        ValueError: two tensors have the same name.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _structure(state, "", tensors), tensors


def put_together(structure: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The state that ``take_apart`` took apart."""
    if not isinstance(structure, dict):
        return structure
    [(kind, content)] = structure.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: put_together(value, tensors) for key, value in content}
    values = [put_together(value, tensors) for value in content]
    return values if kind == "list" else tuple(values)


def tensor_names(structure: Any) -> list[str]:
    """Names of the tensors of a state, in its order."""
    if not isinstance(structure, dict):
        return []
    [(kind, content)] = structure.items()
    if kind == "tensor":
        return [content]
    parts = [value for _, value in content] if kind == "dict" else content
    return [name for part in parts for name in tensor_names(part)]


def _structure(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if path in tensors:
            raise ValueError(f"two tensors of the state have the name {path!r}")
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, Mapping):
        if odd := [key for key in value if type(key) not in (str, int)]:
            raise TypeError(f"a checkpoint's keys are strings or integers, got {odd[0]!r} at {path or 'the top'}")
        return {"dict": [[key, _structure(item, _below(path, key), tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_structure(item, _below(path, place), tensors) for place, item in enumerate(value)]}
    # Subclasses (an enum of strings, a NumPy scalar) would come back as something else.
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(
        f"a checkpoint holds tensors, numbers, strings, None and their dictionaries, lists and tuples, "
        f"got {type(value).__name__} at {path or 'the top'}"
    )


def _below(path: str, key: str | int) -> str:
    name = str(key).replace("~", "~0").replace("/", "~1")
    return f"{path}/{name}" if path else name
