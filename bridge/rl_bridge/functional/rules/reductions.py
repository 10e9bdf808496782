"""Reductions, cumulative operations, sorting and contraction."""

import string
from typing import Any

import numpy as np

from rl_bridge.functional.contraction import contract
from rl_bridge.functional.dtypes import is_float, torch_dtype
from rl_bridge.functional.emitter import Builder, Value, rule, shape_of


@rule("reduce_sum")
def _sum(b: Builder, eqn: Any, x: Value) -> Value:
    axes = tuple(eqn.params["axes"])
    if not axes:
        return x
    shape = shape_of(eqn)
    return Value(b.sum(b.full(x), axes, len(x.shape), torch_dtype(x.dtype)), shape, x.dtype, shape)


@rule("reduce_prod")
def _prod(b: Builder, eqn: Any, x: Value) -> Value:
    axes = tuple(eqn.params["axes"])
    return b.out(f"rt.product({b.full(x)}, {axes})", eqn) if axes else x


@rule("reduce_max", "reduce_min")
def _extremum(b: Builder, eqn: Any, x: Value) -> Value:
    axes, largest = tuple(eqn.params["axes"]), eqn.primitive.name == "reduce_max"
    if not axes:
        return x
    if all(isinstance(x.shape[a], int) and x.shape[a] for a in axes):
        return b.out(f"torch.{'amax' if largest else 'amin'}({b.full(x)}, {axes})", eqn)
    if is_float(x.dtype):
        empty: Any = "-inf" if largest else "inf"
    elif x.dtype == np.bool_:
        empty = not largest
    else:
        empty = np.iinfo(x.dtype).min if largest else np.iinfo(x.dtype).max
    return b.out(f"rt.extremum({b.full(x)}, {axes}, {largest}, {empty})", eqn)


@rule("reduce_and", "reduce_or")
def _logical(b: Builder, eqn: Any, x: Value) -> Value:
    if x.dtype != np.bool_:
        raise NotImplementedError(f"from_jax lowers {eqn.primitive.name} for bool only, got {x.dtype}")
    axes = tuple(eqn.params["axes"])
    return (
        b.out(f"torch.{'all' if eqn.primitive.name == 'reduce_and' else 'any'}({b.full(x)}, {axes})", eqn)
        if axes
        else x
    )


@rule("argmax", "argmin")
def _argument(b: Builder, eqn: Any, x: Value) -> Value:
    (axis,) = eqn.params["axes"]
    dtype = torch_dtype(eqn.params["index_dtype"])
    return b.out(f"rt.argument({b.full(x)}, {axis}, {eqn.primitive.name == 'argmax'}, {dtype})", eqn)


@rule("cumsum", "cumprod", "cumlogsumexp")
def _cumulative(b: Builder, eqn: Any, x: Value) -> Value:
    axis, dtype = eqn.params["axis"], torch_dtype(x.dtype)
    call = {
        "cumsum": f"torch.cumsum({{}}, {axis}, dtype={dtype})",
        "cumprod": f"torch.cumprod({{}}, {axis}, dtype={dtype})",
        "cumlogsumexp": f"torch.logcumsumexp({{}}, {axis})",
    }[eqn.primitive.name]
    operand = b.full(x)
    if not eqn.params["reverse"]:
        return b.out(call.format(operand), eqn)
    flipped = b.emit(f"torch.flip({operand}, ({axis},))")[0]
    return b.out(f"torch.flip({b.emit(call.format(flipped))[0]}, ({axis},))", eqn)


@rule("cummax", "cummin")
def _cumulative_extremum(b: Builder, eqn: Any, x: Value) -> Value:
    axis, largest = eqn.params["axis"], eqn.primitive.name == "cummax"
    return b.out(f"rt.cumulative_extremum({b.full(x)}, {axis}, {largest}, {eqn.params['reverse']})", eqn)


@rule("sort")
def _sort(b: Builder, eqn: Any, *xs: Value) -> list[Value]:
    operands = "".join(f"{b.full(x)}, " for x in xs)
    names = b.emit(f"rt.sort(({operands}), {eqn.params['dimension']}, {eqn.params['num_keys']})", len(xs))
    return [Value(n, x.shape, x.dtype, x.shape) for n, x in zip(names, xs, strict=True)]


@rule("top_k")
def _top_k(b: Builder, eqn: Any, x: Value) -> list[Value]:
    axis = eqn.params.get("axis", len(x.shape) - 1)
    values, indices = (var.aval for var in eqn.outvars)
    code = f"rt.top_k({b.full(x)}, {b.dim(eqn.params['k'])}, {axis}, {torch_dtype(indices.dtype)})"
    names = b.emit(code, 2)
    return [
        Value(n, tuple(a.shape), np.dtype(a.dtype), tuple(a.shape))
        for n, a in zip(names, (values, indices), strict=True)
    ]


@rule("dot_general")
def _dot_general(b: Builder, eqn: Any, x: Value, y: Value) -> Value:
    (contract_x, contract_y), (batch_x, batch_y) = eqn.params["dimension_numbers"]
    letters = iter(string.ascii_letters)
    left, right = [next(letters) for _ in x.shape], [next(letters) for _ in y.shape]
    for i, j in [*zip(contract_x, contract_y, strict=True), *zip(batch_x, batch_y, strict=True)]:
        right[j] = left[i]
    result = [left[i] for i in batch_x]
    result += [c for i, c in enumerate(left) if i not in (*contract_x, *batch_x)]
    result += [c for j, c in enumerate(right) if j not in (*contract_y, *batch_y)]
    dtype = torch_dtype(eqn.outvars[0].aval.dtype)
    operands = [b.full(v) if v.dtype == eqn.outvars[0].aval.dtype else f"{b.full(v)}.to({dtype})" for v in (x, y)]
    letters = tuple("".join(x) for x in (left, right, result))
    return b.out(f"{b.bind('contract', contract)}({letters}, {operands[0]}, {operands[1]})", eqn)
