"""A worker's rows cut into micro-batches that fit its memory, and their results put back in place."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from rl_bridge.data.prefixes import units_of
from rl_bridge.data.token_batch import TokenBatch
from rl_fn.packing import pack


class MicroBatch(NamedTuple):
    """``batch`` holds the rows ``places`` of a larger one, without the columns that are padding in all of them.

    Without places it is a stand-in: one row in which nothing counts.
    """

    places: torch.Tensor
    batch: TokenBatch

    def to(self, device: torch.device) -> "MicroBatch":
        """The batch on a device; the places stay where the larger batch is."""
        return self._replace(batch=self.batch.to(device))

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The entries of [N, L, ...] that belong to this part; zeros for a stand-in."""
        rows, columns = self.batch.tokens.shape
        return whole[self.places, :columns] if len(self.places) else whole.new_zeros((rows, columns, *whole.shape[2:]))


def padded_rows(lengths: Sequence[int], max_tokens: int) -> list[np.ndarray]:
    """Rows that go together when each is padded to the longest beside it: rows of similar length.

    A micro-batch has at most ``max_tokens`` tokens, padding included, or one row. Returns ascending row numbers; every
    row is in exactly one.

    >>> [part.tolist() for part in padded_rows([3, 9, 4, 8], 18)]
    [[0, 2], [1, 3]]
    """
    order = np.argsort(np.asarray(lengths), kind="stable")
    parts: list[list[int]] = []
    for row in order.tolist():
        # Rows come by length: this one is the widest so far.
        if parts and (len(parts[-1]) + 1) * max(1, lengths[row]) <= max_tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
    return [np.sort(np.asarray(part, np.int64)) for part in parts]


def packed_rows(lengths: Sequence[int], max_tokens: int) -> list[np.ndarray]:
    """Rows that go together when they lie one behind another, without padding: as few micro-batches as will do.

    A micro-batch has at most ``max_tokens`` tokens, or one row. Returns ascending row numbers; every row is in exactly
    one.

    >>> [part.tolist() for part in packed_rows([3, 9, 20, 4, 8], 12)]
    [[2], [0, 1], [3, 4]]
    """
    array = np.asarray(lengths, np.int64)
    alone, rest = np.flatnonzero(array > max_tokens), np.flatnonzero(array <= max_tokens)
    return [np.array([row]) for row in alone] + [rest[part] for part in pack(array[rest], max_tokens)]


def sharing_rows(
    lengths: Sequence[int], groups: Sequence[int], shared: Sequence[int], max_tokens: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """Rows that share prefixes, packed into as few micro-batches as will do, and the rows that share with no other.

    The rows of a group go together where ``max_tokens`` has room for them, and their prefix counts once.

    >>> [part.tolist() for part in sharing_rows([6, 3, 5, 6, 6], [0, 1, 0, 2, 2], [4, 0, 4, 5, 5], 14)[0]]
    [[0, 2, 3, 4]]
    """
    units = units_of(lengths, groups, shared, max_tokens)
    together = [unit for unit in units if len(unit.rows) > 1]
    alone = [unit.rows for unit in units if len(unit.rows) == 1]
    parts = [
        np.sort(np.concatenate([together[i].rows for i in part]))
        for part in pack([unit.tokens for unit in together], max_tokens)
    ]
    return parts, np.concatenate(alone) if alone else np.zeros(0, np.int64)


def micro_batches(
    batch: TokenBatch, max_tokens: int, *, packing: bool = False, share_prefixes: bool = False
) -> list[MicroBatch]:
    """The batch in parts, each row in exactly one.

    ``max_tokens`` counts padding, unless rows are packed. Rows that share a prefix worth it always are.
    """
    lengths, parts, alone = batch.row_tokens(), [], np.arange(len(batch.lengths))
    if share_prefixes:
        shared = batch.prefixes_worth_sharing().tolist()
        parts, alone = sharing_rows(lengths, batch.groups.tolist(), shared, max_tokens)
    rest = (packed_rows if packing else padded_rows)([lengths[row] for row in alone.tolist()], max_tokens)
    parts += [alone[part] for part in rest]
    places = [torch.from_numpy(part).to(batch.tokens.device) for part in parts]
    return [MicroBatch(rows, batch.rows(rows).trim()) for rows in places]


def stand_in(batch: TokenBatch) -> MicroBatch:
    """What a worker computes while others still have rows, so that all join the same collectives: it adds nothing."""

    def nothing(value: torch.Tensor) -> torch.Tensor:
        # Behind [N, L] there are sets of tokens: −1 is no token.
        return value.new_zeros((1, 2)[: value.dim()]) if value.dim() < 3 else value.new_full((1, 2, 1), -1)

    empty = batch.map(nothing)
    return MicroBatch(batch.lengths.new_zeros(0), empty._replace(lengths=empty.lengths + 2))


def restore(parts: Iterable[tuple[torch.Tensor, torch.Tensor]], like: torch.Tensor) -> torch.Tensor:
    """[N, L] of the shape of ``like`` from (places, [n, l ≤ L]) pairs; zero in the columns that were cut off."""
    whole = torch.zeros(like.shape, device=like.device)
    for places, values in parts:
        if len(places):
            whole[places, : values.shape[1]] = values.to(whole)
    return whole
