"""Cutting arguments over the workers of an engine: rows by tokens, columns for sequence parallelism."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from rl_bridge.engines.mesh import Mesh
from rl_fn.packing import balance

# The heaviest share may have so many more tokens than the mean where groups stay whole; else rows are balanced alone.
GROUPS_BALANCE = 0.02


@runtime_checkable
class Rows(Protocol):
    """A batch that knows its rows: how many tokens each has, and how to choose some of them."""

    def row_tokens(self) -> Sequence[int]: ...
    def rows(self, index: Any) -> Any: ...


@runtime_checkable
class Unit(Protocol):
    """Rows that cost fewer tokens together than apart."""

    rows: np.ndarray
    tokens: int


@runtime_checkable
class Grouped(Protocol):
    """A batch that knows, besides, which of its rows should go together: every row is in one unit."""

    def row_units(self) -> Sequence[Unit]: ...


class NeedParallel(NamedTuple):
    """An argument that is split over the workers.

    ``over="data"``: each share of rows goes to the workers of one data-parallel position. Rows of a batch that knows
    their tokens are balanced by tokens, with groups whole where the heaviest share then has at most 2 % more than the
    mean; others are cut into runs of equal length. There may be fewer rows than shares.
    ``over="sequence"``: besides, the columns of each tensor are cut zigzag over the sequence ranks.

    It is an argument, or an entry of the dictionaries, lists and tuples that an argument consists of.
    """

    data: Any
    over: Literal["data", "sequence"] = "data"


class Split(NamedTuple):
    """Arguments of each rank, and the rows of each share, for putting results back in order."""

    arguments: list[tuple[tuple, dict]]
    shares: list[np.ndarray] | None
    over_sequence: bool


def split(args: tuple, kwargs: dict, layout: Mesh) -> Split:
    """The arguments of every rank: ``NeedParallel`` ones are cut, all others go to everyone.

    Ranks with the same rows get one object, which an executor encodes once.

    Raises:
        ValueError: ``NeedParallel`` arguments with different numbers of rows, or columns that cannot be cut.
        TypeError: an argument that has no rows.
    """
    parallel = list(_marked((args, kwargs)))
    if not parallel:
        return Split([(args, kwargs)] * layout.size, None, False)
    counts = {row_count(value.data) for value in parallel}
    if len(counts) > 1:
        raise ValueError(f"NeedParallel arguments of one call have the same number of rows, got {sorted(counts)}")
    shares = shares_of([value.data for value in parallel], counts.pop(), layout.data_parts)

    over_sequence = layout.sequence > 1 and any(value.over == "sequence" for value in parallel)

    def of_rank(value: NeedParallel, rank: int) -> Any:
        rows = value.data if layout.data_parts == 1 else take(value.data, shares[layout.data_rank(rank)])
        return columns(rows, layout, rank) if value.over == "sequence" else rows

    parts: dict[tuple[int, int], tuple[tuple, dict]] = {}
    for rank in range(layout.size):
        if (part := _part(rank, layout, over_sequence)) not in parts:
            parts[part] = _with_rows((args, kwargs), lambda value, rank=rank: of_rank(value, rank))
    arguments = [parts[_part(rank, layout, over_sequence)] for rank in range(layout.size)]
    return Split(arguments, shares if layout.data_parts > 1 else None, over_sequence)


def _part(rank: int, layout: Mesh, over_sequence: bool) -> tuple[int, int]:
    """What decides about a rank's arguments: its rows, and its columns where these are cut."""
    return layout.data_rank(rank), layout.place(rank).sequence if over_sequence else 0


def _marked(value: Any) -> Iterator[NeedParallel]:
    """Every ``NeedParallel`` in an argument."""
    if isinstance(value, NeedParallel):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _marked(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            if isinstance(entry, dict | list | tuple):
                yield from _marked(entry)


def _with_rows(value: Any, rows_of: Callable[[NeedParallel], Any]) -> Any:
    """An argument with ``rows_of`` in the place of every ``NeedParallel``; without one it is the same object."""
    if isinstance(value, NeedParallel):
        return rows_of(value)
    if next(_marked(value), None) is None:
        return value
    if isinstance(value, dict):
        return {key: _with_rows(entry, rows_of) for key, entry in value.items()}
    entries = [_with_rows(entry, rows_of) for entry in value]
    return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)


def shares_of(data: Sequence[Any], rows: int, parts: int) -> list[np.ndarray]:
    """Row numbers of each share, ascending: balanced by the tokens of the first batch that knows them."""
    if parts == 1:
        return [np.arange(rows)]
    known = next((value for value in data if isinstance(value, Rows)), None)
    if known is None or rows == 0:
        cuts = [rows * i // parts for i in range(parts + 1)]
        return [np.arange(start, stop) for start, stop in pairwise(cuts)]
    if isinstance(known, Grouped):
        units = known.row_units()
        whole = balance([max(1, unit.tokens) for unit in units], parts)
        loads = [sum(units[i].tokens for i in share) for share in whole]
        if max(loads) * parts <= (1 + GROUPS_BALANCE) * sum(loads):
            return [np.sort(np.concatenate([units[i].rows for i in share])) for share in whole]
    # A row without a token still costs its place.
    return [np.sort(share) for share in balance([max(1, n) for n in known.row_tokens()], parts)]


def row_count(data: Any) -> int:
    """Number of rows of a tensor, a batch, a named tuple of these or a sequence."""
    if isinstance(data, Rows):
        return len(data.row_tokens())
    if isinstance(data, torch.Tensor) and data.dim():
        return data.shape[0]
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return next(row_count(value) for value in data if value is not None)
    if isinstance(data, list | tuple):
        return len(data)
    raise TypeError(f"NeedParallel takes a tensor, a NamedTuple of tensors or a sequence, got {type(data).__name__}")


def take(data: Any, index: np.ndarray) -> Any:
    """The chosen rows."""
    if isinstance(data, Rows):
        return data.rows(torch.from_numpy(index))
    if isinstance(data, torch.Tensor):
        return data[torch.from_numpy(index).to(data.device)]
    if hasattr(data, "_fields"):
        return type(data)(*(None if value is None else take(value, index) for value in data))
    return [data[i] for i in index]


def columns(data: Any, layout: Mesh, rank: int) -> Any:
    """The chunks of columns that the rank's place in the sequence axis holds (zigzag: one early, one late)."""
    if layout.sequence == 1:
        return data
    if not isinstance(data, torch.Tensor) or data.dim() < 2:
        raise TypeError(f'over="sequence" takes tensors of at least two axes, got {type(data).__name__}')
    width, pieces = data.shape[1], 2 * layout.sequence
    if width % pieces:
        raise ValueError(f"{width} columns cannot be cut over {layout.sequence} sequence ranks: pad to {pieces}·n")
    chunks, place = data.chunk(pieces, 1), layout.place(rank).sequence
    return torch.cat([chunks[place], chunks[pieces - 1 - place]], 1)


def joined_columns(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Undo ``columns``: one tensor of the tensors of all sequence ranks."""
    halves = [part.chunk(2, 1) for part in parts]
    return torch.cat([*(half[0] for half in halves), *(half[1] for half in reversed(halves))], 1)
