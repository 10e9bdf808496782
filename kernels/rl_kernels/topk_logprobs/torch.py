"""Blocks in PyTorch: every device's backend. On a GPU the search reads logits of a block several times, where the
product that made them reads the whole weight.
"""

import torch
from torch import Tensor

from rl_kernels.common.blocks import blocks, cost, row_blocks, tiles
from rl_kernels.common.matmul import product
from rl_kernels.common.row_state import RowState, merge, tile_state
from rl_kernels.common.scaling import kept_tile, scaled
from rl_kernels.topk_logprobs.largest import NOTHING, joined, largest

# Elements of a chunk's temporaries, up to 16 bytes each.
_CHUNK = 1 << 22
# Numbers a logit that are alive at once where a block of logits is searched.
_NUMBERS = 7


def ids(logits: Tensor, allowed_tokens: Tensor | None, mask: Tensor | None, k: int) -> Tensor:
    """Ids [N, k] of the largest logits, in order; 0 in rows left out."""
    count, vocabulary = logits.shape
    found = torch.zeros(count, k, dtype=torch.int64, device=logits.device)
    for rows in row_blocks(count, mask, max(1, _CHUNK // max(1, vocabulary))):
        found[rows] = largest(_possible(logits[rows], kept_tile(allowed_tokens, rows, 0, vocabulary)), k)[1]
    return found


def forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inverse: Tensor,
    softcap: float | None,
    allowed_tokens: Tensor | None,
    mask: Tensor | None,
    k: int,
    start: int,
    workspace: int,
) -> tuple[RowState, Tensor, Tensor]:
    """State of the entries start, start + 1, … that ``weight`` holds, and the k largest logits with their ids; where
    there are fewer entries, −inf and the id of no entry. In rows left out the state of no entry.
    """
    count = len(hidden)
    no_tokens = torch.empty(count, 0, dtype=torch.int64, device=hidden.device)
    nothing, empty = torch.zeros_like(inverse), torch.full_like(inverse, float("-inf"))
    total = RowState(empty, nothing, nothing.clone(), inverse.new_empty(count, 0))
    values = inverse.new_full((count, k), float("-inf"))
    found = torch.full((count, k), NOTHING, device=hidden.device)
    width = inverse.element_size()
    size = blocks(
        weight.shape[0], weight.shape[1], workspace, cost(hidden, weight, allowed_tokens, width, _NUMBERS * width)
    )
    for rows in row_blocks(count, mask, size.rows):
        here, state, best = hidden[rows], RowState(*(field[rows] for field in total)), None
        for first, last in tiles(len(weight), size.entries):
            z = product(here, weight[first:last].T, inverse.dtype)
            if bias is not None:
                z += bias[first:last]
            kept = kept_tile(allowed_tokens, rows, start + first, start + last)
            values_here, columns = largest(_possible(z, kept), min(k, last - first))
            of_tile = values_here, columns + (start + first)
            best = of_tile if best is None else joined(best, of_tile, k)
            state = merge(state, tile_state(scaled(z, inverse[rows], softcap, kept), no_tokens[rows]))
        for field, value in zip(total, state, strict=True):
            field[rows] = value
        if best is not None:
            values[rows, : best[0].shape[1]], found[rows, : best[1].shape[1]] = best
    return total, values, found


def _possible(z: Tensor, kept: Tensor | None) -> Tensor:
    return z if kept is None else z.masked_fill(~kept, float("-inf"))
