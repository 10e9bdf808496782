"""The forward's loop over blocks of rows, which kernels that keep logits on chip share: they differ in the launch."""

from collections.abc import Callable

import torch
from torch import Tensor

from rl_kernels.common.blocks import row_blocks
from rl_kernels.common.row_state import RowState, empty_state, merge_all
from rl_kernels.common.token_masks import packed
from rl_kernels.experimental.triton_matmul.configurations import part_of

# Blocks of rows whose programs share tiles of the weight in the second-level cache.
GROUP = 16

# Fills states [parts, 3, R] and, where they are found, targets [R, K] of a block of rows, from their kept sets as bits
# and the entries of a part of the vocabulary.
Launch = Callable[[slice | Tensor, Tensor | None, Tensor, Tensor, int], None]


def forward(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    inverse: Tensor,
    allowed_tokens: Tensor | None,
    mask: Tensor | None,
    start: int,
    workspace: int,
    launch: Launch,
    copied: int = 0,
) -> RowState:
    """State of the entries start, start + 1, … that ``weight`` holds; that of no entry in rows left out.

    The vocabulary is cut into parts that depend on its size alone and whose states are merged in order. ``copied`` is
    how many bytes of each row the launch copies.
    """
    result = empty_state(inverse, tokens)
    vocabulary = len(weight)
    if vocabulary == 0:
        return result
    part = part_of(vocabulary)
    parts = -(-vocabulary // part)
    for rows in row_blocks(
        len(hidden), mask, _rows_at_once(vocabulary, parts, tokens, allowed_tokens, workspace, copied)
    ):
        scale = inverse[rows]
        if len(scale) == 0:
            continue
        kept = None if allowed_tokens is None else packed(_local_ids(allowed_tokens[rows], start), vocabulary)
        states = scale.new_empty(parts, 3, len(scale))
        targets = scale.new_full((len(scale), tokens.shape[1]), float("-inf"))
        launch(rows, kept, states, targets, part)
        merged = merge_all([RowState(s[0], s[1], s[2], targets) for s in states])
        for field, value in zip(result, merged, strict=True):
            field[rows] = value
    return result


def _rows_at_once(
    vocabulary: int, parts: int, tokens: Tensor, allowed_tokens: Tensor | None, workspace: int, copied: int
) -> int:
    """Rows whose states, kept sets while they are packed, and copied bytes fit into the workspace."""
    # States, the merge's temporaries and the row's index, 8 bytes a number at most.
    bytes_a_row = 8 * (3 * parts + 16 + 3 * tokens.shape[1]) + copied
    if allowed_tokens is not None:
        bytes_a_row += 4 * vocabulary + 32 * allowed_tokens.shape[1]
    return max(1, workspace // bytes_a_row)


def _local_ids(allowed_tokens: Tensor, start: int) -> Tensor:
    """Kept ids counted from this shard's first entry; a bool set is the whole vocabulary's already."""
    return allowed_tokens if allowed_tokens.dtype == torch.bool or start == 0 else allowed_tokens - start
