"""jax.lax.associative_scan along an axis of symbolic size: one equation of the jaxpr, and how torch runs it.

JAX's own writes out as many steps as the size asks for, so that a new size would be a new program.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import torch
from jax import export
from torch import Tensor

BLOCK = 8
SLICE = "scanned"  # the size of a slice along the axis: as many as the scan likes, so that no number stands for it
associative_scan_p = jex_core.Primitive("associative_scan")
associative_scan_p.multiple_results = True
associative_scan_p.def_abstract_eval(lambda *avals, **_: list(avals))


def bind(
    original: Callable[..., Any],
    scope: Any,
    thread: int,
    fn: Callable[..., Any],
    elems: Any,
    reverse: bool = False,
    axis: int = 0,
    **options: Any,
) -> Any:
    """jax.lax.associative_scan as one equation in `thread`, where the axis' size is a symbol; JAX's own elsewhere."""
    leaves, tree = jax.tree.flatten(elems)
    axis = axis % leaves[0].ndim if leaves else axis
    if threading.get_ident() != thread or not leaves or isinstance(leaves[0].shape[axis], int):
        return original(fn, elems, reverse=reverse, axis=axis, **options)
    (size,) = export.symbolic_shape(SLICE, scope=scope)
    slices = [jax.ShapeDtypeStruct((*x.shape[:axis], size, *x.shape[axis + 1 :]), x.dtype) for x in leaves]

    def combine(*values: Any) -> list[Any]:
        left, right = values[: len(leaves)], values[len(leaves) :]
        return jax.tree.leaves(fn(jax.tree.unflatten(tree, left), jax.tree.unflatten(tree, right)))

    closed = jax.make_jaxpr(combine)(*slices, *slices)
    return jax.tree.unflatten(tree, associative_scan_p.bind(*leaves, combine=closed, axis=axis, reverse=reverse))


def associative_scan(
    combine: Callable[..., Sequence[Tensor]], elements: Sequence[Tensor], axis: int, reverse: bool
) -> list[Tensor]:
    """The inclusive scan by `combine(*left, *right)`, which takes slices of any size along `axis`.

    Every block of BLOCK positions is run through at once; then the blocks' ends, by the same function; then each block
    is combined with what comes before it. Blocks are counted in the order of the scan; the last may be shorter.
    """
    size = elements[0].shape[axis]
    if size == 0:
        return list(elements)

    def first(x: Tensor, count: int) -> Tensor:
        return x.narrow(axis, x.shape[axis] - count if reverse else 0, count)

    def after(x: Tensor, count: int) -> Tensor:
        return x.narrow(axis, 0 if reverse else count, x.shape[axis] - count)

    width = min(size, BLOCK)
    places = [size - 1 - i if reverse else i for i in range(width)]
    columns = [[_every(x, axis, place % width, width) for x in elements] for place in places]
    states = [columns[0]]
    for column in columns[1:]:
        states.append(list(combine(*(first(x, column[0].shape[axis]) for x in states[-1]), *column)))
    blocks = size // width
    joined = []
    for parts in zip(*states, strict=True):
        whole = [first(part, blocks) for part in parts]
        pieces = [torch.stack(whole[::-1] if reverse else whole, axis + 1).flatten(axis, axis + 1)]
        surplus = [after(part, blocks) for part in parts[: size - blocks * width]]
        joined.append(torch.cat([*surplus[::-1], *pieces] if reverse else [*pieces, *surplus], axis))
    if size <= BLOCK:
        return joined
    ends = associative_scan(combine, states[-1], axis, reverse)
    before = [first(_repeated(x, axis, BLOCK), size - BLOCK) for x in ends]
    later = combine(*before, *(after(x, BLOCK) for x in joined))
    pairs = zip(joined, later, strict=True)
    return [torch.cat([b, first(a, BLOCK)] if reverse else [first(a, BLOCK), b], axis) for a, b in pairs]


def _every(x: Tensor, axis: int, start: int, step: int) -> Tensor:
    return x[(slice(None),) * axis + (slice(start, None, step),)]


def _repeated(x: Tensor, axis: int, times: int) -> Tensor:
    """Every entry along the axis, `times` times in a row."""
    shape = list(x.shape)
    shape.insert(axis + 1, times)
    return x.unsqueeze(axis + 1).expand(shape).flatten(axis, axis + 1)
