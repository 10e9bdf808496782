"""Triton for NVIDIA and ROCm: the logits are read once forward, read and written once backward.

The forward keeps (maximum, sum, weighted sum) of a row in registers while it sweeps the vocabulary. The target logits
are K numbers a row: PyTorch gathers and stores them.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_kernels.row_state import Coefficients, coefficients, finite, token_gradients
from rl_kernels.scaling import kept_at, scaled, slope
from rl_kernels.support import packed
from rl_kernels.triton_math import absorbed, kept_bits, softcap_slope, softcapped

# Bytes of packed kept sets alive at once, however many rows there are.
_PACKED = 64 << 20


@triton.jit
def forward_kernel(
    logits,
    inverse,
    kept,
    mask,
    entropy,
    logsumexp,
    vocabulary,
    row_stride,
    column_stride,
    kept_stride,
    softcap,
    CAPPED: tl.constexpr,
    KEPT: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if MASKED:
        if tl.load(mask + row) == 0:
            tl.store(entropy + row, 0.0)
            tl.store(logsumexp + row, 0.0)
            return
    scale = tl.load(inverse + row)
    maximum = tl.full([], float("-inf"), scale.dtype)
    total = tl.full([], 0.0, scale.dtype)
    weighted = tl.full([], 0.0, scale.dtype)
    for first in range(0, vocabulary, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < vocabulary
        z = tl.load(logits + row * row_stride + column.to(tl.int64) * column_stride, mask=inside, other=float("-inf"))
        z = z.to(scale.dtype)
        possible = z != float("-inf")
        if KEPT:
            possible = possible & kept_bits(kept + row * kept_stride, column, inside)
        x = softcapped(tl.where(possible, z, 0.0), softcap, CAPPED) * scale
        maximum, total, weighted = absorbed(x, possible, maximum, total, weighted)
    safe = tl.where(total == 0, 1.0, total)
    log_total = tl.log(safe)
    tl.store(logsumexp + row, maximum + log_total)
    tl.store(entropy + row, log_total - weighted / safe)


@triton.jit
def backward_kernel(
    logits,
    gradient,
    inverse,
    kept,
    mask,
    a,
    b,
    logsumexp,
    vocabulary,
    row_stride,
    column_stride,
    gradient_row_stride,
    gradient_column_stride,
    kept_stride,
    softcap,
    CAPPED: tl.constexpr,
    KEPT: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocabulary
    out = gradient + row * gradient_row_stride + column.to(tl.int64) * gradient_column_stride
    if MASKED:
        if tl.load(mask + row) == 0:
            tl.store(out, tl.zeros([BLOCK], gradient.dtype.element_ty), mask=inside)
            return
    scale = tl.load(inverse + row)
    z = tl.load(logits + row * row_stride + column.to(tl.int64) * column_stride, mask=inside, other=float("-inf"))
    z = z.to(scale.dtype)
    possible = z != float("-inf")
    if KEPT:
        possible = possible & kept_bits(kept + row * kept_stride, column, inside)
    z = tl.where(possible, z, 0.0)
    log_p = tl.where(possible, softcapped(z, softcap, CAPPED) * scale - tl.load(logsumexp + row), 0.0)
    dx = tl.exp(log_p) * (tl.load(a + row) + tl.load(b + row) * log_p) * scale * softcap_slope(z, softcap, CAPPED)
    tl.store(out, tl.where(possible, dx, 0.0).to(gradient.dtype.element_ty), mask=inside)


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


def _specialisation(function, dtype, *, everything):
    """What kernels/benchmarks/ahead_of_time.py compiles: the plain kernel, or the one with every option."""
    pointers = {"logits": f"*{dtype}", "gradient": f"*{dtype}", "inverse": "*fp32", "a": "*fp32", "b": "*fp32"}
    pointers |= {"logsumexp": "*fp32", "entropy": "*fp32"}
    pointers |= {"kept": "*i32", "mask": "*u8"} if everything else {"kept": "*fp32", "mask": "*fp32"}
    constants = {"CAPPED": everything, "KEPT": everything, "MASKED": everything, "BLOCK": 4096}
    unit = {"column_stride": 1, "gradient_column_stride": 1}
    names = function.arg_names
    types = {n: pointers.get(n, "fp32" if n == "softcap" else "i32") for n in names if n not in constants | unit}
    aligned = tuple(n for n in types if n in pointers or n in ("row_stride", "gradient_row_stride"))
    return function.__name__, types, constants | {n: 1 for n in unit if n in names}, {"aligned": aligned}


SPECIALISATIONS = {
    f"{function.__name__[:-7]} {dtype}{', every option' if everything else ''}": _specialisation(
        function, dtype, everything=everything
    )
    for function in (forward_kernel, backward_kernel)
    for dtype, everything in (("bf16", False), ("fp32", False), ("bf16", True))
}
