"""From a JAX function and the sizes of its arguments to a jaxpr, if possible for every size at once.

JAX refuses to compare two symbols that could be ordered either way, and treats two that could be equal as different.
Here such a question is answered as the sizes at hand answer it, and the verdict becomes a condition of the program:
the program is used for other sizes only if every verdict is the same for them.
"""

import contextlib
import dataclasses
import dis
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import export

from rl_bridge.functional import associative_scan

# Symbolic sizes for a trace: what the trace asks about a size is decided by the sizes at hand, and written down.

Size = Any  # an int, a SymInt, or one of JAX's symbolic dimensions
_LOCK = threading.RLock()
_RELATIONS = {"__eq__": "==", "__ge__": ">=", "__le__": "<=", "__gt__": ">", "__lt__": "<"}
_COMPARISONS = {dis.opmap["COMPARE_OP"], dis.opmap["CONTAINS_OP"]}
FUNCTIONS = {"floordiv": lambda a, b: a // b, "mod": lambda a, b: a % b}  # as JAX prints them


class SizeNeeded(jax.errors.InconclusiveDimensionOperation, TypeError):
    """Python needs a size as a number, as `range(x.shape[0])` does. A TypeError too, which is what JAX expects."""


def pattern(shapes: Sequence[Sequence[Size]]) -> tuple[tuple[tuple[int, ...], ...], tuple[Size, ...]]:
    """The shapes with a negative number for every distinct size, and these sizes; 0 and 1, which broadcast, stay."""
    sizes: list[Size] = []
    result = []
    for shape in shapes:
        row = []
        for size in shape:
            if size == 0 or size == 1:
                row.append(int(size))
                continue
            number = next((i for i, s in enumerate(sizes) if s == size), None)
            if number is None:
                number = len(sizes)
                sizes.append(size)
            row.append(-1 - number)
        result.append(tuple(row))
    return tuple(result), tuple(sizes)


def at_hand(size: Size) -> int:
    """The size as a number, without tying a torch.compile'd program to the number."""
    hint = getattr(getattr(size, "node", None), "hint", None)
    return int(size if hint is None else hint)


class Verdicts:
    """The questions about sizes that a trace with symbolic sizes asked, with the answers."""

    def __init__(self, sizes: Sequence[int]):
        self.names = tuple(f"s{i}" for i in range(len(sizes)))
        self._values = {**FUNCTIONS, **dict(zip(self.names, sizes, strict=True))}
        self._answers: dict[str, bool] = {}
        # Symbols are at least 2 and all different: these answers are known without being asked.
        self._trivial = {f"{name}{rest} == 0" for name in self.names for rest in ("", " - 1")}
        self._trivial |= {f"{a} - {b} == 0" for a in self.names for b in self.names}

    def answer(self, difference: Any, relation: str) -> bool:
        """Whether the difference of two sizes is `relation` (==, >=, ...) 0 for the sizes at hand."""
        text = f"{difference} {relation} 0".replace("^", "**")
        if text not in self._answers:
            self._answers[text] = bool(eval(text, dict(self._values)))
        return self._answers[text]

    def conditions(self) -> tuple[str, ...]:
        """Python expressions in the symbols' names; the program is right for sizes that make all of them true."""
        answers = [(text, yes) for text, yes in self._answers.items() if text not in self._trivial]
        return tuple(sorted(f"({text})" if yes else f"(not ({text}))" for text, yes in answers))


@contextlib.contextmanager
def symbolic(rows: Sequence[Sequence[int]], sizes: Sequence[int]) -> Iterator[tuple[list[tuple[Any, ...]], Verdicts]]:
    """Shapes with symbols for the sizes of a pattern, and the verdicts that a trace takes in between."""
    verdicts = Verdicts(sizes)
    symbols: tuple[Any, ...] = ()
    if verdicts.names:
        constraints = [f"{name} >= 2" for name in verdicts.names]
        symbols = tuple(export.symbolic_shape(", ".join(verdicts.names), constraints=constraints))
    shapes = [tuple(symbols[-1 - size] if size < 0 else size for size in row) for row in rows]
    if not symbols:
        yield shapes, verdicts
        return
    with _LOCK, _questions_answered(type(symbols[0]), symbols[0].scope, verdicts):
        yield shapes, verdicts


@contextlib.contextmanager
def _questions_answered(kind: Any, scope: Any, verdicts: Verdicts) -> Iterator[None]:
    """JAX's symbolic dimensions of this scope, with a definite answer to every comparison; other scopes keep JAX's."""
    originals = {name: getattr(kind, name) for name in _RELATIONS}
    multiply, scan = kind.__rmul__, jax.lax.associative_scan

    def repeated(self: Any, other: Any) -> Any:
        return _refuse_number(self) if isinstance(other, (list, tuple)) else multiply(self, other)

    try:
        for name, relation in _RELATIONS.items():
            setattr(kind, name, _comparison(originals[name], kind, scope, relation, verdicts))
        kind.__index__, kind.__rmul__ = _refuse_number, repeated
        jax.lax.associative_scan = functools.partial(
            associative_scan.bind, original=scan, scope=scope, thread=threading.get_ident()
        )
        yield
    finally:
        for name, original in originals.items():
            setattr(kind, name, original)
        del kind.__index__
        kind.__rmul__ = multiply
        jax.lax.associative_scan = scan


def _comparison(
    original: Callable[..., bool], kind: Any, scope: Any, relation: str, verdicts: Verdicts
) -> Callable[..., bool]:
    def compare(self: Any, other: Any) -> bool:
        same_scope = isinstance(other, (int, np.integer)) or (isinstance(other, kind) and other.scope is scope)
        if self.scope is not scope or not same_scope:
            return original(self, other)
        difference = self - other
        if isinstance(difference, (int, np.integer)) or associative_scan.SLICE in str(difference):
            return original(self, other)
        try:
            verdict = original(self, other)
        except jax.errors.InconclusiveDimensionOperation:
            return verdicts.answer(difference, relation)
        if relation != "==" or _of_a_table(sys._getframe(1)):
            return verdict
        return verdicts.answer(difference, relation)  # JAX's == says no where it does not know

    return compare


def _of_a_table(caller: types.FrameType) -> bool:
    """Whether a table of JAX's asks, which looks for an identical key, instead of Python code that compares sizes.

    Some of these tables are in C++ and compare keys of different hashes, for about one key in 128. A symbol that
    equals its size at hand would be found under the number, and the program would be wrong for every other size.
    """
    if caller.f_code.co_name == "__ne__" and caller.f_back is not None:
        caller = caller.f_back
    return caller.f_code.co_code[caller.f_lasti] not in _COMPARISONS


def _refuse_number(self: Any) -> int:
    raise SizeNeeded(f"the size {self} is needed as a number")


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
    fn: Callable[..., Any],
    tree: Any,
    leaves: Sequence[Any],
    arguments: Sequence[Argument],
    shapes: Sequence[Any],
    symbols: tuple[str, ...],
) -> Traced:
    """The jaxpr of `fn` in `arguments` of these `shapes`, in which the `symbols` are sizes."""
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
    return Traced(closed, structure["tree"], structure["static"], symbols)
