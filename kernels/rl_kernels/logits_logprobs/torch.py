"""Row-chunked PyTorch: the CPU's backend and every unknown device's.

The forward keeps K + 2 numbers a row besides the logits it was given; the backward computes p again.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from rl_kernels.common.row_state import Coefficients, coefficients, finish, finite, tile_state, token_gradients
from rl_kernels.common.scaling import kept_tile, scaled, slope

# Elements of a chunk's temporaries: 16 MiB each in float32, a handful at a time, whatever the number of rows.
_CHUNK = 1 << 22


def forward(
    logits: Tensor,
    tokens: Tensor,
    inverse: Tensor,
    softcap: float | None,
    allowed_tokens: Tensor | None,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities [N, K], entropy [N], logsumexp [N]; 0 where masked."""
    logprobs = inverse.new_zeros(tokens.shape)
    entropy, logsumexp = torch.zeros_like(inverse), torch.zeros_like(inverse)
    for rows in _chunks(logits, mask):
        x = scaled(logits[rows], inverse[rows], softcap, kept_tile(allowed_tokens, rows, 0, logits.shape[-1]))
        logprobs[rows], entropy[rows], logsumexp[rows] = finish(tile_state(x, tokens[rows]))
    return logprobs, entropy, logsumexp


def backward(
    logits: Tensor,
    tokens: Tensor,
    inverse: Tensor,
    softcap: float | None,
    allowed_tokens: Tensor | None,
    mask: Tensor | None,
    outputs: tuple[Tensor, Tensor, Tensor],
    cotangents: tuple[Tensor, Tensor, Tensor],
    gradient: Tensor,
) -> None:
    """Write dL/dlogits into ``gradient``, which may be the logits' own memory."""
    logprobs, entropy, logsumexp = outputs
    g, h, z = cotangents
    # A token that cannot be drawn takes no gradient: −inf has none.
    g = g.masked_fill(logprobs == float("-inf"), 0.0)
    row = coefficients(g, h, z, entropy)
    for rows in _chunks(logits, mask):
        x = scaled(logits[rows], inverse[rows], softcap, kept_tile(allowed_tokens, rows, 0, logits.shape[-1]))
        log_p = x - finite(logsumexp[rows])[:, None]
        p = torch.exp(log_p)
        dx = log_p.masked_fill_(p == 0, 0.0).mul_(row.b[rows, None]).add_(row.a[rows, None]).mul_(p)
        own = token_gradients(Coefficients(row.a[rows], row.b[rows]), g[rows], tokens[rows], logprobs[rows])
        dx.scatter_(-1, tokens[rows], own)
        gradient[rows] = dx.mul_(slope(x, inverse[rows], softcap)).to(gradient.dtype)
    if mask is not None:
        gradient.masked_fill_(~mask[:, None], 0.0)


def _chunks(logits: Tensor, mask: Tensor | None) -> Iterator[slice | Tensor]:
    """Rows a few at a time; with a mask only the rows that count, so that nobody computes padding."""
    step = max(1, _CHUNK // max(1, logits.shape[-1]))
    if mask is None:
        yield from (slice(start, start + step) for start in range(0, logits.shape[0], step))
    else:
        yield from mask.nonzero()[:, 0].split(step)
