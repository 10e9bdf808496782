"""rl_fn's distribution, drawn from with this operation's noise: the answer every other backend is compared with."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

import rl_fn
from rl_fn.logprobs import log_softmax
from rl_kernels.sampling.cutoff import EMPTY, ordered_key
from rl_kernels.sampling.torch import draw, tiled


def forward(
    logits: Tensor, temperature: Tensor, k: Tensor, p: Tensor, log_min_p: Tensor, seed: Tensor, position: Tensor
) -> tuple[Tensor, ...]:
    """Tokens, log-probabilities (truncated, full), entropy, kept count, cutoff, last id kept, full logsumexp: [B]."""
    z, heat, count, mass, share = (
        jnp.asarray(value.cpu().numpy()) for value in (logits.float(), temperature, k.int(), p, log_min_p.exp())
    )
    full = rl_fn.temperature(z, heat)
    truncated = rl_fn.min_p(rl_fn.top_p(rl_fn.top_k(full, count), mass), share)
    x = _tensor(truncated, logits)
    token = draw(tiled(x), seed, position)
    drawn, full_drawn = (_tensor(log_softmax(v), logits).gather(-1, token[:, None]) for v in (truncated, full))
    kept = x > float("-inf")
    # Greedy rows hold 0 where their maximum was.
    scaled = (logits.float() / temperature.where(temperature > 0, 1.0)[:, None]).masked_fill(~kept, float("-inf"))
    lowest = scaled.masked_fill(~kept, float("inf")).amin(-1)
    last = torch.where(kept & (scaled == lowest[:, None]), torch.arange(x.shape[-1], device=x.device), -1).amax(-1)
    empty = ~kept.any(-1) | (logits == float("-inf")).all(-1)
    return (
        token.masked_fill(empty, -1),
        drawn[:, 0].masked_fill(empty, float("-inf")),
        full_drawn[:, 0].masked_fill(empty, float("-inf")),
        _tensor(_entropy(truncated), logits).masked_fill(empty, 0.0),
        kept.sum(-1).masked_fill(empty, 0),
        ordered_key(lowest).long().masked_fill(empty, EMPTY),
        last.masked_fill(empty, -1),
        _tensor(jax.nn.logsumexp(full, axis=-1), logits),
    )


def _entropy(x: jax.Array) -> jax.Array:
    return rl_fn.logits_logprobs(x, jnp.zeros(x.shape[0], jnp.int32)).entropy


def _tensor(x: jax.Array, like: Tensor) -> Tensor:
    return torch.tensor(np.array(x), device=like.device)
