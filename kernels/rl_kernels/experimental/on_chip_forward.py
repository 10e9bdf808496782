"""The forward's loop over blocks of tokens, shared by kernels whose logits never leave the chip: they differ in the
launch.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rl_kernels.common.arguments import Problem, Rows
from rl_kernels.common.blocks import row_blocks
from rl_kernels.common.row_state import RowState, empty_state, merge_all
from rl_kernels.common.token_masks import packed
from rl_kernels.experimental.triton_matmul.configurations import part_of

# Blocks of tokens whose programs share tiles of the weight in the second-level cache.
GROUP = 16

# Launches the kernel for a block of R rows: (their index, their packed allowed tokens or None, states, targets, size of
# a part of the vocabulary). Fills states [parts, 3, R], and targets [R, K] where the weight has the target.
Launch = Callable[[slice | Tensor, Tensor | None, Tensor, Tensor, int], None]


def forward(problem: Problem, workspace: int, launch: Launch, copied: int = 0) -> RowState:
    """State of the weight's part of the vocabulary; in rows left out the empty state.

    The vocabulary is cut into parts that depend on its size alone, and the parts' states are merged in order.
    ``copied`` is how many bytes of each token the launch copies.
    """
    rows, vocab_size = problem.rows, len(problem.weight)
    result = empty_state(rows.inv_temperature, rows.tokens)
    if vocab_size == 0:
        return result
    part = part_of(vocab_size)
    parts = -(-vocab_size // part)
    for index in row_blocks(len(problem.hidden), rows.mask, _at_once(vocab_size, parts, rows, workspace, copied)):
        scale = rows.inv_temperature[index]
        if len(scale) == 0:
            continue
        allowed = None
        if rows.allowed_tokens is not None:
            allowed = packed(_local_ids(rows.allowed_tokens[index], problem.start), vocab_size)
        states = scale.new_empty(parts, 3, len(scale))
        targets = scale.new_full((len(scale), rows.tokens.shape[1]), float("-inf"))
        launch(index, allowed, states, targets, part)
        merged = merge_all([RowState(s[0], s[1], s[2], targets) for s in states])
        for field, value in zip(result, merged, strict=True):
            field[index] = value
    return result


def _at_once(vocab_size: int, parts: int, rows: Rows, workspace: int, copied: int) -> int:
    """Rows whose states, masks of allowed tokens while they are packed, and copied bytes fit into the workspace."""
    # States, the merge's temporaries and the row's index, 8 bytes a number at most.
    bytes_a_row = 8 * (3 * parts + 16 + 3 * rows.tokens.shape[1]) + copied
    if rows.allowed_tokens is not None:
        bytes_a_row += 4 * vocab_size + 32 * rows.allowed_tokens.shape[1]
    return max(1, workspace // bytes_a_row)


def _local_ids(allowed_tokens: Tensor, start: int) -> Tensor:
    """Ids counted from this shard's first token; a bool mask has the length of the vocabulary, and is never sharded."""
    return allowed_tokens if allowed_tokens.dtype == torch.bool or start == 0 else allowed_tokens - start
