"""A worker's rows cut into micro-batches that fit its memory, and their results put back in place."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from rl_bridge.data.token_batch import TokenBatch


class MicroBatch(NamedTuple):
    """``batch`` holds the rows ``places`` of a larger one, without the columns that are padding in all of them."""

    places: torch.Tensor
    batch: TokenBatch


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


def micro_batches(batch: TokenBatch, max_tokens: int) -> list[MicroBatch]:
    """The batch in parts, each row in exactly one."""
    parts = [torch.from_numpy(part) for part in padded_rows(batch.lengths.tolist(), max_tokens)]
    return [MicroBatch(index, batch.rows(index).trim()) for index in parts]


def restore(parts: Iterable[tuple[torch.Tensor, torch.Tensor]], like: torch.Tensor) -> torch.Tensor:
    """[N, L] of the shape of ``like`` from (row numbers, [n, l ≤ L]) pairs; zero in the columns that were cut off."""
    whole = torch.zeros(like.shape, device=like.device)
    for index, values in parts:
        whole[index, : values.shape[1]] = values.to(whole)
    return whole
