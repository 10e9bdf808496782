"""`from_jax`: arguments in, compiled program, results out; eagerly and under torch.compile."""

import functools
import hashlib
import itertools
import linecache
import re
import types
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.utils._pytree as pytree

from rl_bridge.functional import rules, trace
from rl_bridge.functional.crossing import jax_dtype, refuse_fork, wide_types
from rl_bridge.functional.emitter import Builder, Value
from rl_bridge.functional.runtime import without_autocast
from rl_bridge.functional.trace import Traced

assert rules  # importing it fills the table of lowerings
_NUMBER = itertools.count()


class Program:
    """Calls with the traced arguments, returns the result as the function would: `program(*tensors)`."""

    def __init__(self, traced: Traced, dtypes: Sequence[torch.dtype], name: str):
        builder = Builder(who=name)
        names = [builder.fresh() for _ in dtypes]
        avals = traced.closed.in_avals
        values = [
            Value(n, tuple(a.shape), np.dtype(a.dtype), tuple(a.shape), None, True)
            for n, a in zip(names, avals, strict=True)
        ]
        narrow = []
        for i, (value, dtype) in enumerate(zip(values, dtypes, strict=True)):
            if jax_dtype(dtype) != value.dtype:
                narrow.append(f"{value.code} = rt.narrow({value.code}, {i})")
        results = builder.run(traced.closed, values)
        identifier = "lowered_" + re.sub(r"\W", "_", name)  # a prefix: the function may be called abs
        body = builder.source(identifier, names, results, len(results), ["@PRELUDE"])
        prelude = [f"device = {names[0]}.device", *self._sizes(traced, builder, names), *narrow]
        prelude += [line for function in builder.functions for line in function.split("\n")]
        self.source = body.replace("    @PRELUDE", "\n".join(f"    {line}" for line in prelude))
        filename = f"<from_jax {name} {next(_NUMBER)}>"
        linecache.cache[filename] = (len(self.source), None, self.source.splitlines(keepends=True), filename)
        exec(compile(self.source, filename, "exec"), builder.namespace)
        self._function = builder.namespace[identifier]
        self._tree, self._static = traced.tree, traced.static
        self._symbols, self._namespace = traced.symbols, builder.namespace
        self.under(())

    def under(self, conditions: Sequence[str]) -> "Program":
        """The program, for sizes that make all of the conditions true."""
        self._conditions = compile(" and ".join(conditions) or "True", "<sizes>", "eval")
        return self

    @staticmethod
    def _sizes(traced: Traced, builder: Builder, names: Sequence[str]) -> list[str]:
        lines = []
        for symbol in traced.symbols:
            where = next(
                (name, axis)
                for name, aval in zip(names, traced.closed.in_avals, strict=True)
                for axis, size in enumerate(aval.shape)
                if str(size) == symbol
            )
            lines.append(f"{symbol} = {where[0]}.shape[{where[1]}]")
        return lines + [f"{name} = {text}" for text, name in builder.dims.items()]

    def allows(self, sizes: Sequence[Any]) -> bool:
        """Whether the program is right for these sizes."""
        return bool(eval(self._conditions, self._namespace, dict(zip(self._symbols, sizes, strict=True))))

    def __call__(self, *tensors: torch.Tensor) -> Any:
        return jax.tree.unflatten(self._tree, with_static(self._function(*tensors), self._static))


def with_static(results: Sequence[Any], static: Mapping[int, Any]) -> Sequence[Any]:
    """All leaves of a result: the arrays, and in their places those that are none."""
    if not static:
        return results
    rest = iter(results)
    return [static[i] if i in static else next(rest) for i in range(len(results) + len(static))]


_LIMIT = 512  # programs that one function keeps: a static argument that changes at every call must not fill the memory
# Weak: the function holds its implementation, and compiled code finds it here by its handle.
_IMPLEMENTATIONS: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_INTERNED: dict[Any, str] = {}
_SKELETONS: dict[str, Any] = {}
_COUNT = itertools.count()


def from_jax(fn: Callable[..., Any], *, dynamic: bool = True) -> Callable[..., Any]:
    """A differentiable torch function that computes what the JAX function `fn` computes, without XLA.

    `fn` is traced to a jaxpr, and the jaxpr is lowered to torch operations, once for each combination of tree, dtypes
    and static values; `dynamic` traces with symbolic sizes, so that a new shape costs little. Gradients are torch's.

    Arguments are pytrees. torch tensors are traced; NumPy and JAX arrays are constants, known by their content;
    everything else (numbers, strings, functions, any hashable) is static and part of the cache's key: pass a number
    that changes from step to step as a zero-dimensional tensor. Results are the same pytree with torch tensors.

    >>> import jax.numpy as jnp, torch
    >>> from_jax(lambda x, power: jnp.sum(x ** power))(torch.tensor([1.0, 2.0]), 2)
    tensor(5.)
    """
    return as_torch_function(fn, _Lowering(fn, dynamic))


def as_torch_function(
    fn: Callable[..., Any], implementation: Callable[[Sequence[Any], Any], Any]
) -> Callable[..., Any]:
    """`fn`'s signature around `implementation(leaves, tree)`, eagerly and under torch.compile."""
    handle = f"{getattr(fn, '__name__', type(fn).__name__)}#{next(_COUNT)}"
    _IMPLEMENTATIONS[handle] = implementation

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            tensors: list[torch.Tensor] = []
            skeleton = _take_tensors((args, kwargs), tensors)
            # The addition makes a plain constant of a result that Dynamo could not put a guard on.
            return _opaque("" + _intern(handle, skeleton), *tensors)
        leaves, tree = jax.tree.flatten((args, kwargs))
        return implementation(leaves, tree)

    # Dynamo counts its recompilations by code object: one for all functions would reach the limit after eight of them.
    copy = types.FunctionType(call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__)
    return functools.wraps(fn, updated=())(copy)


class _Lowering:
    """The programs of one function."""

    def __init__(self, fn: Callable[..., Any], dynamic: bool):
        self.fn, self.dynamic = fn, dynamic
        self.name = getattr(fn, "__name__", type(fn).__name__)
        self._programs: dict[Any, Program] = {}
        self._families: dict[Any, list[Program]] = {}  # traced with symbolic sizes
        self._fixed: dict[Any, None] = {}  # families whose functions need a size as a number

    def __call__(self, leaves: Sequence[Any], tree: Any) -> Any:
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        if not tensors:
            raise TypeError(f"from_jax({self.name}) was called without a torch tensor: call the JAX function itself")
        static = (tree, wide_types(), *map(static_key, leaves))
        shapes = tuple(x.shape for x in tensors)
        try:
            program = self._programs.get((static, shapes))
        except TypeError:  # sizes under torch.compile may be symbols, which have no hash
            program, shapes = None, None
        if program is None:
            program = self._find(static, leaves, tree, tensors)
            if shapes is not None:
                _bound(self._programs)
                self._programs[static, shapes] = program
        with without_autocast(tensors[0].device.type):
            return program(*tensors)

    def _find(self, static: Any, leaves: Sequence[Any], tree: Any, tensors: Sequence[torch.Tensor]) -> Program:
        caller = f"from_jax({self.name})"
        refuse_fork(f"{caller}, to trace a new combination of arguments,")
        rows, distinct = trace.pattern([x.shape for x in tensors])
        family = (static, rows)
        for program in self._families.get(family, ()):
            if program.allows(distinct):
                return program
        arguments = traced_arguments(leaves, caller)

        def traced(shapes: Sequence[Any], symbols: tuple[str, ...] = ()) -> Program:
            result = trace.trace(self.fn, tree, leaves, arguments, shapes, symbols)
            return Program(result, [x.dtype for x in tensors], self.name)

        if self.dynamic and family not in self._fixed:
            try:
                with trace.symbolic(rows, [trace.at_hand(size) for size in distinct]) as (shapes, verdicts):
                    program = traced(shapes, verdicts.names)
                program = program.under(verdicts.conditions())
            except jax.errors.InconclusiveDimensionOperation as error:
                _bound(self._fixed)
                self._fixed[family] = None
                reason = str(error).splitlines()[0]
                warnings.warn(f"{caller} is traced for every new shape: {reason}", stacklevel=4)
            except Exception as error:
                traced([tuple(map(trace.at_hand, x.shape)) for x in tensors])  # raises with these sizes in its message
                error.add_note(
                    f"{caller} fails for symbolic sizes alone: from_jax(..., dynamic=False) takes each as it is"
                )
                raise
            else:
                _bound(self._families)
                self._families.setdefault(family, []).append(program)
                # True here; under torch.compile the question makes the conditions its guards.
                if program.allows(distinct):
                    return program
        return traced([tuple(map(int, x.shape)) for x in tensors])  # under torch.compile a guard on each size


def _bound(cache: dict[Any, Any]) -> None:
    """Empties a cache that is full."""
    if len(cache) >= _LIMIT:
        cache.clear()


def traced_arguments(leaves: Sequence[Any], who: str) -> list[trace.Argument]:
    """The tensors among the leaves, with the dtypes that JAX sees; 64 bits are not narrowed in silence."""
    wide = wide_types()
    result = []
    for position, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            continue
        dtype = jax_dtype(leaf.dtype)
        if not wide and leaf.dtype == torch.int64:
            dtype = np.dtype(np.int32)
        elif not wide and leaf.dtype in (torch.float64, torch.uint64):
            raise TypeError(
                f"{who}: {leaf.dtype} would be narrowed, as JAX computes in 32 bits by default; convert the tensor, or "
                "turn on jax_enable_x64"
            )
        result.append(trace.Argument(position, dtype))
    return result


def static_key(leaf: Any) -> Any:
    """The part that a leaf contributes to the cache's key, its sizes apart."""
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype
    if isinstance(leaf, float):
        return leaf.hex()  # tells 0.0 from -0.0, and nan is nan
    if isinstance(leaf, (np.ndarray, np.generic, jax.Array)):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            host = np.asarray(jax.random.key_data(leaf))
        else:
            host = np.asarray(leaf)
        return (str(leaf.dtype), host.shape, hashlib.sha256(host.tobytes()).digest())
    try:
        hash(leaf)
    except TypeError:
        raise TypeError(
            f"from_jax: a static argument must be hashable, got {type(leaf).__name__}; arguments are torch tensors, "
            "arrays, hashable values, and pytrees of these"
        ) from None
    return (type(leaf), leaf)


# -- torch.compile: Dynamo flattens the arguments, and sees one opaque call, through which AOTAutograd traces ------
_HOLE = "<from_jax: tensor> "  # and its number: JAX sorts the keys of a dict, so that order says nothing


def _take_tensors(tree: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        tensors.append(tree)
        return f"{_HOLE}{len(tensors) - 1}"
    if isinstance(tree, dict):
        return {key: _take_tensors(value, tensors) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*[_take_tensors(value, tensors) for value in tree])
    if isinstance(tree, tuple):
        return tuple([_take_tensors(value, tensors) for value in tree])
    if isinstance(tree, list):
        return [_take_tensors(value, tensors) for value in tree]
    return tree


@torch.compiler.assume_constant_result
def _intern(handle: str, skeleton: Any) -> str:
    leaves, tree = jax.tree.flatten(skeleton)
    key = (handle, tree, *map(static_key, leaves))
    if key not in _INTERNED:
        _INTERNED[key] = f"{handle}:{len(_INTERNED)}"
        _SKELETONS[_INTERNED[key]] = (handle, leaves, tree)
    return _INTERNED[key]


@torch._dynamo.nonstrict_trace
def _opaque(key: str, *tensors: torch.Tensor) -> Any:
    handle, leaves, tree = _SKELETONS[key]
    filled = [tensors[int(x[len(_HOLE) :])] if isinstance(x, str) and x.startswith(_HOLE) else x for x in leaves]
    return _named(_IMPLEMENTATIONS[handle](filled, tree))


class _Named:
    """A NamedTuple on its way out of the opaque call: Dynamo cannot unflatten torch's own node type for them."""

    def __init__(self, kind: type, values: list[Any]):
        self.kind, self.values = kind, values


def _named(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _named(value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return _Named(type(tree), [_named(value) for value in tree])
    if isinstance(tree, tuple | list):
        return type(tree)([_named(value) for value in tree])
    return tree


def _from_named(named: _Named) -> tuple[list[Any], type]:
    return named.values, named.kind


def _to_named(values: Any, kind: type) -> Any:
    return kind(*values)


pytree.register_pytree_node(_Named, _from_named, _to_named, serialized_type_name="rl_bridge.functional.NamedTuple")
