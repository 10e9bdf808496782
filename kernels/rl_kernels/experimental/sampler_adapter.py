"""Tokens from another library's sampler, drawn from the tokens that this operation allows. Such samplers return no
log-probability; that of the distribution they drew from is computed here.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rl_kernels.sampling import torch as ours
from rl_kernels.sampling.cutoff import Parameters, allowed, greedy_is_top_1

# Ids [B] drawn from logits [B, V] over temperature, −inf for what is not allowed, by seeds [B] and positions [B].
Draw = Callable[[Tensor, Tensor, Tensor], Tensor]


def forward_with(
    draw: Draw,
    logits: Tensor,
    parameters: Parameters,
) -> tuple[Tensor, ...]:
    """What the torch backend returns, with tokens drawn by ``draw`` but in greedy rows and rows without a token."""
    temperature = parameters.temperature
    found = ours.forward(logits, parameters)
    token, logprobs, full, entropy, count, cutoff, last, logsumexp = found
    x = logits.float() / greedy_is_top_1(temperature, parameters.k)[0][:, None]
    random = (temperature > 0) & (token >= 0)
    # Rows that are not drawn from are given to the sampler as uniform distributions.
    drawable = x.masked_fill(~allowed(x, cutoff, last), float("-inf")).masked_fill(~random[:, None], 0.0)
    drawn = draw(drawable, parameters.seed, parameters.position).long()
    # Truncated and full log-probability differ by a constant of the row.
    full_drawn = x.gather(-1, drawn[:, None])[:, 0] - logsumexp
    return (
        torch.where(random, drawn, token),
        torch.where(random, full_drawn + (logprobs - full), logprobs),
        torch.where(random, full_drawn, full),
        entropy,
        count,
        cutoff,
        last,
        logsumexp,
    )
