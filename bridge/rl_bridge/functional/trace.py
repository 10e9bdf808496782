"""From a JAX function and the sizes of its arguments to a jaxpr, if possible for every size at once."""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

Size = Any  # an int, a SymInt, or one of JAX's symbolic dimensions
_LOCK = threading.RLock()


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A jaxpr, what it takes for granted about the sizes, and how to rebuild its result."""

    closed: Any
    tree: Any
    static: dict[int, Any]  # leaves of the result that are no arrays
    symbols: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Argument:
    """A traced argument: its place among the leaves, its dtype for JAX."""

    position: int
    dtype: np.dtype


def trace(
    fn: Callable[..., Any], tree: Any, leaves: Sequence[Any], arguments: Sequence[Argument], shapes: Sequence[Any]
) -> tuple[Any, Any, dict[int, Any]]:
    """The jaxpr of `fn` in `arguments`, the tree of its result, and the result's leaves that are no arrays."""
    structure: dict[str, Any] = {}

    def flat(*values: Any) -> list[Any]:
        filled = list(leaves)
        for argument, value in zip(arguments, values, strict=True):
            filled[argument.position] = value
        args, kwargs = jax.tree.unflatten(tree, filled)
        results, structure["tree"] = jax.tree.flatten(fn(*args, **kwargs))
        arrays = (jax.Array, np.ndarray, np.generic, bool, int, float)
        structure["static"] = {i: r for i, r in enumerate(results) if not isinstance(r, arrays)}
        return [r for i, r in enumerate(results) if i not in structure["static"]]

    structs = [jax.ShapeDtypeStruct(shape, a.dtype) for shape, a in zip(shapes, arguments, strict=True)]
    closed = jax.make_jaxpr(flat)(*structs)
    return closed, structure["tree"], structure["static"]
