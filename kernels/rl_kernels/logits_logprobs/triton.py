"""Triton for NVIDIA and ROCm: the logits are read once forward, read and written once backward.

The forward keeps (maximum, sum, weighted sum) of a row in registers while it sweeps the vocabulary. The target logits
are K numbers a row: PyTorch gathers and stores them.
"""

from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from rl_kernels.common.row_state import Coefficients, coefficients, finite, token_gradients
from rl_kernels.common.scaling import kept_at, scaled, slope
from rl_kernels.common.token_masks import packed
from rl_kernels.logits_logprobs.triton_kernels import backward_kernel, forward_kernel

# Bytes of packed kept sets alive at once, however many rows there are.
_PACKED = 64 << 20


def forward(
    logits: Tensor,
    tokens: Tensor,
    inverse: Tensor,
    softcap: float | None,
    allowed_tokens: Tensor | None,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities [N, K], entropy [N], logsumexp [N]; 0 where masked."""
    count, vocabulary = logits.shape
    entropy, logsumexp = torch.empty_like(inverse), torch.empty_like(inverse)
    for rows, kept in _parts(count, vocabulary, allowed_tokens):
        forward_kernel[(rows.stop - rows.start,)](
            logits[rows],
            inverse[rows],
            inverse if kept is None else kept,
            inverse if mask is None else mask[rows].view(torch.uint8),
            entropy[rows],
            logsumexp[rows],
            vocabulary,
            logits.stride(0),
            logits.stride(1),
            0 if kept is None else kept.stride(0),
            softcap or 1.0,
            CAPPED=softcap is not None,
            KEPT=kept is not None,
            MASKED=mask is not None,
            BLOCK=block_size(vocabulary),
            num_warps=8,  # pyright: ignore[reportCallIssue]
        )
    target = scaled(logits.gather(1, tokens), inverse, softcap, kept_at(allowed_tokens, tokens))
    logprobs = target - finite(logsumexp)[:, None]
    return logprobs if mask is None else logprobs.masked_fill_(~mask[:, None], 0.0), entropy, logsumexp


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
    count, vocabulary = logits.shape
    block = block_size(vocabulary)
    base = finite(logsumexp)
    for rows, kept in _parts(count, vocabulary, allowed_tokens):
        backward_kernel[(rows.stop - rows.start, triton.cdiv(vocabulary, block))](
            logits[rows],
            gradient[rows],
            inverse[rows],
            inverse if kept is None else kept,
            inverse if mask is None else mask[rows].view(torch.uint8),
            row.a[rows],
            row.b[rows],
            base[rows],
            vocabulary,
            logits.stride(0),
            logits.stride(1),
            gradient.stride(0),
            gradient.stride(1),
            0 if kept is None else kept.stride(0),
            softcap or 1.0,
            CAPPED=softcap is not None,
            KEPT=kept is not None,
            MASKED=mask is not None,
            BLOCK=block,
            num_warps=8,  # pyright: ignore[reportCallIssue]
        )
    own = token_gradients(Coefficients(row.a, row.b), g, tokens, logprobs)
    own = own * slope(logprobs + base[:, None], inverse, softcap)
    gradient.scatter_(1, tokens, (own if mask is None else own.masked_fill(~mask[:, None], 0.0)).to(gradient.dtype))


def block_size(vocabulary: int) -> int:
    """Entries a program reads at a time: a power of two of at most 4096, a function of the vocabulary alone."""
    return min(4096, triton.next_power_of_2(max(1, vocabulary)))


def _parts(count: int, vocabulary: int, allowed_tokens: Tensor | None) -> Iterator[tuple[slice, Tensor | None]]:
    """Rows at once: all, but with kept sets as many as fit into the memory for their packed form."""
    if count == 0:
        return
    if allowed_tokens is None:
        yield slice(0, count), None
        return
    step = max(1, 8 * _PACKED // vocabulary)
    for first in range(0, count, step):
        rows = slice(first, min(first + step, count))
        yield rows, packed(allowed_tokens[rows], vocabulary)
