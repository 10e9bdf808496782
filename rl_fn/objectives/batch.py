"""What an objective reads: per-token arrays for its loss, and what its advantages are made of."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Integer

from rl_fn._numerics import Array, Mask, Segments, Tokens, as_float, as_mask, has_shape, same_shape


class Batch(NamedTuple):
    """What a loss reads, per token, `*batch T`, all of one shape; masked positions may hold anything.

    logprobs (π, differentiated), old_logprobs (π_old, which the update started from: AReaL's proximal policy),
    advantages, mask; rollout_logprobs (μ, which sampled), ref_logprobs, entropies (differentiated), segment_ids (packed
    rows). For a critic: values (differentiated), old_values, returns. correct: tokens of completions that earned the
    reward (VAPO). noise: uniform numbers (Clip-Cov's draw).
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

    rewards: `*batch G`, one per completion (`*batch R G` for GDPO, `*batch G S` per step for GiGPO). mask: `*batch G T`
    (`*batch G S T` for GiGPO), as are old_logprobs, ref_logprobs, teacher_logprobs, token_rewards and values.
    token_rewards stand in for rewards where returns are computed (GAE, REINFORCE++). values: the critic's (GAE).
    greedy_rewards: `*batch`, of the greedy completion (ReMax). state_ids: `*batch G S`, equal where two steps of a
    group began in the same state (GiGPO). segment_ids: packed rows (GAE). penalties: taken off the rewards token by
    token, written by an objective with reward_kl.

    valid: `*batch G`, False for a completion that failed: it has advantage 0 and changes nothing for the others.
    A completion without a token counts in its group with its reward unless it is not valid: valid=mask.any(-1) leaves
    all of them out. group_ids: `*batch G`, equal within a group, for ragged groups in any order.
    """

    rewards: Float[Array, "..."] | None
    mask: Bool[Array, "..."]
    token_rewards: Float[Array, "..."] | None = None
    old_logprobs: Float[Array, "..."] | None = None
    ref_logprobs: Float[Array, "..."] | None = None
    teacher_logprobs: Float[Array, "..."] | None = None
    greedy_rewards: Float[Array, "..."] | None = None
    state_ids: Integer[Array, "..."] | None = None
    values: Float[Array, "..."] | None = None
    segment_ids: Integer[Array, "..."] | None = None
    penalties: Float[Array, "..."] | None = None
    valid: Bool[Array, "..."] | None = None
    group_ids: Integer[Array, "..."] | None = None


def counted(rollouts: Rollouts) -> jax.Array:
    """Return the mask without the completions that are not valid."""
    mask = as_mask(rollouts.mask)
    if rollouts.valid is None:
        return mask
    valid = as_mask(rollouts.valid)
    return mask & valid.reshape(*valid.shape, *[1] * (mask.ndim - valid.ndim))


def rewards_of(rollouts: Rollouts) -> Array:
    """Return the rewards, less the penalties of all of their tokens."""
    assert rollouts.rewards is not None
    if rollouts.penalties is None:
        return rollouts.rewards
    return as_float(rollouts.rewards)[0] - jnp.sum(rollouts.penalties, axis=-1)


def token_rewards_of(rollouts: Rollouts) -> jax.Array:
    """Return token_rewards, or each reward on the last counted token of its completion, less the penalties."""
    if rollouts.token_rewards is not None:
        (token_rewards,) = as_float(rollouts.token_rewards)
    else:
        assert rollouts.rewards is not None
        token_rewards = on_last_token(rollouts.rewards, rollouts.mask)
    return token_rewards if rollouts.penalties is None else token_rewards - rollouts.penalties


def on_last_token(per_completion: Array, mask: Array) -> jax.Array:
    """Return `*batch G T`: each completion's number on its last counted token, else 0."""
    where = as_mask(mask)
    (r,) = as_float(per_completion)
    has_shape(where.shape[:-1], **{"one number for each row of the mask": r})
    later = jnp.cumsum(where[..., ::-1], axis=-1)[..., ::-1]
    return jnp.where(where & (later == 1), r[..., None], 0.0)


def on_every_token(per_completion: Array, mask: Array) -> jax.Array:
    """Return `*batch G T`: each completion's number on its counted tokens, else 0."""
    has_shape(mask.shape[:-1], **{"one number for each row of the mask": per_completion})
    return jnp.where(as_mask(mask), jnp.asarray(per_completion)[..., None], 0.0)


_NOT_FLOAT = ("mask", "segment_ids", "correct")


def sanitised(batch: Batch) -> Batch:
    """Return the batch in one dtype, zero where masked: what is there can then reach no value and no gradient."""
    mask = as_mask(batch.mask)
    given = {name: value for name, value in batch._asdict().items() if value is not None}
    same_shape(**{"mask": mask, **given})
    floats = [name for name in given if name not in _NOT_FLOAT]
    arrays = as_float(*(given[name] for name in floats))
    kept = {name: jnp.where(mask, x, 0.0) for name, x in zip(floats, arrays, strict=True)}
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


def without_weight(batch: Batch, weights: jax.Array) -> Batch:
    """Return the batch whose tokens of weight 0 are finite, so that 0 · ∞ and 0 · NaN enter no loss and no gradient.

    Only what is not finite changes: the losses of sequences read tokens of weight 0 too.
    """
    out = {}
    for name, value in batch._asdict().items():
        if value is not None and name not in _NOT_FLOAT:
            out[name] = jnp.where((weights == 0) & ~jnp.isfinite(value), 0.0, value)
    return batch._replace(**out)
