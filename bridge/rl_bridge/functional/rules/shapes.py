"""Primitives that move values: shapes, whose broadcasts stay lazy; gather, scatter and dynamic slices."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_bridge.functional import gather as torch_gather
from rl_bridge.functional.crossing import torch_dtype
from rl_bridge.functional.emitter import Builder, Value, rule, same_shape, shape_of

# Shape primitives. Broadcasts stay lazy; the rest are torch views where torch has one.


@rule("broadcast_in_dim")
def _broadcast_in_dim(b: Builder, eqn: Any, x: Value, *_: Value) -> Value:
    shape = shape_of(eqn)
    if x.is_number:
        return dataclasses.replace(x, shape=shape)
    # Dimension i of x goes to position `to[i]`; what x lacks on the left (it may hold fewer) broadcasts by itself.
    to = eqn.params["broadcast_dimensions"][len(x.shape) - len(x.held) :]
    code, dims, rank = x.code, list(x.held), len(shape)
    offset = to[0] if to else rank
    for position in range(offset, rank):
        if position not in to:
            code = b.emit(f"{code}.unsqueeze({position - offset})")[0]
            dims.insert(position - offset, 1)
    return Value(code, shape, x.dtype, tuple(dims), aliases_input=x.aliases_input)


@rule("reshape")
def _reshape(b: Builder, eqn: Any, x: Value, *_: Value) -> Value:
    shape = shape_of(eqn)
    if x.is_number:
        return dataclasses.replace(x, shape=shape)
    if same_shape(shape, x.shape):
        return x
    if eqn.params.get("dimensions") is not None:
        raise NotImplementedError("from_jax does not lower reshape with `dimensions`; transpose first")
    return b.out(f"{b.full(x)}.reshape({b.shape(shape)})", eqn, alias=x.aliases_input)


@rule("squeeze")
def _squeeze(b: Builder, eqn: Any, x: Value) -> Value:
    shape = shape_of(eqn)
    if x.is_number:
        return dataclasses.replace(x, shape=shape)
    missing = len(x.shape) - len(x.held)
    drop = sorted((d - missing for d in eqn.params["dimensions"] if d >= missing), reverse=True)
    code, dims = x.code, list(x.held)
    for axis in drop:
        code = b.emit(f"{code}.squeeze({axis})")[0]
        del dims[axis]
    return Value(code, shape, x.dtype, tuple(dims), aliases_input=x.aliases_input)


@rule("transpose")
def _transpose(b: Builder, eqn: Any, x: Value) -> Value:
    permutation = tuple(eqn.params["permutation"])
    if x.is_number:
        return dataclasses.replace(x, shape=shape_of(eqn))
    if permutation == tuple(range(len(permutation))):
        return x
    return b.out(f"{b.full(x)}.permute({permutation})", eqn, alias=x.aliases_input)


@rule("slice")
def _slice(b: Builder, eqn: Any, x: Value) -> Value:
    if x.is_number:
        return dataclasses.replace(x, shape=shape_of(eqn))
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * len(starts)
    code = b.full(x)
    for axis, (start, limit, stride, size) in enumerate(zip(starts, limits, strides, x.shape, strict=True)):
        if start == 0 and limit == size and stride == 1:
            continue
        index = f"{b.dim(start)}:{b.dim(limit)}" + (f":{stride}" if stride != 1 else "")
        code = b.emit(f"{code}[{':, ' * axis}{index}]")[0]
    return Value(code, shape_of(eqn), x.dtype, shape_of(eqn), aliases_input=x.aliases_input)


@rule("rev")
def _rev(b: Builder, eqn: Any, x: Value) -> Value:
    return x if x.is_number else b.out(f"torch.flip({b.full(x)}, {tuple(eqn.params['dimensions'])})", eqn)


@rule("concatenate")
def _concatenate(b: Builder, eqn: Any, *xs: Value) -> Value:
    return b.out(f"torch.cat(({''.join(f'{b.full(x)}, ' for x in xs)}), {eqn.params['dimension']})", eqn)


@rule("stack")
def _stack(b: Builder, eqn: Any, *xs: Value) -> Value:
    return b.out(f"torch.stack(({''.join(f'{b.full(x)}, ' for x in xs)}), {eqn.params['axis']})", eqn)


@rule("unstack")
def _unstack(b: Builder, eqn: Any, x: Value) -> list[Value]:
    return b.outs(f"torch.unbind({b.full(x)}, {eqn.params['axis']})", eqn, alias=x.aliases_input)


@rule("tile")
def _tile(b: Builder, eqn: Any, x: Value) -> Value:
    return b.out(f"torch.tile({b.full(x)}, {b.shape(eqn.params['reps'])})", eqn, alias=x.aliases_input)


@rule("split")
def _split(b: Builder, eqn: Any, x: Value) -> list[Value]:
    code = f"torch.split({b.full(x)}, {b.shape(eqn.params['sizes'])}, {eqn.params['axis']})"
    return b.outs(code, eqn, alias=x.aliases_input)


@rule("iota")
def _iota(b: Builder, eqn: Any, *_: Value) -> Value:
    aval, axis = eqn.outvars[0].aval, eqn.params["dimension"]
    shape, dtype = tuple(aval.shape), np.dtype(aval.dtype)
    code = b.emit(f"torch.arange({b.dim(shape[axis])}, dtype={torch_dtype(dtype)}, device=device)")[0]
    behind = len(shape) - axis - 1
    if behind:
        code = b.emit(f"{code}.reshape({(-1, *(1,) * behind)})")[0]
    return Value(code, shape, dtype, (shape[axis], *(1,) * behind))


@rule("dim_as_value")
def _dim_as_value(b: Builder, eqn: Any) -> Value:
    aval = eqn.outvars[0].aval
    return Value(b.dim(eqn.params["dim"]), (), np.dtype(aval.dtype), (), is_number=True)


@rule("pad")
def _pad(b: Builder, eqn: Any, x: Value, fill: Value) -> Value:
    config: Sequence[tuple[Any, Any, int]] = eqn.params["padding_config"]
    text = "(" + "".join(f"({b.dim(low)}, {b.dim(high)}, {inner}), " for low, high, inner in config) + ")"
    return b.out(f"rt.pad({b.full(x)}, {text}, {fill.code})", eqn)


# gather, scatter and dynamic slices.


def _mode(mode: Any) -> str:
    name = str(getattr(mode, "name", mode)).upper()
    return "fill" if "FILL" in name else "clip" if "CLIP" in name else "promise"


def _fill(value: Any) -> str:
    """The value of a read out of bounds. JAX leaves it open in the modes other than "fill", where nothing reads it."""
    return "None" if value is None else f"({np.asarray(value).item()!r})"


@rule("gather")
def _gather(b: Builder, eqn: Any, x: Value, indices: Value) -> Value:
    p = eqn.params
    d = p["dimension_numbers"]
    how = torch_gather.Indexing(
        tuple(d.offset_dims),
        tuple(d.collapsed_slice_dims),
        tuple(d.start_index_map),
        tuple(zip(d.operand_batching_dims, d.start_indices_batching_dims, strict=True)),
        _mode(p["mode"]),
    )
    rest = f"{b.bind('how', how)}, {b.shape(p['slice_sizes'])}, {_fill(p['fill_value'])}"
    if indices.is_number and len(indices.shape) == 1:  # x[..., 1:] of a symbolic size is a gather at a known place
        call = f"{b.bind('slice', torch_gather.slice_at)}({b.full(x)}, {indices.code}, {indices.shape[0]}"
        return b.out(f"{call}, {rest})", eqn, alias=x.aliases_input)
    return b.out(f"{b.bind('gather', torch_gather.gather)}({b.full(x)}, {b.full(indices)}, {rest})", eqn)


@rule("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
def _scatter(b: Builder, eqn: Any, x: Value, indices: Value, updates: Value) -> Value:
    d = eqn.params["dimension_numbers"]
    how = torch_gather.Indexing(
        tuple(d.update_window_dims),
        tuple(d.inserted_window_dims),
        tuple(d.scatter_dims_to_operand_dims),
        tuple(zip(d.operand_batching_dims, d.scatter_indices_batching_dims, strict=True)),
        _mode(eqn.params["mode"]),
    )
    kind = eqn.primitive.name.removeprefix("scatter").lstrip("-") or "set"
    apply = eqn.params["update_jaxpr"]
    if kind == "set" and apply is not None and len(getattr(apply, "jaxpr", apply).eqns):
        raise NotImplementedError("from_jax does not lower scatter with a function of its own (x.at[...].apply)")
    call = f"{b.bind('scatter', torch_gather.scatter)}({b.full(x)}, {b.full(indices)}, {b.full(updates)}, "
    return b.out(f"{call}{b.bind('how', how)}, {kind!r}, {bool(eqn.params['unique_indices'])})", eqn)


@rule("dynamic_slice")
def _dynamic_slice(b: Builder, eqn: Any, x: Value, *starts: Value) -> Value:
    codes = "".join(f"{s.code}, " for s in starts)
    function = b.bind("slice", torch_gather.dynamic_slice)
    return b.out(
        f"{function}({b.full(x)}, ({codes}), {b.shape(eqn.params['slice_sizes'])})", eqn, alias=x.aliases_input
    )


@rule("dynamic_update_slice")
def _dynamic_update_slice(b: Builder, eqn: Any, x: Value, update: Value, *starts: Value) -> Value:
    codes = "".join(f"{s.code}, " for s in starts)
    function = b.bind("update", torch_gather.dynamic_update_slice)
    return b.out(f"{function}({b.full(x)}, {b.full(update)}, ({codes}))", eqn, alias=update.aliases_input)
