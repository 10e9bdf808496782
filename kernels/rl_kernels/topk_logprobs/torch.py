"""Blocks in PyTorch: the backend of the CPU and of every unknown device.

On a GPU the search reads the logits of a block several times, while the GEMM that made them reads the weight once.
"""

import torch
from torch import Tensor

from rl_kernels.common.arguments import Problem
from rl_kernels.common.blocks import blocks, cost, row_blocks, tiles
from rl_kernels.common.matmul import matmul
from rl_kernels.common.row_state import RowState, empty_state, merge_row_states, tile_state
from rl_kernels.common.scaling import scaled
from rl_kernels.common.token_masks import allowed_tile
from rl_kernels.topk_logprobs.largest import NO_TOKEN, joined, largest

# Logits of a chunk, whose temporaries have up to 16 bytes a logit.
_CHUNK = 1 << 22
# Numbers a logit that are alive at once while a block of logits is searched.
_NUMBERS = 7


def ids(logits: Tensor, allowed_tokens: Tensor | None, mask: Tensor | None, k: int) -> Tensor:
    """Ids [N, k] of the largest logits, in order; 0 in rows left out."""
    count, vocab_size = logits.shape
    found = torch.zeros(count, k, dtype=torch.int64, device=logits.device)
    for rows in row_blocks(count, mask, max(1, _CHUNK // max(1, vocab_size))):
        found[rows] = largest(_possible(logits[rows], allowed_tile(allowed_tokens, rows, 0, vocab_size)), k)[1]
    return found


def forward(problem: Problem, k: int, workspace: int) -> tuple[RowState, Tensor, Tensor]:
    """State of the weight's part of the vocabulary, and the k largest logits with their ids: −inf and ``NO_TOKEN``
    where there are fewer. In rows left out the empty state.
    """
    hidden, weight, bias, rows, start = problem
    scale, softcap = rows.inv_temperature, rows.softcap
    total = empty_state(scale, rows.tokens)
    values = scale.new_full((len(hidden), k), float("-inf"))
    found = torch.full((len(hidden), k), NO_TOKEN, device=hidden.device)
    width = scale.element_size()
    price = cost(hidden, weight, rows.allowed_tokens, width, _NUMBERS * width)
    size = blocks(weight.shape[0], weight.shape[1], workspace, price)
    for index in row_blocks(len(hidden), rows.mask, size.tokens):
        here, state, best = hidden[index], RowState(*(field[index] for field in total)), None
        for first, last in tiles(len(weight), size.vocab):
            z = matmul(here, weight[first:last].T, scale.dtype)
            if bias is not None:
                z += bias[first:last]
            allowed = allowed_tile(rows.allowed_tokens, index, start + first, start + last)
            values_here, columns = largest(_possible(z, allowed), min(k, last - first))
            of_tile = values_here, columns + (start + first)
            best = of_tile if best is None else joined(best, of_tile, k)
            x = scaled(z, scale[index], softcap, allowed)
            state = merge_row_states(state, tile_state(x, rows.tokens[index]))
        for field, value in zip(total, state, strict=True):
            field[index] = value
        if best is not None:
            values[index, : best[0].shape[1]], found[index, : best[1].shape[1]] = best
    return total, values, found


def _possible(z: Tensor, allowed: Tensor | None) -> Tensor:
    return z if allowed is None else z.masked_fill(~allowed, float("-inf"))
