"""Which first tokens the rows of a group have in common, and which rows then go together."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

# Sharing pays from this part of a group's longest row on: below, the calls of attention cost what the tokens saved.
WORTH = 1 / 8


def shared_prefixes(
    tokens: torch.Tensor, lengths: torch.Tensor, groups: torch.Tensor, *alike: torch.Tensor
) -> torch.Tensor:
    """How many first tokens the rows of a group need to compute only once, [N].

    That is one less than they have in common: the last common token predicts another token in every row. Rows without
    others in their group have 0.

    tokens: [N, L]. lengths, groups: [N]. alike: [N, L, …], what must be equal besides for tokens to be in common.

    >>> import torch
    >>> tokens = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 0], [5, 6, 7, 8]])
    >>> shared_prefixes(tokens, torch.tensor([4, 3, 4]), torch.tensor([1, 1, 2]))
    tensor([1, 1, 0])
    """
    if not len(groups):
        return torch.zeros_like(lengths)
    found = _Groups(groups)
    first = found.least(torch.arange(len(groups), device=groups.device))
    same = torch.arange(tokens.shape[1], device=tokens.device) < torch.minimum(lengths, lengths[first])[:, None]
    for value in (tokens, *alike):
        same &= (value == value[first]).flatten(2).all(-1) if value.dim() > 2 else value == value[first]
    common = found.least(same.int().cumprod(1).sum(1))
    return torch.where(found.sizes > 1, (common - 1).clamp(min=0), 0).to(lengths.dtype)


def prefixes_worth_sharing(
    tokens: torch.Tensor, lengths: torch.Tensor, groups: torch.Tensor, *alike: torch.Tensor
) -> torch.Tensor:
    """``shared_prefixes`` where these are at least an eighth of their group's longest row, else 0.

    What is worth sharing in a group is so among some of its rows too: they have at least as much in common.
    """
    shared = shared_prefixes(tokens, lengths, groups, *alike)
    if not bool(shared.any()):
        return shared
    longest = -_Groups(groups).least(-lengths)
    return torch.where(shared >= WORTH * longest, shared, 0)


class Unit(NamedTuple):
    """Rows that go together, ascending, and the tokens that they cost: a shared prefix counts once."""

    rows: np.ndarray
    tokens: int


def units_of(
    lengths: Sequence[int], groups: Sequence[int], shared: Sequence[int], max_tokens: int | None = None
) -> list[Unit]:
    """The rows of a group that shares a prefix as one unit, every other row as one of its own.

    A group of more than ``max_tokens`` is several units; a row that such a limit leaves alone shares nothing.

    >>> [(unit.rows.tolist(), unit.tokens) for unit in units_of([6, 3, 5, 6], [0, 1, 0, 0], [4, 0, 4, 4], 8)]
    [([0, 2], 7), ([1], 3), ([3], 6)]
    """
    units: list[list[int]] = []
    tokens: list[int] = []
    open_unit: dict[int, int] = {}
    for row, (length, group, prefix) in enumerate(zip(lengths, groups, shared, strict=True)):
        number = open_unit.get(group) if prefix else None
        if number is None or (max_tokens is not None and tokens[number] + length - prefix > max_tokens):
            number = len(units)
            units.append([row])
            tokens.append(length)
            if prefix:
                open_unit[group] = number
        else:
            units[number].append(row)
            tokens[number] += length - prefix
    return [Unit(np.asarray(rows, np.int64), count) for rows, count in zip(units, tokens, strict=True)]


class _Groups:
    """Rows by group."""

    def __init__(self, groups: torch.Tensor) -> None:
        _, self._index, counts = groups.unique(return_inverse=True, return_counts=True)
        self._count = len(counts)
        self.sizes = counts[self._index]

    def least(self, values: torch.Tensor) -> torch.Tensor:
        """The least value of each row's group."""
        start = values.new_full((self._count,), torch.iinfo(values.dtype).max)
        return start.scatter_reduce(0, self._index, values, "amin")[self._index]
