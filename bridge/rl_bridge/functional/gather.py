"""XLA's gather, scatter and dynamic slices as torch indexing; the common forms go to torch's own operations."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Indexing:
    """Dimension numbers of a gather or a scatter, in the gather's words.

    `window`: dimensions of the result (the updates) that run inside a slice; `collapsed`: dimensions of the operand
    with none; `indexed`: dimension of the operand that each index component moves; `batch`: pairs (operand, indices).
    """

    window: tuple[int, ...]
    collapsed: tuple[int, ...]
    indexed: tuple[int, ...]
    batch: tuple[tuple[int, int], ...]
    mode: str  # "fill", "clip" or "promise"

    def outer(self, rank: int) -> list[int]:
        """Dimensions of a result of this rank that run over slices."""
        return [d for d in range(rank) if d not in self.window]

    def inner(self, rank: int) -> list[int]:
        """Dimensions of an operand of this rank that run inside a slice."""
        return [d for d in range(rank) if d not in self.collapsed and d not in [o for o, _ in self.batch]]


def _starts(shape: Sequence[int], sizes: Sequence[int], indices: Tensor, how: Indexing) -> tuple[list[Tensor], Any]:
    """The index components, brought in range, and where all of them were in range (None: everywhere)."""
    parts = list(indices.long().unbind(-1))
    if how.mode == "promise":
        return parts, None
    limits = [shape[dim] - sizes[dim] for dim in how.indexed]
    inside = [part.clamp(0, limit) for part, limit in zip(parts, limits, strict=True)]
    if how.mode == "clip":
        return inside, None
    valid: Any = None
    for part, clipped in zip(parts, inside, strict=True):
        valid = part == clipped if valid is None else valid & (part == clipped)
    return inside, valid


def _positions(
    shape: Sequence[int], sizes: Sequence[int], starts: Sequence[Tensor], how: Indexing, rank: int, device: torch.device
) -> list[Tensor]:
    """For each dimension of the operand, its index for every entry of the result."""
    outer, inner = how.outer(rank), how.inner(len(shape))
    positions: list[Tensor] = []
    for dim in range(len(shape)):
        terms: list[Tensor] = []
        if dim in how.indexed:
            terms.append(_along(outer, starts[how.indexed.index(dim)], rank))
        for operand_dim, indices_dim in how.batch:
            if operand_dim == dim:
                terms.append(_along([outer[indices_dim]], torch.arange(shape[dim], device=device), rank))
        if dim in inner and sizes[dim] != 1:
            terms.append(_along([how.window[inner.index(dim)]], torch.arange(sizes[dim], device=device), rank))
        zero = torch.zeros((1,) * rank, dtype=torch.long, device=device)
        positions.append(sum(terms[1:], terms[0]) if terms else zero)
    return positions


def _along(dims: Sequence[int], x: Tensor, rank: int) -> Tensor:
    """The tensor with its dimensions at these places of `rank`, and 1 elsewhere."""
    view = [1] * rank
    for dim, size in zip(dims, x.shape, strict=True):
        view[dim] = size
    return x.reshape(view)


def gather(operand: Tensor, indices: Tensor, how: Indexing, sizes: tuple[int, ...], fill: Any) -> Tensor:
    """lax.gather."""
    shape, rank = operand.shape, indices.dim() - 1 + len(how.window)
    starts, valid = _starts(shape, sizes, indices, how)
    others = [d for d in range(len(shape)) if d not in how.indexed]
    if (
        len(how.indexed) == 1
        and not how.window
        and rank == len(shape)
        and how.batch == tuple((d, d) for d in others)
        and 0 not in indices.shape
    ):  # take_along_axis
        result = torch.gather(operand, how.indexed[0], starts[0])
    elif (
        len(how.indexed) == 1
        and how.collapsed == how.indexed
        and not how.batch
        and all(sizes[d] == shape[d] for d in others)
    ):  # take
        (axis,) = how.indexed
        flat = operand.index_select(axis, starts[0].reshape(-1))
        result = flat.reshape(*shape[:axis], *starts[0].shape, *shape[axis + 1 :])
        outer = iter(range(axis, axis + starts[0].dim()))
        inner = iter([d if d < axis else d + starts[0].dim() - 1 for d in others])
        result = result.permute([next(inner) if d in how.window else next(outer) for d in range(rank)])
    else:
        positions = _positions(shape, sizes, starts, how, rank, operand.device)
        full = [0] * rank
        for place, dim in zip(how.window, how.inner(len(shape)), strict=True):
            full[place] = sizes[dim]
        for place, size in zip(how.outer(rank), indices.shape[:-1], strict=True):
            full[place] = size
        result = operand[tuple(p.expand(full) for p in positions)] if positions else operand.expand(full)
    if valid is None:
        return result
    empty = torch.full((), fill, dtype=result.dtype, device=result.device)
    return torch.where(_along(how.outer(rank), valid, rank), result, empty)


def slice_at(operand: Tensor, start: int, count: int, how: Indexing, sizes: tuple[int, ...], fill: Any) -> Tensor:
    """lax.gather of one slice whose `count` index components are all the number `start`: a view, if it is in range."""
    starts = [start if dim in how.indexed else 0 for dim in range(operand.dim())]
    if not all(0 <= at <= n - size for at, n, size in zip(starts, operand.shape, sizes, strict=True)):
        indices = torch.full((count,), start, dtype=torch.long, device=operand.device)
        return gather(operand, indices, how, sizes, fill)
    for dim, (at, size) in enumerate(zip(starts, sizes, strict=True)):
        operand = operand.narrow(dim, at, size) if size != operand.shape[dim] else operand
    return operand.squeeze(how.collapsed) if how.collapsed else operand


_REDUCE = {"mul": "prod", "min": "amin", "max": "amax"}


def scatter(operand: Tensor, indices: Tensor, updates: Tensor, how: Indexing, kind: str, unique: bool) -> Tensor:
    """lax.scatter and its reducing forms; an update out of range goes to a spare entry behind the operand.

    `unique`: no entry is written twice. JAX has a gradient of scatter-mul for such indices alone.
    """
    shape = operand.shape
    sizes = [1] * len(shape)
    for place, dim in zip(how.window, how.inner(len(shape)), strict=True):
        sizes[dim] = updates.shape[place]
    starts, valid = _starts(shape, sizes, indices, how)
    positions = _positions(shape, sizes, starts, how, updates.dim(), operand.device)
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    linear = torch.zeros((1,) * updates.dim(), dtype=torch.long, device=operand.device)
    for position, stride in zip(positions, strides, strict=True):
        linear = linear + position * stride
    if valid is not None:
        inside = _along(how.outer(updates.dim()), valid, updates.dim())
        linear = torch.where(inside, linear, operand.numel())
    linear = linear.expand(updates.shape).reshape(-1)
    values = updates.reshape(-1)
    flat = torch.cat([operand.reshape(-1), operand.new_zeros(1)])
    if kind == "mul" and unique:  # torch's gradient of a product divides by the update, which may be 0 or infinite
        flat = flat * torch.ones_like(flat).index_put((linear,), values)
    elif kind in _REDUCE:
        flat = flat.scatter_reduce(0, linear, values, _REDUCE[kind])
    else:
        values = -values if kind == "sub" else values
        flat = flat.index_put((linear,), values, accumulate=kind in ("add", "sub"))
    return flat[: operand.numel()].reshape(shape)


def dynamic_slice(x: Tensor, starts: Sequence[int | Tensor], sizes: Sequence[int]) -> Tensor:
    """lax.dynamic_slice; a start on the device stays there."""
    for axis, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        limit = x.shape[axis] - size
        if limit == 0:
            continue
        if isinstance(start, Tensor):
            x = x.index_select(axis, start.long().clamp(0, limit) + torch.arange(size, device=x.device))
        else:
            x = x.narrow(axis, min(max(start, 0), limit), size)
    return x


def dynamic_update_slice(x: Tensor, update: Tensor, starts: Sequence[int | Tensor]) -> Tensor:
    """lax.dynamic_update_slice."""
    if x.dim() == 0:
        return update
    index = []
    for axis, start in enumerate(starts):
        size, rank = update.shape[axis], x.dim()
        limit = x.shape[axis] - size
        first = start.long().clamp(0, limit) if isinstance(start, Tensor) else min(max(start, 0), limit)
        index.append((first + torch.arange(size, device=x.device)).reshape((-1, *(1,) * (rank - axis - 1))))
    return x.index_put(tuple(index), update)
