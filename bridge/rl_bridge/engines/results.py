"""How the results of several workers become one: declared by the method, never guessed from types."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch.distributed.tensor import DTensor

from rl_bridge.engines.optimizers import optimizers_of
from rl_fn import Ratio

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
    """What a method declares, or None."""
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
