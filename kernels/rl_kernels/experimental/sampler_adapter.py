"""Tokens from another library's sampler, drawn from this operation's kept set: so the log-probability is still that of
the distribution drawn from, which such samplers do not return.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rl_kernels.sampling import torch as ours
from rl_kernels.sampling.cutoff import greedy_is_top_1, kept

# Ids [B] drawn from logits [B, V] over temperature, −inf outside the kept set, by seeds [B] and positions [B].
Draw = Callable[[Tensor, Tensor, Tensor], Tensor]


def forward_with(
    draw: Draw,
    logits: Tensor,
    temperature: Tensor,
    k: Tensor,
    p: Tensor,
    log_min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> tuple[Tensor, ...]:
    """What the torch backend returns, with tokens drawn by ``draw`` but for greedy rows and rows without an entry."""
    found = ours.forward(logits, temperature, k, p, log_min_p, seed, position)
    token, logprobs, full, entropy, count, cutoff, last, logsumexp = found
    x = logits.float() / greedy_is_top_1(temperature, k)[0][:, None]
    random = (temperature > 0) & (token >= 0)
    # A row that is not drawn from must still be a distribution for the sampler.
    drawable = x.masked_fill(~kept(x, cutoff, last), float("-inf")).masked_fill(~random[:, None], 0.0)
    drawn = draw(drawable, seed, position).long()
    # Both logsumexps are the row's: between kept and full log-probability there is a constant.
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
