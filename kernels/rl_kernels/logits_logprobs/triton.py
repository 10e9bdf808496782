"""Triton for NVIDIA and ROCm: the logits are read once forward, read and written once backward.

The forward keeps (maximum, sum, weighted sum) of a row in registers while it sweeps the vocabulary. The target logits
are K numbers a row: PyTorch gathers and stores them.
"""

from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from rl_kernels.common.arguments import Rows
from rl_kernels.common.row_state import Coefficients, coefficients, finite, token_gradients
from rl_kernels.common.scaling import scaled, slope
from rl_kernels.common.token_masks import allowed_at, packed
from rl_kernels.logits_logprobs.triton_kernels import backward_kernel, forward_kernel

Results = tuple[Tensor, Tensor, Tensor]

# Bytes of packed masks of allowed tokens alive at once, however many rows there are.
_PACKED = 64 << 20


def forward(logits: Tensor, rows: Rows) -> Results:
    """Log-probabilities [N, K], entropy [N], logsumexp [N]; 0 where masked."""
    tokens, scale, softcap, allowed_tokens, mask = rows
    count, vocab_size = logits.shape
    entropy, logsumexp = torch.empty_like(scale), torch.empty_like(scale)
    for index, allowed in _parts(count, vocab_size, allowed_tokens):
        with torch.cuda.device_of(logits):
            forward_kernel[(index.stop - index.start,)](
                logits[index],
                scale[index],
                scale if allowed is None else allowed,
                scale if mask is None else mask[index].view(torch.uint8),
                entropy[index],
                logsumexp[index],
                vocab_size,
                logits.stride(0),
                logits.stride(1),
                0 if allowed is None else allowed.stride(0),
                softcap or 1.0,
                CAPPED=softcap is not None,
                ALLOWED=allowed is not None,
                MASKED=mask is not None,
                BLOCK_N=block_size(vocab_size),
                num_warps=8,  # pyright: ignore[reportCallIssue]
            )
    target = scaled(logits.gather(1, tokens), scale, softcap, allowed_at(allowed_tokens, tokens))
    logprobs = target - finite(logsumexp)[:, None]
    return logprobs if mask is None else logprobs.masked_fill_(~mask[:, None], 0.0), entropy, logsumexp


def backward(logits: Tensor, rows: Rows, outputs: Results, cotangents: Results, gradient: Tensor) -> None:
    """Write dL/dlogits into ``gradient``, which may be the logits' own memory."""
    tokens, scale, softcap, allowed_tokens, mask = rows
    logprobs, entropy, logsumexp = outputs
    g, h, z = cotangents
    # A token that cannot be sampled takes no gradient: −inf has none.
    g = g.masked_fill(logprobs == float("-inf"), 0.0)
    row = coefficients(g, h, z, entropy)
    count, vocab_size = logits.shape
    block = block_size(vocab_size)
    base = finite(logsumexp)
    for index, allowed in _parts(count, vocab_size, allowed_tokens):
        with torch.cuda.device_of(logits):
            backward_kernel[(index.stop - index.start, triton.cdiv(vocab_size, block))](
                logits[index],
                gradient[index],
                scale[index],
                scale if allowed is None else allowed,
                scale if mask is None else mask[index].view(torch.uint8),
                row.a[index],
                row.b[index],
                base[index],
                vocab_size,
                logits.stride(0),
                logits.stride(1),
                gradient.stride(0),
                gradient.stride(1),
                0 if allowed is None else allowed.stride(0),
                softcap or 1.0,
                CAPPED=softcap is not None,
                ALLOWED=allowed is not None,
                MASKED=mask is not None,
                BLOCK_N=block,
                num_warps=8,  # pyright: ignore[reportCallIssue]
            )
    own = token_gradients(Coefficients(row.a, row.b), g, tokens, logprobs)
    own = own * slope(logprobs + base[:, None], scale, softcap)
    gradient.scatter_(1, tokens, (own if mask is None else own.masked_fill(~mask[:, None], 0.0)).to(gradient.dtype))


def block_size(vocab_size: int) -> int:
    """Logits a program reads at a time: a power of two of at most 4096, a function of the vocabulary alone."""
    return min(4096, triton.next_power_of_2(max(1, vocab_size)))


def _parts(count: int, vocab_size: int, allowed_tokens: Tensor | None) -> Iterator[tuple[slice, Tensor | None]]:
    """All rows at once, or with a mask of allowed tokens as many as fit into the memory for its packed form."""
    if count == 0:
        return
    if allowed_tokens is None:
        yield slice(0, count), None
        return
    step = max(1, 8 * _PACKED // vocab_size)
    for first in range(0, count, step):
        index = slice(first, min(first + step, count))
        yield index, packed(allowed_tokens[index], vocab_size)
