"""gather, scatter and dynamic slices."""

from typing import Any

import numpy as np

from rl_bridge.functional import gather as torch_gather
from rl_bridge.functional.emitter import Builder, Value, rule


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
    if kind == "set" and eqn.params["update_jaxpr"] is not None and len(_body(eqn.params["update_jaxpr"]).eqns):
        raise NotImplementedError("from_jax does not lower scatter with a function of its own (x.at[...].apply)")
    call = f"{b.bind('scatter', torch_gather.scatter)}({b.full(x)}, {b.full(indices)}, {b.full(updates)}, "
    return b.out(f"{call}{b.bind('how', how)}, {kind!r}, {bool(eqn.params['unique_indices'])})", eqn)


def _body(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


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
