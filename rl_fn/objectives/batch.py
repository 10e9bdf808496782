"""What an objective reads: per-token arrays for its loss, and what its advantages are made of."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Integer

from rl_fn._numerics import Array, Mask, Segments, Tokens, as_float, as_mask


class Batch(NamedTuple):
    """What a loss reads, per token, `*batch T`; masked positions may hold anything.

    logprobs (π, differentiated), old_logprobs (π_old, which the update started from: AReaL's proximal policy),
    advantages, mask; rollout_logprobs (μ, which sampled), ref_logprobs, entropies (differentiated), segment_ids (packed
    rows). For a critic: values (differentiated), old_values, returns. correct: tokens of answers that earned the reward
    (VAPO). noise: uniform numbers (Clip-Cov's draw).
    """

    logprobs: Tokens
    old_logprobs: Tokens
    advantages: Tokens
    mask: Mask
    rollout_logprobs: Tokens | None = None
    ref_logprobs: Tokens | None = None
    entropies: Tokens | None = None
    segment_ids: Segments | None = None
    values: Tokens | None = None
    old_values: Tokens | None = None
    returns: Tokens | None = None
    correct: Mask | None = None
    noise: Tokens | None = None


class Rollouts(NamedTuple):
    """What an advantage reads: one rollout batch, groups along an axis; most estimators read the first two.

    rewards: `*batch G`, one per answer (`*batch R G` for GDPO, `*batch G S` per step for GiGPO). mask: `*batch G T`
    (`*batch G S T` for GiGPO), as are old_logprobs, ref_logprobs, teacher_logprobs and token_rewards.
    greedy_rewards: `*batch`, of the greedy answer (ReMax). state_ids: `*batch G S`, equal where two steps of a group
    began in the same state (GiGPO).
    """

    rewards: Float[Array, "..."] | None
    mask: Bool[Array, "..."]
    token_rewards: Float[Array, "..."] | None = None
    old_logprobs: Float[Array, "..."] | None = None
    ref_logprobs: Float[Array, "..."] | None = None
    teacher_logprobs: Float[Array, "..."] | None = None
    greedy_rewards: Float[Array, "..."] | None = None
    state_ids: Integer[Array, "..."] | None = None


_NOT_FLOAT = ("mask", "segment_ids", "correct")


def sanitised(batch: Batch) -> Batch:
    """Return the batch in one dtype, zero where masked: what is there can then reach no value and no gradient."""
    mask = as_mask(batch.mask)
    names = [
        name for name, value in zip(batch._fields, batch, strict=True) if value is not None and name not in _NOT_FLOAT
    ]
    arrays = as_float(*(getattr(batch, name) for name in names))
    kept = {name: jnp.where(mask, x, 0.0) for name, x in zip(names, arrays, strict=True)}
    correct = None if batch.correct is None else mask & as_mask(batch.correct)
    return batch._replace(mask=mask, correct=correct, **kept)


def detached(batch: Batch, *, except_for: tuple[str, ...]) -> Batch:
    """Stop gradients in all other fields: with old_logprobs=logprobs, undetached, the ratio would have no gradient."""
    stopped = {
        name: jax.lax.stop_gradient(value)
        for name, value in zip(batch._fields, batch, strict=True)
        if value is not None and name not in except_for
    }
    return batch._replace(**stopped)
