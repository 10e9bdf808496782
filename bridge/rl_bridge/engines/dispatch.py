"""Arguments cut over an engine's workers, and the workers' results put together in the caller's order."""

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from rl_bridge.engines.module import optimizers_of
from rl_bridge.parallel.mesh import Mesh
from rl_fn import Ratio
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
    """The key of a rank's arguments: its rows, and its columns where these are cut."""
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
    batch = next((value for value in data if isinstance(value, Rows)), None)
    if batch is None or rows == 0:
        cuts = [rows * i // parts for i in range(parts + 1)]
        return [np.arange(start, stop) for start, stop in pairwise(cuts)]
    if isinstance(batch, Grouped):
        units = batch.row_units()
        whole = balance([max(1, unit.tokens) for unit in units], parts)
        loads = [sum(units[i].tokens for i in share) for share in whole]
        if max(loads) * parts <= (1 + GROUPS_BALANCE) * sum(loads):
            nothing = np.arange(0)  # a share may be empty
            return [np.sort(np.concatenate([nothing, *(units[i].rows for i in share)])) for share in whole]
    # A row without a token still costs its place.
    return [np.sort(share) for share in balance([max(1, n) for n in batch.row_tokens()], parts)]


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


# How the results of several workers become one: declared by the method, never guessed from types.

Join = Literal["rows", "sum", "same", "local"]
JOINS: tuple[Join, ...] = ("rows", "sum", "same", "local")
_Method = TypeVar("_Method", bound=Callable[..., Any])


def returns(how: Join) -> Callable[[_Method], _Method]:
    """Declare how the results of a module's method join over the workers of an engine.

    ``rows``: one entry a row of the ``NeedParallel`` arguments, put back into their order. ``sum``: added, in
    dictionaries, tuples and ``Ratio`` entry by entry. ``same``: equal on all workers, and checked to be. ``local``: the
    list of all workers' results.

    >>> class Counter:
    ...     @returns("sum")
    ...     def count(self, rows): return len(rows)
    >>> declared(Counter.count)
    'sum'
    """
    if how not in JOINS:
        raise ValueError(f"results join by one of {', '.join(JOINS)}, got {how!r}")

    def declare(method: _Method) -> _Method:
        method.__rl_returns__ = how  # type: ignore[attr-defined]
        return method

    return declare


def declared(method: Any) -> Join | None:
    """A method's declaration of its results, or None."""
    return getattr(method, "__rl_returns__", None)


def join(results: Sequence[Any], how: Join | None, what: str) -> Any:
    """One result of the workers' results (``rows``: still in the order of the shares).

    Raises:
        ValueError: results that are not the same although declared so, or a method that declares nothing.
    """
    if how == "local":
        return list(results)
    if len(results) == 1:
        return results[0]
    if how == "sum":
        return add(results, what)
    if how == "rows":
        return concatenate(results, what)
    if how == "same" or all(result is None for result in results):
        if not all(_equal(result, results[0]) for result in results[1:]):
            raise ValueError(f"{what} is declared the same on all workers, and is not: {list(results)}")
        return results[0]
    raise ValueError(
        f"{what} ran on {len(results)} workers and does not say how their results join: "
        f"declare it with @returns(...), one of {', '.join(JOINS)}"
    )


def add(results: Sequence[Any], what: str) -> Any:
    """Σ of numbers, tensors and ``Ratio``; dictionaries and tuples entry by entry."""
    first = results[0]
    if isinstance(first, dict):
        if any(result.keys() != first.keys() for result in results):
            raise ValueError(f"{what}: workers return other keys: {[sorted(result) for result in results]}")
        return {key: add([result[key] for result in results], what) for key in first}
    if isinstance(first, Ratio) or hasattr(first, "_fields"):
        return type(first)(*(add(values, what) for values in zip(*results, strict=True)))
    if isinstance(first, tuple | list):
        return type(first)(add(values, what) for values in zip(*results, strict=True))
    if first is None or isinstance(first, str):
        raise ValueError(f"{what} is declared a sum, and returns {first!r}")
    total = results[0]
    for result in results[1:]:
        total = total + result
    return total


def concatenate(results: Sequence[Any], what: str) -> Any:
    """Rows of tensors (padded with zeros to one width where they differ), lists and tuples of both, joined."""
    first = results[0]
    if isinstance(first, torch.Tensor):
        if first.dim() == 0:
            raise ValueError(f"{what} is declared rows, and returns a number")
        width = max(result.shape[1] for result in results) if first.dim() > 1 else 0
        return torch.cat([_widened(result, width) for result in results])
    if isinstance(first, dict):
        return {key: concatenate([result[key] for result in results], what) for key in first}
    if hasattr(first, "_fields"):
        fields = (None if values[0] is None else concatenate(values, what) for values in zip(*results, strict=True))
        return type(first)(*fields)
    if isinstance(first, list):
        return [item for result in results for item in result]
    if isinstance(first, tuple):
        return tuple(concatenate(values, what) for values in zip(*results, strict=True))
    raise ValueError(f"{what} is declared rows, and returns {type(first).__name__}")


class Itself(NamedTuple):
    """A method's result that is the worker's module: what ``eval()`` and ``requires_grad_()`` give."""


def handed_out(result: Any, module: torch.nn.Module, what: str) -> Any:
    """A method's result as the driver gets it: tensors that lie in the module's memory as copies.

    So a result that is a weight stays as it was when the next step changes the weight, wherever the worker is.

    Raises:
        TypeError: a module other than ``module`` itself, a DTensor, or an iterator in the result.
    """
    if result is None or type(result) in (bool, int, float, str):
        return result
    if result is module:
        return Itself()
    memory: set[int] = set()
    copies: dict[Any, torch.Tensor] = {}  # a weight that has two names is one tensor in the result, too

    def out(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if isinstance(value, DTensor):
                raise TypeError(
                    f"{what} returns a DTensor, whose parts are in several workers: return its full_tensor()"
                )
            if not memory:
                memory.update(_storage(tensor) for tensor in _tensors_of(module))
            if (lies_in := _storage(value)) in memory:
                place = lies_in, value.dtype, value.storage_offset(), value.shape, value.stride()
                return copies[place] if place in copies else copies.setdefault(place, value.detach().clone())
            return value if value.grad_fn is None else value.detach()
        if isinstance(value, torch.nn.Module | Iterator):
            raise TypeError(f"{what} returns {type(value).__name__}, which stays in its worker: return values")
        if isinstance(value, dict):
            changed = {key: new for key, entry in value.items() if (new := out(entry)) is not entry}
            if not changed:
                return value
            handed = copy.copy(value)
            handed.update(changed)
            return handed
        if isinstance(value, list | tuple):
            entries = [out(entry) for entry in value]
            if all(new is old for new, old in zip(entries, value, strict=True)):
                return value
            return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
        return value

    return out(result)


def _tensors_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, their gradients, buffers, and what the optimisers keep."""
    for parameter in module.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from module.buffers()
    for optimizer in optimizers_of(module).values():
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _storage(tensor: torch.Tensor) -> int:
    """The memory that a tensor lies in, as a number; a DTensor's is that of its part here."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()._cdata


def _widened(tensor: torch.Tensor, width: int) -> torch.Tensor:
    if tensor.dim() < 2 or tensor.shape[1] == width:
        return tensor
    wide = tensor.new_zeros((tensor.shape[0], width, *tensor.shape[2:]))
    wide[:, : tensor.shape[1]] = tensor
    return wide


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    # Not-a-number is the same on all workers if all have it.
    return bool(a == b) or (a != a and b != b)


# Results of shares put together in the order of the caller's rows.


def in_order(results: Sequence[Any], how: Join | None, parts: Split, layout: Mesh, what: str) -> Any:
    """One result of the workers' results, rows in the order of the rows that were split.

    ``results`` are those of one rank of each share of rows, or of tokens where the columns were cut.

    Raises:
        ValueError: results that do not join as declared, or whose rows are not one for each row of the share.
    """
    nothing = all(result is None for result in results)
    if parts.over_sequence and how in ("rows", None) and not nothing:
        starts = range(0, len(results), layout.sequence)
        results = [_columns(results[start : start + layout.sequence], what) for start in starts]
    joined = join(results, how, what)
    if how != "rows" or parts.shares is None:
        return joined
    order = np.concatenate(parts.shares)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return _arranged(joined, place, what)


def _columns(results: Sequence[Any], what: str) -> Any:
    if not all(isinstance(result, torch.Tensor) and result.dim() > 1 for result in results):
        raise ValueError(f"{what} was split over the sequence: its rows are tensors of at least two axes")
    return joined_columns(results)


def _arranged(joined: Any, place: np.ndarray, what: str) -> Any:
    if isinstance(joined, dict):
        return {key: _arranged(value, place, what) for key, value in joined.items()}
    if isinstance(joined, tuple) and not hasattr(joined, "_fields"):
        return tuple(_arranged(value, place, what) for value in joined)
    if isinstance(joined, tuple):
        fields: Any = (None if value is None else _arranged(value, place, what) for value in joined)
        return type(joined)(*fields)
    if len(joined) != len(place):
        raise ValueError(f"{what} is declared rows: {len(place)} rows went in and {len(joined)} came out")
    return take(joined, place)
