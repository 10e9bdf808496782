"""Blocks of tokens by blocks of the vocabulary in PyTorch: the backend of the CPU and of every unknown device."""

from functools import partial

import torch
from torch import Tensor

from rl_kernels.common.arguments import Problem
from rl_kernels.common.blocks import blocks, cost, row_blocks, tiles
from rl_kernels.common.matmul import matmul
from rl_kernels.common.row_state import RowState, empty_state, merge_row_states, tile_state
from rl_kernels.common.scaling import scaled, slope
from rl_kernels.common.token_masks import allowed_tile
from rl_kernels.linear_logprobs.backward import Block
from rl_kernels.linear_logprobs.backward import backward as in_blocks

# Numbers a logit that are alive at once, in the forward and in the backward.
_NUMBERS = 5


def forward(problem: Problem, workspace: int) -> RowState:
    """State of the weight's part of the vocabulary; in rows left out the empty state."""
    hidden, weight, bias, rows, start = problem
    dtype, width = rows.inv_temperature.dtype, rows.inv_temperature.element_size()
    total = empty_state(rows.inv_temperature, rows.tokens)
    price = cost(hidden, weight, rows.allowed_tokens, width, _NUMBERS * width)
    size = blocks(len(weight), weight.shape[1], workspace, price)
    for index in row_blocks(len(hidden), rows.mask, size.tokens):
        here, mine, state = hidden[index], rows.take(index), RowState(*(field[index] for field in total))
        for first, last in tiles(len(weight), size.vocab):
            x = _scaled(
                matmul(here, weight[first:last].T, dtype),
                None if bias is None else bias[first:last],
                mine.inv_temperature,
                rows.softcap,
                allowed_tile(rows.allowed_tokens, index, start + first, start + last),
            )
            state = merge_row_states(state, tile_state(x, mine.tokens - (start + first)))
        for field, value in zip(total, state, strict=True):
            field[index] = value
    return total


def _dlogits(logits: Tensor, block: Block) -> Tensor:
    inv_temperature, softcap = block.inv_temperature, block.softcap
    x = _scaled(logits, block.bias, inv_temperature, softcap, block.allowed)
    del logits
    # Without a cap the slope does not need x again.
    log_p = x.sub_(block.logsumexp[:, None]) if softcap is None else x - block.logsumexp[:, None]
    p = torch.exp(log_p)
    a, b = block.coefficients
    # −inf · 0 would be NaN where a token is excluded; e^−1000 is 0 in float64 too.
    dx = log_p.clamp_(min=-1000.0).mul_(b[:, None]).add_(a[:, None]).mul_(p)
    del p
    _store(dx, block.tokens, block.own)
    return dx.mul_(slope(x, inv_temperature, softcap)).to(block.dtype)


def _scaled(
    logits: Tensor, bias: Tensor | None, inv_temperature: Tensor, softcap: float | None, allowed: Tensor | None
) -> Tensor:
    """Scaled logits with the bias; ``logits`` is overwritten, and without a cap holds the result."""
    if bias is not None:
        logits += bias
    if softcap is not None:
        return scaled(logits, inv_temperature, softcap, allowed)
    x = logits.mul_(inv_temperature[:, None])
    return x if allowed is None else x.masked_fill_(~allowed, float("-inf"))


def _store(dx: Tensor, tokens: Tensor, own: Tensor) -> None:
    """The tokens' own gradients, where the tile holds the token; elsewhere column 0 is stored as it was.

    One of the K at a time: two of them may be meant for one column.
    """
    inside, column = (tokens >= 0) & (tokens < dx.shape[-1]), tokens.clamp(0, dx.shape[-1] - 1)
    for k in range(tokens.shape[1]):
        at, here = column[:, k : k + 1], inside[:, k : k + 1]
        dx.scatter_(1, at, torch.where(here, own[:, k : k + 1], dx.gather(1, at)))


backward = partial(in_blocks, dlogits=_dlogits, numbers=_NUMBERS)
