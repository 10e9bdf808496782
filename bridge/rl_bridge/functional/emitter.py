"""Turns a jaxpr into the source of one flat Python function: values, statements, and their clean-up.

A value is either a Python literal or a torch variable. A variable may hold fewer elements than its JAX shape says, as
long as it broadcasts to it: element-wise torch operations broadcast for free, so JAX's explicit broadcasts vanish.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jex_core
import numpy as np
import torch
from jax.extend import source_info_util
from torch.utils._python_dispatch import _disable_current_modes

from rl_bridge.functional import runtime, trace
from rl_bridge.functional.crossing import torch_dtype

Shape = tuple[Any, ...]  # of int, or of JAX's symbolic dimensions
Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}
_UNSIGNED = (np.dtype(np.uint16), np.dtype(np.uint32))
_VARIABLE = re.compile(r"\bv\d+\b")


def rule(*primitives: str) -> Callable[[Rule], Rule]:
    """Registers a lowering `(builder, eqn, *values) -> Value | sequence of Value` for the named primitives."""

    def register(function: Rule) -> Rule:
        for name in primitives:
            RULES[name] = function
        return function

    return register


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Value:
    """One JAX value: `code` names a torch tensor of shape `held`, which broadcasts to `shape`; or it is a literal."""

    code: str
    shape: Shape
    dtype: np.dtype
    held: Shape
    literal: bool | int | float | None = None
    aliases_input: bool = False
    is_number: bool = False  # `code` is a Python number: a literal, or a size that the call's shapes decide


def literal(value: Any, shape: Shape, dtype: np.dtype) -> Value:
    """A Python scalar that stands for a whole array."""
    scalar = np.asarray(value).astype(dtype).item() if dtype.kind in "biu" else float(value)
    return Value(f"({scalar!r})", shape, dtype, (), scalar, is_number=True)


def shape_of(eqn: Any) -> Shape:
    """The shape of an equation's one result."""
    (result,) = eqn.outvars
    return tuple(result.aval.shape)


def broadcast_shape(*shapes: Shape) -> Shape:
    """The shape that torch's broadcasting gives (the inputs are known to agree)."""
    rank = max(map(len, shapes))
    result: list[Any] = [1] * rank
    for shape in shapes:
        for position, size in enumerate(shape, rank - len(shape)):
            if not (isinstance(size, int) and size == 1):
                result[position] = size
    return tuple(result)


def same_shape(a: Shape, b: Shape) -> bool:
    """Equality of shapes that may be symbolic."""
    return len(a) == len(b) and all(x == y for x, y in zip(a, b, strict=True))


@dataclasses.dataclass(slots=True)
class _Statement:
    targets: tuple[str, ...]
    code: str
    unpack: bool


class Builder:
    """Emits statements into one function; nested functions share the dimensions, the device and the globals."""

    def __init__(self, parent: "Builder | None" = None, inside_rule: bool = False, who: str = "fn"):
        root = parent.root if parent else self
        self.root: Builder = root
        self.inside_rule = inside_rule or (parent is not None and parent.inside_rule)  # of a custom derivative
        self.used: set[Any] = set()  # the variables that the jaxpr at hand reads
        self.statements: list[_Statement] = []
        self.seen: dict[str, tuple[str, ...]] = {}
        self.sums: dict[str, tuple[str, tuple[int, ...], int]] = {}  # operand, axes, rank of each sum
        if parent is None:
            self.who = who  # for messages
            self.count = 0
            self.functions: list[str] = []
            self.dims: dict[str, str] = {}
            self.namespace: dict[str, Any] = {
                "torch": torch,
                "rt": runtime,
                "inf": math.inf,
                "nan": math.nan,
                **trace.FUNCTIONS,
            }

    # -- names -----------------------------------------------------------------------------------------------------
    def fresh(self, prefix: str = "v") -> str:
        self.root.count += 1
        return f"{prefix}{self.root.count}"

    def bind(self, prefix: str, value: Any) -> str:
        """Makes a Python object available to the generated code."""
        name = self.fresh(prefix)
        self.root.namespace[name] = value
        return name

    def dim(self, size: Any) -> str:
        """Source for a dimension; a symbolic one is computed once, at the top of the function."""
        if isinstance(size, (int, np.integer)):
            return str(int(size))
        text = str(size).replace("^", "**")
        return self.root.dims.setdefault(text, f"d{len(self.root.dims)}")

    def shape(self, shape: Shape) -> str:
        return "(" + "".join(f"{self.dim(size)}, " for size in shape) + ")"

    # -- statements --------------------------------------------------------------------------------------------------
    def emit(self, code: str, count: int | None = None) -> tuple[str, ...]:
        """Adds `target = code` (or unpacks `count` targets), or finds the earlier one: every statement is pure.

        Of a statement with no targets nothing is read, so that there is none: a batch without rows has such scans.
        """
        if count == 0:
            return ()
        if code not in self.seen:
            targets = tuple(self.fresh() for _ in range(count or 1))
            self.seen[code] = targets
            self.statements.append(_Statement(targets, code, unpack=count is not None))
        return self.seen[code]

    def tensor(self, code: str, shape: Shape, dtype: Any, *, alias: bool = False) -> Value:
        """A value that holds its whole shape."""
        return Value(self.emit(code)[0], shape, np.dtype(dtype), shape, aliases_input=alias)

    def out(self, code: str, eqn: Any, index: int = 0, *, alias: bool = False) -> Value:
        """A value with the shape and dtype that the jaxpr gives the equation's result."""
        aval = eqn.outvars[index].aval
        return self.tensor(code, tuple(aval.shape), aval.dtype, alias=alias)

    def outs(self, code: str, eqn: Any, *, alias: bool = False) -> list[Value]:
        """The values of an equation with several results, which `code` gives one after another."""
        avals = [var.aval for var in eqn.outvars]
        pairs = [(tuple(aval.shape), np.dtype(aval.dtype)) for aval in avals]
        names = self.emit(code, len(avals))
        return [Value(n, s, d, s, aliases_input=alias) for n, (s, d) in zip(names, pairs, strict=True)]

    def scalar(self, value: Value) -> str:
        """Source for an operand that must be a tensor but may broadcast."""
        if not value.is_number:
            return value.code
        return self.emit(f"rt.scalar({value.code}, {torch_dtype(value.dtype)}, device)")[0]

    def full(self, value: Value) -> str:
        """Source for an operand that must be a tensor of its whole shape."""
        if value.is_number:
            if value.shape == ():
                return self.scalar(value)
            code = (
                f"torch.full({self.shape(value.shape)}, {value.code}, dtype={torch_dtype(value.dtype)}, device=device)"
            )
            return self.emit(code)[0]
        if not same_shape(value.held, value.shape):
            return self.emit(f"{value.code}.expand({self.shape(value.shape)})")[0]
        return value.code

    def elementwise(self, template: str, operands: Sequence[Value], eqn: Any, tensors: Sequence[int] = ()) -> Value:
        """Emits `template` over broadcasting operands; `tensors` lists those that torch will not take as numbers."""
        aval = eqn.outvars[0].aval
        shape, dtype = tuple(aval.shape), np.dtype(aval.dtype)
        wide = any(value.dtype in _UNSIGNED for value in operands)
        operands = [self._widened(value) if wide else value for value in operands]
        if all(value.literal is not None for value in operands):
            return literal(self._fold(template, operands), shape, dtype)
        if all(value.is_number for value in operands):  # sizes: torch must compute them in the array's dtype
            tensors = (0, *tensors)
        codes = [self.scalar(v) if i in tensors else v.code for i, v in enumerate(operands)]
        name = self.emit(template.format(*codes))[0]
        if wide and dtype in _UNSIGNED:  # the conversion keeps the low bits: arithmetic wraps around as in XLA
            name = self.emit(f"{name}.to({torch_dtype(dtype)})")[0]
        return Value(name, shape, dtype, broadcast_shape(*(v.held for v in operands)))

    def _widened(self, value: Value) -> Value:
        """An unsigned integer as int64: torch stores uint16 and uint32, but has no arithmetic for them."""
        if value.dtype not in _UNSIGNED:
            return value
        code = value.code if value.is_number else self.emit(f"{value.code}.to(torch.int64)")[0]
        return dataclasses.replace(value, code=code, dtype=np.dtype(np.int64))

    def _fold(self, template: str, operands: Sequence[Value]) -> Any:
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            names = {
                f"x{i}": torch.tensor(v.literal, dtype=torch_dtype(v.dtype), device="cpu")
                for i, v in enumerate(operands)
            }
            return eval(template.format(*names), {**self.root.namespace, "device": "cpu", **names}).item()

    # -- jaxprs -------------------------------------------------------------------------------------------------------
    def constant(self, array: Any) -> Value:
        """A captured array: a number where it is uniform, else a global that is copied to the device once."""
        if getattr(array, "dtype", None) is not None:
            torch_dtype(array.dtype)
        host = np.asarray(array)
        if host.size and host.ndim == 0:
            return literal(host[()], host.shape, host.dtype)
        name = self.bind("const", runtime.Constant(host))
        return self.tensor(f"{name}.on(device)", host.shape, host.dtype, alias=True)

    def run(self, closed: Any, arguments: Sequence[Value]) -> list[Value]:
        """Emits a closed jaxpr in place and returns its results."""
        jaxpr = closed.jaxpr
        env: dict[Any, Value] = {}

        def read(atom: Any) -> Value:
            if isinstance(atom, jex_core.Literal):
                aval: Any = atom.aval
                return literal(atom.val, tuple(aval.shape), np.dtype(aval.dtype))
            return env[atom]

        env.update(zip(jaxpr.constvars, map(self.constant, closed.consts), strict=True))
        env.update(zip(jaxpr.invars, arguments, strict=True))
        atoms = [*jaxpr.outvars, *(atom for eqn in jaxpr.eqns for atom in eqn.invars)]
        variables = {atom for atom in atoms if not isinstance(atom, jex_core.Literal)}
        for eqn in jaxpr.eqns:
            if not eqn.outvars:  # JAX hands on what a loop or a branch returns unchanged; statements are pure
                continue
            self.used = variables
            lower = RULES.get(eqn.primitive.name)
            if lower is None:
                raise NotImplementedError(
                    f"from_jax({self.root.who}) has no torch lowering for JAX's primitive '{eqn.primitive.name}', "
                    f"used at {source_info_util.summarize(eqn.source_info)}"
                )
            results = lower(self, eqn, *map(read, eqn.invars))
            results = [results] if isinstance(results, Value) else results
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def function(
        self, closed: Any, arguments: Sequence[Value | None], fresh: int = 0, inside_rule: bool = False
    ) -> str:
        """Defines a nested function for a jaxpr; an argument that is given as a number is baked in, not passed.

        The first `fresh` results share no memory with the arguments.
        """
        inner = Builder(self, inside_rule)
        names, values = [], []
        for var, value in zip(closed.jaxpr.invars, arguments, strict=True):
            if value is not None and value.is_number:
                values.append(value)
                continue
            aval: Any = var.aval
            names.append(self.fresh())
            torch_dtype(aval.dtype)
            shape = tuple(aval.shape)
            values.append(Value(names[-1], shape, np.dtype(aval.dtype), shape, aliases_input=True))
        results = inner.run(closed, values)
        name = self.fresh("f")
        self.root.functions.append(inner.source(name, names, results, fresh))
        return name

    def sum(self, operand: str, axes: Sequence[int], rank: int, dtype: torch.dtype) -> str:
        axes = tuple(sorted(axes))
        name = self.emit(f"torch.sum({operand}, {axes}, dtype={dtype})")[0]
        self.sums[name] = (operand, axes, rank)
        return name

    def _merge_sums(self, outputs: Sequence[str]) -> None:
        """Makes one reduction of a sum of a sum that nothing else reads: compilers give each a kernel of its own."""
        reads = collections.Counter(name for s in self.statements for name in _VARIABLE.findall(s.code))
        reads.update(outputs)
        for statement in self.statements:
            operand, axes, _ = self.sums.get(statement.targets[0], ("", (), 0))
            if operand in self.sums and reads[operand] == 1:
                inner, inner_axes, rank = self.sums[operand]
                remaining_axes = [axis for axis in range(rank) if axis not in inner_axes]
                merged = tuple(sorted((*inner_axes, *(remaining_axes[axis] for axis in axes))))
                statement.code = statement.code.replace(f"{operand}, {axes}", f"{inner}, {merged}")
                self.sums[statement.targets[0]] = (inner, merged, rank)

    def source(
        self, name: str, parameters: Sequence[str], results: Sequence[Value], fresh: int, prelude: Sequence[str] = ()
    ) -> str:
        """The function's text: dead statements dropped, and every variable freed after its last use."""
        outputs = [self._fresh(v) if i < fresh else self.full(v) for i, v in enumerate(results)]
        self._merge_sums(outputs)
        needed = set(outputs)
        body: list[str] = []
        for statement in reversed(self.statements):
            if not needed.intersection(statement.targets):
                continue
            unused = [t for t in statement.targets if t not in needed]
            last = sorted(set(_VARIABLE.findall(statement.code)) - needed)
            needed.update(last)
            if dead_names := [*last, *unused]:
                body.append(f"    del {', '.join(dead_names)}")
            body.append(f"    {', '.join(statement.targets)}{',' * statement.unpack} = {statement.code}")
        lines = [f"def {name}({', '.join(parameters)}):", *(f"    {line}" for line in prelude), *reversed(body)]
        return "\n".join([*lines, f"    return ({''.join(f'{o}, ' for o in outputs)})"])

    def _fresh(self, value: Value) -> str:
        # JAX's results are fresh arrays: an in-place write to a result must never reach an argument or a constant.
        code = self.full(value)
        if value.is_number:
            return self.emit(f"{code}.clone()")[0] if value.shape == () else code
        shared = value.aliases_input or not same_shape(value.held, value.shape)
        return self.emit(f"{code}.clone()")[0] if shared else code
