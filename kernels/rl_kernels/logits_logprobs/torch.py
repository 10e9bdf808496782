"""Row-chunked PyTorch: the backend of the CPU and of every unknown device.

The forward keeps K + 2 numbers a row beside the logits; the backward computes p again.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from rl_kernels.common.arguments import Rows
from rl_kernels.common.row_state import (
    Coefficients,
    coefficients,
    finalize_row_state,
    finite,
    tile_state,
    token_gradients,
)
from rl_kernels.common.scaling import scaled, slope
from rl_kernels.common.token_masks import allowed_tile

Results = tuple[Tensor, Tensor, Tensor]

# Logits of a chunk: each temporary has 16 MiB in float32, and a handful are alive at once, for any number of rows.
_CHUNK = 1 << 22


def forward(logits: Tensor, rows: Rows) -> Results:
    """Log-probabilities [N, K], entropy [N], logsumexp [N]; 0 where masked."""
    logprobs = rows.inv_temperature.new_zeros(rows.tokens.shape)
    entropy, logsumexp = torch.zeros_like(rows.inv_temperature), torch.zeros_like(rows.inv_temperature)
    for index in _chunks(logits, rows.mask):
        state = tile_state(_scaled(logits, rows, index), rows.tokens[index])
        logprobs[index], entropy[index], logsumexp[index] = finalize_row_state(state)
    return logprobs, entropy, logsumexp


def backward(logits: Tensor, rows: Rows, outputs: Results, cotangents: Results, gradient: Tensor) -> None:
    """Write dL/dlogits into ``gradient``, which may be the logits' own memory."""
    logprobs, entropy, logsumexp = outputs
    g, h, z = cotangents
    # A token that cannot be sampled takes no gradient: −inf has none.
    g = g.masked_fill(logprobs == float("-inf"), 0.0)
    row = coefficients(g, h, z, entropy)
    for index in _chunks(logits, rows.mask):
        x, tokens = _scaled(logits, rows, index), rows.tokens[index]
        log_p = x - finite(logsumexp[index])[:, None]
        p = torch.exp(log_p)
        dx = log_p.masked_fill_(p == 0, 0.0).mul_(row.b[index, None]).add_(row.a[index, None]).mul_(p)
        own = token_gradients(Coefficients(row.a[index], row.b[index]), g[index], tokens, logprobs[index])
        dx.scatter_(-1, tokens, own)
        gradient[index] = dx.mul_(slope(x, rows.inv_temperature[index], rows.softcap)).to(gradient.dtype)
    if rows.mask is not None:
        gradient.masked_fill_(~rows.mask[:, None], 0.0)


def _scaled(logits: Tensor, rows: Rows, index: slice | Tensor) -> Tensor:
    allowed = allowed_tile(rows.allowed_tokens, index, 0, logits.shape[-1])
    return scaled(logits[index], rows.inv_temperature[index], rows.softcap, allowed)


def _chunks(logits: Tensor, mask: Tensor | None) -> Iterator[slice | Tensor]:
    """Rows a few at a time; with a mask only those that count: padding costs nothing."""
    step = max(1, _CHUNK // max(1, logits.shape[-1]))
    if mask is None:
        yield from (slice(start, start + step) for start in range(0, logits.shape[0], step))
    else:
        yield from mask.nonzero()[:, 0].split(step)
