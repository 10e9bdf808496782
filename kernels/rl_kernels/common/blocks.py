"""How rows and vocabulary are cut, so that what is in memory at once does not depend on how many rows there are."""

from collections.abc import Iterator
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from rl_kernels.common.matmul import native

# No tile of the weight has more entries: beyond that they only take rows away from the block.
_ENTRIES = 8192
# Products of sizes that are multiples of it leave no part of a multiprocessor's tile unused.
_UNIT = 128


class Blocks(NamedTuple):
    """Rows and entries of the vocabulary in a block."""

    rows: int
    entries: int


class Cost(NamedTuple):
    """Bytes that a block holds for each of its logits, for each feature of its rows and of its entries, and a row."""

    logit: int
    row: int
    entry: int
    fixed: int = 0


def cost(
    hidden: Tensor, weight: Tensor, allowed_tokens: Tensor | None, width: int, logit: int, *, gradients: bool = False
) -> Cost:
    """What products with this weight, in an arithmetic of ``width`` bytes, and finding out which entries are kept, need
    beside ``logit`` bytes a logit.
    """
    own = native(hidden, weight)
    half = hidden.dtype in (torch.bfloat16, torch.float16)
    widened = width if (half or hidden.dtype != weight.dtype) and not own.product else 0
    # Rows that count are copied where some do not.
    row, entry = hidden.element_size() + widened, widened
    if gradients:
        # Those of rows are summed; where torch cannot add a product to a sum, it is there by itself.
        added = 0 if own.accumulate or not own.product else width
        row, entry = row + width + added, entry + added
    if allowed_tokens is None:
        return Cost(logit, row, entry)
    # A byte an entry, and of ids two copies, with whether they are in the block.
    return Cost(logit + 1, row, entry, 0 if allowed_tokens.dtype == torch.bool else 18 * allowed_tokens.shape[1])


def blocks(vocabulary: int, features: int, workspace: int, cost: Cost) -> Blocks:
    """The largest blocks that stay within ``workspace`` bytes; a function of the model alone.

    Rows and entries are as many as one another where the vocabulary allows it: what is read and written again for each
    block of either is the least then.
    """
    linear = features * (cost.row + cost.entry) + cost.fixed
    square = (sqrt(linear**2 + 4 * cost.logit * workspace) - linear) / (2 * cost.logit)
    entries = _whole(min(vocabulary, _ENTRIES, int(square)))
    # As few tiles as that takes, all of about one size.
    even = -(-vocabulary // -(-vocabulary // entries)) if vocabulary else 1
    entries = min(entries, -(-even // _UNIT) * _UNIT)
    rows = (workspace - entries * features * cost.entry) // (entries * cost.logit + features * cost.row + cost.fixed)
    return Blocks(_whole(rows), entries)


def _whole(size: int) -> int:
    """A multiple of the unit, or what there is of the first; 1 at least."""
    return max(1, size if size < _UNIT else size // _UNIT * _UNIT)


def tiles(vocabulary: int, entries: int) -> Iterator[tuple[int, int]]:
    """First and one past the last entry of each tile."""
    return ((start, min(start + entries, vocabulary)) for start in range(0, vocabulary, entries))


def row_blocks(count: int, mask: Tensor | None, size: int) -> Iterator[slice | Tensor]:
    """Rows a block at a time; with a mask only those that count (their number is read from the device)."""
    if mask is None:
        yield from (slice(start, min(start + size, count)) for start in range(0, count, size))
    else:
        yield from mask.nonzero()[:, 0].split(size)
