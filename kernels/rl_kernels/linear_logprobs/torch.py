"""Blocks of rows by blocks of the vocabulary in PyTorch: the CPU's backend and every unknown device's."""

from functools import partial

import torch
from torch import Tensor

from rl_kernels.common.blocks import blocks, cost, row_blocks, tiles
from rl_kernels.common.matmul import product
from rl_kernels.common.row_state import RowState, empty_state, merge, tile_state
from rl_kernels.common.scaling import kept_tile, scaled, slope
from rl_kernels.linear_logprobs.backward import backward as in_blocks

# Numbers a logit that are alive at once, in the forward and in the backward.
_NUMBERS = 5


def forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    inverse: Tensor,
    softcap: float | None,
    allowed_tokens: Tensor | None,
    mask: Tensor | None,
    start: int,
    workspace: int,
) -> RowState:
    """State of the entries start, start + 1, … that ``weight`` holds; that of no entry in rows left out."""
    total = empty_state(inverse, tokens)
    width = inverse.element_size()
    size = blocks(
        len(weight), weight.shape[1], workspace, cost(hidden, weight, allowed_tokens, width, _NUMBERS * width)
    )
    for rows in row_blocks(len(hidden), mask, size.rows):
        here, state = hidden[rows], RowState(*(field[rows] for field in total))
        for first, last in tiles(len(weight), size.entries):
            x = _scaled(
                product(here, weight[first:last].T, inverse.dtype),
                None if bias is None else bias[first:last],
                inverse[rows],
                softcap,
                kept_tile(allowed_tokens, rows, start + first, start + last),
            )
            state = merge(state, tile_state(x, tokens[rows] - (start + first)))
        for field, value in zip(total, state, strict=True):
            field[rows] = value
    return total


def _dlogits(logits, kept, bias, local, own, inverse, coefficients, base, softcap, dtype):
    x = _scaled(logits, bias, inverse, softcap, kept)
    del logits
    # Without a cap the slope does not ask for x again.
    log_p = x.sub_(base[:, None]) if softcap is None else x - base[:, None]
    p = torch.exp(log_p)
    # −inf · 0 would be NaN where an entry is excluded; e^−1000 is 0 in float64 too.
    dx = log_p.clamp_(min=-1000.0).mul_(coefficients.b[:, None]).add_(coefficients.a[:, None]).mul_(p)
    del p
    _store(dx, local, own)
    return dx.mul_(slope(x, inverse, softcap)).to(dtype)


def _scaled(logits, bias, inverse, softcap, kept):
    """Scaled logits with the bias added; ``logits`` is overwritten, where there is no cap by the result."""
    if bias is not None:
        logits += bias
    if softcap is not None:
        return scaled(logits, inverse, softcap, kept)
    x = logits.mul_(inverse[:, None])
    return x if kept is None else x.masked_fill_(~kept, float("-inf"))


def _store(dx, local, own):
    """The tokens' own gradients, where the tile holds the token."""
    row, k = ((local >= 0) & (local < dx.shape[-1])).nonzero(as_tuple=True)
    dx[row, local[row, k]] = own[row, k]


# The loop over blocks is every backend's.
backward = partial(in_blocks, dlogits=_dlogits, numbers=_NUMBERS)
