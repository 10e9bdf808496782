"""From a JAX function and the sizes of its arguments to a jaxpr, if possible for every size at once.

Tracing takes milliseconds, so a program is traced with symbolic sizes where the function allows it. JAX takes two
sizes that may or may not be equal for different; each such verdict is recorded, and a program is used only for sizes
that agree with all of them.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import numpy as np
from jax import export

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
    found: dict[str, Any] = {}

    def flat(*values: Any) -> list[Any]:
        filled = list(leaves)
        for argument, value in zip(arguments, values, strict=True):
            filled[argument.position] = value
        args, kwargs = jax.tree.unflatten(tree, filled)
        results, found["tree"] = jax.tree.flatten(fn(*args, **kwargs))
        arrays = (jax.Array, np.ndarray, np.generic, bool, int, float)
        found["static"] = {i: r for i, r in enumerate(results) if not isinstance(r, arrays)}
        return [r for i, r in enumerate(results) if i not in found["static"]]

    structs = [jax.ShapeDtypeStruct(shape, a.dtype) for shape, a in zip(shapes, arguments, strict=True)]
    closed = jax.make_jaxpr(flat)(*structs)
    return closed, found["tree"], found["static"]


def pattern(shapes: Sequence[Sequence[Size]]) -> tuple[tuple[tuple[int, ...], ...], tuple[Size, ...]]:
    """Which sizes are equal, and what they are: negative numbers stand for them; 0 and 1, which broadcast, stay."""
    sizes: list[Size] = []
    result = []
    for shape in shapes:
        row = []
        for size in shape:
            if size == 0 or size == 1:
                row.append(int(size))
                continue
            known = next((i for i, s in enumerate(sizes) if s == size), None)
            if known is None:
                known = len(sizes)
                sizes.append(size)
            row.append(-1 - known)
        result.append(tuple(row))
    return tuple(result), tuple(sizes)


@contextlib.contextmanager
def symbolic(rows: Sequence[Sequence[int]], count: int) -> Iterator[tuple[list[tuple[Any, ...]], "Equalities"]]:
    """Shapes with symbols for the sizes of a pattern, and a record of the equalities that JAX denies in between."""
    names = [f"s{i}" for i in range(count)]
    symbols: tuple[Any, ...] = ()
    if names:
        symbols = tuple(export.symbolic_shape(", ".join(names), constraints=[f"{name} >= 2" for name in names]))
    shapes = [tuple(symbols[-1 - size] if size < 0 else size for size in row) for row in rows]
    record = Equalities(tuple(names))
    with _LOCK:
        if not symbols:
            yield shapes, record
            return
        kind: Any = type(symbols[0])
        scope = symbols[0].scope
        equal, scan = kind.__eq__, jax.lax.associative_scan

        def recorded(self: Any, other: Any) -> bool:
            result = equal(self, other)
            same_scope = isinstance(other, (int, np.integer)) or (isinstance(other, kind) and other.scope is scope)
            if not result and self.scope is scope and same_scope:
                record.denied.append((self, other))
            return result

        kind.__eq__ = recorded
        jax.lax.associative_scan = _Hook(scan, scope)
        try:
            assert symbols[0] != 2 and record.denied, "JAX's symbolic sizes are compared by something else than __eq__"
            record.denied.clear()
            yield shapes, record
        finally:
            kind.__eq__ = equal
            jax.lax.associative_scan = scan


@dataclasses.dataclass
class Equalities:
    """What a symbolic trace took for unequal."""

    names: tuple[str, ...]
    denied: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)

    def expressions(self) -> tuple[str, ...]:
        """Source of the differences that must not be zero, without those that never are."""
        pairs = {(str(a), str(b)): (a, b) for a, b in self.denied}
        texts = set()
        for a, b in pairs.values():
            difference = a - b
            if not isinstance(difference, (int, np.integer)) and not any(_SCAN in t for t in (str(a), str(b))):
                texts.add(str(difference).replace("^", "**"))
        # A symbol is at least 2: it differs from 0 and 1 without being asked.
        trivial = {text for name in self.names for text in (name, f"{name} - 1")}
        return tuple(sorted(texts - trivial))


_SCAN = "scanned"
associative_scan_p = jex_core.Primitive("associative_scan")
associative_scan_p.multiple_results = True
associative_scan_p.def_abstract_eval(lambda *avals, **_: list(avals))


class _Hook:
    """jax.lax.associative_scan for an axis of symbolic size, which JAX's own cannot unroll."""

    def __init__(self, original: Callable[..., Any], scope: Any):
        self._original, self._scope, self._thread = original, scope, threading.get_ident()

    def __call__(self, fn: Callable[..., Any], elems: Any, reverse: bool = False, axis: int = 0, **options: Any) -> Any:
        leaves, tree = jax.tree.flatten(elems)
        axis = axis % leaves[0].ndim if leaves else axis
        if threading.get_ident() != self._thread or not leaves or isinstance(leaves[0].shape[axis], int):
            return self._original(fn, elems, reverse=reverse, axis=axis, **options)
        (size,) = export.symbolic_shape(_SCAN, scope=self._scope)
        slices = [jax.ShapeDtypeStruct((*x.shape[:axis], size, *x.shape[axis + 1 :]), x.dtype) for x in leaves]

        def combine(*values: Any) -> list[Any]:
            left, right = values[: len(leaves)], values[len(leaves) :]
            return jax.tree.leaves(fn(jax.tree.unflatten(tree, left), jax.tree.unflatten(tree, right)))

        closed = jax.make_jaxpr(combine)(*slices, *slices)
        return jax.tree.unflatten(tree, associative_scan_p.bind(*leaves, combine=closed, axis=axis, reverse=reverse))
