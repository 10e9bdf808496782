"""The backward's loop over blocks, which backends share: they differ in the pass from logits to their gradient."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rl_kernels.common.arguments import Problem
from rl_kernels.common.blocks import blocks, cost, row_blocks, tiles
from rl_kernels.common.matmul import accumulate, matmul, native
from rl_kernels.common.row_state import Coefficients, coefficients, finite, token_gradients
from rl_kernels.common.token_masks import allowed_tile

# Log-probabilities [N, K], entropy [N] and logsumexp [N]; or the cotangents of the three.
Results = tuple[Tensor, Tensor, Tensor]

# dL/dhidden, dL/dweight and dL/dbias, None where it is not needed.
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Needed(NamedTuple):
    """Which gradients the backward computes: a frozen head needs none of its weight, which is a third of the GEMMs."""

    hidden: bool = True
    weight: bool = True
    bias: bool = True


class Block(NamedTuple):
    """What belongs to a block of R rows by W tokens of the vocabulary, beside its logits.

    ``allowed`` bool [R, W]; ``bias`` [W], which the logits do not contain yet; ``tokens`` [R, K], counted from the
    block's first token, and ``own`` [R, K], dL/dx there; ``logsumexp`` [R] is finite; ``dtype`` is the gradient's.
    """

    allowed: Tensor | None
    bias: Tensor | None
    tokens: Tensor
    own: Tensor
    inv_temperature: Tensor
    softcap: float | None
    coefficients: Coefficients
    logsumexp: Tensor
    dtype: torch.dtype


# dL/dlogits from logits [R, W], which may be overwritten.
Dlogits = Callable[[Tensor, Block], Tensor]


def backward(
    problem: Problem,
    workspace: int,
    outputs: Results,
    cotangents: Results,
    needed: Needed,
    dlogits: Dlogits,
    numbers: int,
) -> Gradients:
    """dL/dhidden (of these tokens of the vocabulary), dL/dweight, dL/dbias, summed in float32 (float64 for float64).

    ``numbers`` is how many of the arithmetic's numbers ``dlogits`` holds at once for each logit. The blocks do not
    depend on ``needed``: a gradient has the same bits whether or not others are computed beside it.
    """
    hidden, weight, bias, rows, start = problem
    logprobs, entropy, logsumexp = outputs
    g, h, z = cotangents
    # A token that cannot be sampled takes no gradient: −inf has none.
    g = g.masked_fill(logprobs == float("-inf"), 0.0)
    scalars = coefficients(g, h, z, entropy)
    dtype = rows.inv_temperature.dtype
    d_hidden = torch.zeros_like(hidden) if needed.hidden else None
    d_weight = torch.zeros(weight.shape, dtype=dtype, device=weight.device) if needed.weight else None
    d_bias = torch.zeros(bias.shape, dtype=dtype, device=bias.device) if bias is not None and needed.bias else None
    width = rows.inv_temperature.element_size()
    # A GEMM of half-precision operands takes dL/dlogits in half precision: a copy beside the logits, half as wide.
    narrow = weight.dtype if native(hidden, weight).matmul else dtype
    logit = numbers * width + (0 if narrow == dtype else narrow.itemsize)
    price = cost(hidden, weight, rows.allowed_tokens, width, logit, gradients=True)
    size = blocks(len(weight), weight.shape[1], workspace, price)
    for index in row_blocks(len(hidden), rows.mask, size.tokens):
        here, mine = hidden[index], rows.take(index)
        sums = torch.zeros(here.shape, dtype=dtype, device=here.device) if needed.hidden else None
        ours = Coefficients(scalars.a[index], scalars.b[index])
        own = token_gradients(ours, g[index], mine.tokens, logprobs[index])
        base = finite(logsumexp[index])
        for first, last in tiles(len(weight), size.vocab):
            block = Block(
                allowed_tile(rows.allowed_tokens, index, start + first, start + last),
                None if bias is None else bias[first:last],
                mine.tokens - (start + first),
                own,
                mine.inv_temperature,
                rows.softcap,
                ours,
                base,
                narrow,
            )
            dz = dlogits(matmul(here, weight[first:last].T, dtype), block)
            if sums is not None:
                accumulate(sums, dz, weight[first:last])
            if d_weight is not None:
                accumulate(d_weight[first:last], dz.T, here)
            if d_bias is not None:
                d_bias[first:last] += dz.sum(0, dtype=dtype)
            # Freed before the next block's logits are made.
            del dz, block
        if d_hidden is not None and sums is not None:
            d_hidden[index] = sums.to(hidden.dtype)
    return (
        d_hidden,
        None if d_weight is None else d_weight.to(weight.dtype),
        None if bias is None or d_bias is None else d_bias.to(bias.dtype),
    )
