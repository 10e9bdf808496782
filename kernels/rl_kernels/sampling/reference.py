"""rl_fn's distribution, drawn from with this operation's noise: the definition that other backends are compared
with."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

import rl_fn
from rl_fn.logprobs.row_state import log_softmax
from rl_kernels.sampling.cutoff import EMPTY, Parameters, ordered_key
from rl_kernels.sampling.torch import at, drawn_place, drawn_tile, sums, tile_ids


def forward(logits: Tensor, parameters: Parameters) -> tuple[Tensor, ...]:
    """Tokens, log-probabilities (truncated, full), entropy, number of allowed tokens, the cutoff's key and id, full
    logsumexp: [B].
    """
    temperature, k, p, log_min_p, seed, position = parameters
    z, heat, count, mass, share = (
        jnp.asarray(value.cpu().numpy()) for value in (logits.float(), temperature, k.int(), p, log_min_p.exp())
    )
    x, *log_p, entropy, logsumexp = (_tensor(value, logits) for value in _distribution(z, heat, count, mass, share))
    ids = tile_ids(drawn_tile(sums(x), seed, position), x.shape[-1])
    token = ids.gather(-1, drawn_place(at(x, ids), ids, seed, position))[:, 0]
    drawn, full_drawn = (value.gather(-1, token[:, None]) for value in log_p)
    allowed = x > float("-inf")
    # rl_fn's greedy rows hold 0 in place of their maximum.
    scaled = (logits.float() / temperature.where(temperature > 0, 1.0)[:, None]).masked_fill(~allowed, float("-inf"))
    lowest = scaled.masked_fill(~allowed, float("inf")).amin(-1)
    last = torch.where(allowed & (scaled == lowest[:, None]), torch.arange(x.shape[-1], device=x.device), -1).amax(-1)
    empty = ~allowed.any(-1) | (logits == float("-inf")).all(-1)
    return (
        token.masked_fill(empty, -1),
        drawn[:, 0].masked_fill(empty, float("-inf")),
        full_drawn[:, 0].masked_fill(empty, float("-inf")),
        entropy.masked_fill(empty, 0.0),
        allowed.sum(-1).masked_fill(empty, 0),
        ordered_key(lowest).long().masked_fill(empty, EMPTY),
        last.masked_fill(empty, -1),
        logsumexp,
    )


@jax.jit
def _distribution(z, heat, count, mass, share):
    """Truncated logits, truncated and full log-probabilities, entropy, full logsumexp."""
    full = rl_fn.temperature(z, heat)
    truncated = rl_fn.min_p(rl_fn.top_p(rl_fn.top_k(full, count), mass), share)
    entropy = rl_fn.logits_logprobs(truncated, jnp.zeros(z.shape[0], jnp.int32)).entropy
    return truncated, log_softmax(truncated), log_softmax(full), entropy, jax.nn.logsumexp(full, axis=-1)


def _tensor(x: jax.Array, like: Tensor) -> Tensor:
    return torch.tensor(np.array(x), device=like.device)
