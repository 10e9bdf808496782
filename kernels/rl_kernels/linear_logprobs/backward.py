"""The backward's loop over blocks, which backends share: they differ in the pass from logits to their gradient."""

from collections.abc import Callable

import torch
from torch import Tensor

from rl_kernels.common.blocks import blocks, cost, row_blocks, tiles
from rl_kernels.common.matmul import accumulate, native, product
from rl_kernels.common.row_state import Coefficients, coefficients, finite, token_gradients
from rl_kernels.common.scaling import kept_tile

# dL/dlogits, from a block of logits (bias not yet added; it may be overwritten), its kept entries, its bias, the tokens
# counted from its first entry, their own dL/dx, and the rows' inverse temperature, coefficients and finite logsumexp.
Dlogits = Callable[
    [Tensor, Tensor | None, Tensor | None, Tensor, Tensor, Tensor, Coefficients, Tensor, float | None, torch.dtype],
    Tensor,
]


def backward(
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
    outputs: tuple[Tensor, Tensor, Tensor],
    cotangents: tuple[Tensor, Tensor, Tensor],
    dlogits: Dlogits,
    numbers: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dL/dhidden of these entries, dL/dweight, dL/dbias, each summed in float32 (float64 for float64).

    ``numbers`` is how many of the arithmetic's numbers ``dlogits`` holds at once for each logit.
    """
    logprobs, entropy, logsumexp = outputs
    g, h, z = cotangents
    # A token that cannot be drawn takes no gradient: −inf has none.
    g = g.masked_fill(logprobs == float("-inf"), 0.0)
    row = coefficients(g, h, z, entropy)
    dtype = inverse.dtype
    d_hidden = torch.zeros_like(hidden)
    d_weight = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
    d_bias = None if bias is None else torch.zeros(bias.shape, dtype=dtype, device=bias.device)
    width = inverse.element_size()
    # What a product of halves takes without being widened is half as wide as the logits, and beside them.
    narrow = weight.dtype if native(hidden, weight).product else dtype
    logit = numbers * width + (0 if narrow == dtype else narrow.itemsize)
    size = blocks(
        len(weight), weight.shape[1], workspace, cost(hidden, weight, allowed_tokens, width, logit, gradients=True)
    )
    for rows in row_blocks(len(hidden), mask, size.rows):
        here = hidden[rows]
        sums = torch.zeros(here.shape, dtype=dtype, device=here.device)
        ours = Coefficients(row.a[rows], row.b[rows])
        own = token_gradients(ours, g[rows], tokens[rows], logprobs[rows])
        base = finite(logsumexp[rows])
        for first, last in tiles(len(weight), size.entries):
            dz = dlogits(
                product(here, weight[first:last].T, dtype),
                kept_tile(allowed_tokens, rows, start + first, start + last),
                None if bias is None else bias[first:last],
                tokens[rows] - (start + first),
                own,
                inverse[rows],
                ours,
                base,
                softcap,
                narrow,
            )
            accumulate(sums, dz, weight[first:last])
            accumulate(d_weight[first:last], dz.T, here)
            if d_bias is not None:
                d_bias[first:last] += dz.sum(0, dtype=dtype)
            # Not alive beside the next block's logits.
            del dz
        d_hidden[rows] = sums.to(hidden.dtype)
    return d_hidden, d_weight.to(weight.dtype), None if bias is None or d_bias is None else d_bias.to(bias.dtype)
