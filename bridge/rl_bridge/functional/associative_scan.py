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
    fn: Callable[..., Any],
    elems: Any,
    reverse: bool = False,
    axis: int = 0,
    *,
    original: Callable[..., Any],
    scope: Any,
    thread: int,
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


Combine = Callable[..., Sequence[Tensor]]


def restricted(combine: Any, wanted: Sequence[int]) -> tuple[tuple[int, ...], Any]:
    """The left operands that the wanted results depend on, by number, and `combine` for these alone."""
    jaxpr, operands = combine.jaxpr, tuple(wanted)
    count = len(jaxpr.outvars)
    while True:
        needed, equations = {id(jaxpr.outvars[i]) for i in operands}, []
        for eqn in reversed(jaxpr.eqns):
            if needed.intersection(map(id, eqn.outvars)):
                needed.update(map(id, eqn.invars))
                equations.append(eqn)
        grown = tuple(i for i in range(count) if i in operands or id(jaxpr.invars[i]) in needed)
        if grown == operands:
            break
        operands = grown
    invars = [*(jaxpr.invars[i] for i in operands), *jaxpr.invars[count:]]
    body = jaxpr.replace(invars=invars, outvars=[jaxpr.outvars[i] for i in operands], eqns=equations[::-1])
    return operands, jex_core.ClosedJaxpr(body, combine.consts)


def associative_scan(
    combine: Combine,
    elements: Sequence[Tensor],
    axis: int,
    reverse: bool,
    wanted: Sequence[int] | None = None,
    last: Combine | None = None,
) -> list[Tensor]:
    """The inclusive scan by `combine(*left, *right)`, which takes slices of any size along `axis`.

    `last(*wanted of left, *right)` is `combine` for the results that are wanted, where not all are.
    """
    wanted = range(len(elements)) if wanted is None else wanted
    size = elements[0].shape[axis]
    if size < 2:
        return [elements[i] for i in wanted]
    parts = [x.split((size - 1, 1) if reverse else (1, size - 1), axis) for x in elements]
    init = [parts[i][-1 if reverse else 0] for i in wanted]
    rest = [part[0 if reverse else 1] for part in parts]
    results = _from(init, combine, last or combine, rest, axis, reverse)
    return [torch.cat((x, i) if reverse else (i, x), axis) for i, x in zip(init, results, strict=True)]


def _from(
    init: Sequence[Tensor], combine: Combine, last: Combine, elements: Sequence[Tensor], axis: int, reverse: bool
) -> list[Tensor]:
    """The scan that goes on from `init`.

    Every block of BLOCK positions is run through at once; then the blocks' ends, by the same function; then each block
    is combined with what comes before it.
    """
    size = elements[0].shape[axis]
    width = min(size, BLOCK)
    blocks = -(-size // width)
    surplus = blocks * width - size
    if surplus:  # behind the last element in the order of the scan, where nothing reads it
        elements = [_padded(x, axis, surplus, reverse) for x in elements]
    columns = [x.unflatten(axis, (blocks, width)).unbind(axis + 1) for x in elements]
    places = list(zip(*columns, strict=True))[:: -1 if reverse else 1]
    results: list[Sequence[Tensor]] = []
    if blocks == 1:
        for place in places:
            results.append(last(*(results[-1] if results else init), *place))
    else:
        states: list[Sequence[Tensor]] = [places[0]]
        for place in places[1:]:
            states.append(combine(*states[-1], *place))
        ends = _from(init, combine, last, states[-1], axis, reverse)
        before = [
            torch.cat((x.narrow(axis, 1, blocks - 1), i) if reverse else (i, x.narrow(axis, 0, blocks - 1)), axis)
            for i, x in zip(init, ends, strict=True)
        ]
        results = [last(*before, *state) for state in states]
    if reverse:
        results.reverse()
    joined = [torch.stack(column, axis + 1).flatten(axis, axis + 1) for column in zip(*results, strict=True)]
    return [x.narrow(axis, surplus if reverse else 0, size) for x in joined] if surplus else joined


def _padded(x: Tensor, axis: int, count: int, front: bool) -> Tensor:
    zeros = x.new_zeros([count if i == axis else n for i, n in enumerate(x.shape)])
    return torch.cat((zeros, x) if front else (x, zeros), axis)
