"""Blocks of rows by blocks of the vocabulary in PyTorch: the CPU's backend and every unknown device's."""

import torch
from torch import Tensor

from rl_kernels.linear_logprobs.blocks import accumulate, blocks, product, row_blocks, tiles
from rl_kernels.row_state import Coefficients, RowState, coefficients, finite, merge, tile_state, token_gradients
from rl_kernels.scaling import kept_tile, scaled, slope


def forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    inverse: Tensor,
    softcap: float | None,
    support: Tensor | None,
    mask: Tensor | None,
    start: int,
    workspace: int,
) -> RowState:
    """State of the entries start, start + 1, … that ``weight`` holds; that of no entry in rows left out."""
    nothing = torch.zeros_like(inverse)
    empty = torch.full_like(inverse, float("-inf"))
    target = inverse.new_full(tokens.shape, float("-inf"))
    total = RowState(empty, nothing, nothing.clone(), target)
    size = blocks(weight.shape[0], weight.shape[1], workspace)
    for rows in row_blocks(len(hidden), mask, size.rows):
        here, state = hidden[rows], RowState(*(field[rows] for field in total))
        for first, last in tiles(len(weight), size.entries):
            x = _tile(here, weight, bias, inverse, softcap, support, rows, start, first, last)
            state = merge(state, tile_state(x, tokens[rows] - (start + first)))
        for field, value in zip(total, state, strict=True):
            field[rows] = value
    return total


def backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    inverse: Tensor,
    softcap: float | None,
    support: Tensor | None,
    mask: Tensor | None,
    start: int,
    workspace: int,
    outputs: tuple[Tensor, Tensor, Tensor],
    cotangents: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dL/dhidden of these entries, dL/dweight, dL/dbias, each summed in float32 (float64 for float64)."""
    logprobs, entropy, logsumexp = outputs
    g, h, z = cotangents
    # A token that cannot be drawn takes no gradient: −inf has none.
    g = g.masked_fill(logprobs == float("-inf"), 0.0)
    row = coefficients(g, h, z, entropy)
    dtype = inverse.dtype
    d_hidden = torch.zeros_like(hidden)
    d_weight = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
    d_bias = None if bias is None else torch.zeros(bias.shape, dtype=dtype, device=bias.device)
    size = blocks(weight.shape[0], weight.shape[1], workspace)
    for rows in row_blocks(len(hidden), mask, size.rows):
        here = hidden[rows]
        sums = torch.zeros(here.shape, dtype=dtype, device=here.device)
        own = token_gradients(Coefficients(row.a[rows], row.b[rows]), g[rows], tokens[rows], logprobs[rows])
        for first, last in tiles(len(weight), size.entries):
            x = _tile(here, weight, bias, inverse, softcap, support, rows, start, first, last)
            log_p = x - finite(logsumexp[rows])[:, None]
            p = torch.exp(log_p)
            dx = log_p.masked_fill_(p == 0, 0.0).mul_(row.b[rows, None]).add_(row.a[rows, None]).mul_(p)
            del p
            _store(dx, tokens[rows] - (start + first), own)
            dz = dx.mul_(slope(x, inverse[rows], softcap)).to(weight.dtype if hidden.is_cuda else dtype)
            accumulate(sums, dz, weight[first:last])
            accumulate(d_weight[first:last], dz.T, here)
            if d_bias is not None:
                d_bias[first:last] += dz.sum(0, dtype=dtype)
        d_hidden[rows] = sums.to(hidden.dtype)
    return d_hidden, d_weight.to(weight.dtype), None if bias is None or d_bias is None else d_bias.to(bias.dtype)


def _tile(hidden, weight, bias, inverse, softcap, support, rows, start, first, last):
    """Scaled logits of some rows and of the entries first … last − 1 of the weight."""
    logits = product(hidden, weight[first:last].T, inverse.dtype)
    if bias is not None:
        logits += bias[first:last]
    return scaled(logits, inverse[rows], softcap, kept_tile(support, rows, start + first, start + last))


def _store(dx, local, own):
    """The tokens' own gradients, where the tile holds the token."""
    row, k = ((local >= 0) & (local < dx.shape[-1])).nonzero(as_tuple=True)
    dx[row, local[row, k]] = own[row, k]
