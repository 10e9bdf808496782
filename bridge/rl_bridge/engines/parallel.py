"""Cutting arguments over workers and putting their results together again, in order."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch

from rl_fn import Ratio


class NeedParallel(NamedTuple):
    """An argument that is to be split over the workers: each gets a contiguous share of its rows.

    ``over="sequence"`` keeps the rows whole and splits the token axis; it needs an executor with ring attention.
    """

    data: Any
    over: Literal["data", "sequence"] = "data"

    def split(self, parts: int) -> list[Any]:
        """``parts`` shares whose sizes differ by at most one row."""
        if parts == 1:
            return [self.data]
        if self.over == "sequence":
            raise NotImplementedError('over="sequence" needs ring attention; use over="data"')
        rows = _rows(self.data)
        if rows < parts:
            raise ValueError(f"{rows} rows cannot be split over {parts} workers")
        cuts = [rows * i // parts for i in range(parts + 1)]
        return [_take(self.data, start, stop) for start, stop in pairwise(cuts)]


def _rows(data: Any) -> int:
    if isinstance(data, torch.Tensor):
        return data.shape[0]
    if hasattr(data, "_fields"):
        return next(_rows(value) for value in data if value is not None)
    if isinstance(data, Sequence) and not isinstance(data, str):
        return len(data)
    raise TypeError(f"NeedParallel takes a tensor, a NamedTuple of tensors or a sequence, got {type(data).__name__}")


def _take(data: Any, start: int, stop: int) -> Any:
    if hasattr(data, "_fields"):
        return type(data)(*(None if value is None else _take(value, start, stop) for value in data))
    return data[start:stop]


def scatter(args: tuple, kwargs: dict, parts: int) -> list[tuple[tuple, dict]]:
    """The arguments of each worker: ``NeedParallel`` ones are split, all others go to everyone."""

    def shares(value: Any) -> list[Any]:
        return value.split(parts) if isinstance(value, NeedParallel) else [value] * parts

    columns = [shares(value) for value in args]
    named = {key: shares(value) for key, value in kwargs.items()}
    return [(tuple(c[i] for c in columns), {k: v[i] for k, v in named.items()}) for i in range(parts)]


def gather(results: Sequence[Any]) -> Any:
    """Workers' results as one: rows and lists are joined, ``Ratio`` sums are added, equal values are one value."""
    first = results[0]
    if len(results) == 1 or all(result is None for result in results):
        return first
    if isinstance(first, Ratio):
        return sum(results)
    if isinstance(first, torch.Tensor) and first.dim():
        return torch.cat(list(results))
    if isinstance(first, dict):
        return {key: gather([result[key] for result in results]) for key in first}
    if hasattr(first, "_fields"):
        return type(first)(*(gather(values) for values in zip(*results, strict=True)))
    if isinstance(first, list):
        return [item for result in results for item in result]
    if all(bool(result == first) for result in results):
        return first
    raise ValueError(f"workers disagree on a result that should be the same on all: {list(results)}")
