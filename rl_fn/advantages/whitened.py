"""Advantages normalised over the whole batch: REINFORCE++ with and without a group baseline, and GDPO."""

import jax.numpy as jnp
from jaxtyping import Bool, Float

from rl_fn._groups import Groups, valid_of, within
from rl_fn._numerics import (
    NOT_NEGATIVE,
    Array,
    Mask,
    Number,
    Segments,
    Tokens,
    as_float,
    as_ids,
    as_mask,
    divide,
    has_shape,
    numbers,
    sqrt,
)
from rl_fn.advantages.group import Rewards, Valid
from rl_fn.advantages.returns import discounted_returns, whiten


def reinforce_pp_advantages(
    token_rewards: Tokens,
    mask: Mask,
    *,
    gamma: Number = 1.0,
    eps: Number = 1e-8,
    segment_ids: Segments | None = None,
) -> Tokens:
    """REINFORCE++: returns, whitened over all tokens of the batch; no critic and no group.

    (Gₜ − mean) / √(var + ε);  Gₜ = rₜ + γ Gₜ₊₁

    The paper's rewards hold a KL penalty per token; put it into token_rewards.

    Args:
        token_rewards: r, `*batch T`; all that is passed in is the batch.
        mask: True where a token counts, `*batch T`; the recursion jumps over the others.
        gamma: discount per counted token, in [0, 1].
        eps: ε ≥ 0, added to the variance.
        segment_ids: `*batch T`, for several sequences packed into a row.

    Returns:
        `*batch T`, zero where masked. One token and equal returns give exactly 0.

    Raises:
        ValueError: if gamma is outside [0, 1] or eps is negative.

    Reference:
        Hu et al. (REINFORCE++), arXiv 2501.03262, equations 4 and 5 of its version 9.

    >>> import jax.numpy as jnp
    >>> reinforce_pp_advantages(jnp.ones(3), jnp.ones(3, bool)).round(4).tolist()
    [1.0, 0.0, -1.0]

    """
    returns = discounted_returns(token_rewards, mask, gamma=gamma, segment_ids=segment_ids)
    return whiten(returns, mask, eps=eps)


def reinforce_pp_baseline_advantages(
    rewards: Rewards,
    mask: Bool[Array, "*batch G T"],
    valid: Valid | None = None,
    *,
    eps: Number = 1e-8,
    group_ids: Groups | None = None,
) -> Float[Array, "*batch G T"]:
    """REINFORCE++ with a group baseline: the mean of the group off, then whitened over the batch's tokens.

    (dᵢ − mean) / √(var + ε) at every token of answer i;  dᵢ = rᵢ − mean of the group

    Unlike GRPO it divides by the spread of the batch, not of the group. Mean and variance are over tokens: a long
    answer weighs more.

    Args:
        rewards: `*batch G`, one group along the last axis; all that is passed in is the batch.
        mask: True where a token counts, `*batch G T`. An answer without a counted token is in the mean of its group
            like any other; `valid=mask.any(-1)` leaves it out.
        valid: True where an answer exists, `*batch G`; all by default.
        eps: ε ≥ 0, added to the variance.
        group_ids: `*batch G`, equal within a group, for ragged groups in any order.

    Returns:
        `*batch G T`, zero where masked or invalid. Groups of one and of equal rewards give exactly 0 if all are such.

    Raises:
        ValueError: if eps is negative.

    Reference:
        Hu et al. (REINFORCE++), arXiv 2501.03262, equations 6 and 7 of its version 9.

    >>> import jax.numpy as jnp
    >>> advantages = reinforce_pp_baseline_advantages(jnp.array([1.0, 0.0]), jnp.ones((2, 2), bool))
    >>> [[round(x, 3) for x in answer] for answer in advantages.tolist()]
    [[0.866, 0.866], [-0.866, -0.866]]

    """
    has_shape(mask.shape[:-1], rewards=rewards, valid=valid, group_ids=group_ids)
    (r,) = as_float(rewards)
    exists = valid_of(r, valid)
    counted = as_mask(mask) & exists[..., None]
    centred = within(r, exists, group_ids).deviation
    return whiten(jnp.broadcast_to(centred[..., None], counted.shape), counted, eps=eps)


def gdpo_advantages(
    rewards: Float[Array, "*batch R G"],
    weights: Float[Array, " R"] | None = None,
    valid: Valid | None = None,
    *,
    eps: Number = 1e-6,
    group_ids: Groups | None = None,
) -> Rewards:
    """GDPO: each of several rewards is normalised in its group, and their weighted sum over the batch.

    (S − mean of the batch) / √(var of the batch + ε);  S = Σₖ wₖ (rₖ − mean)/(std + ε)

    GRPO of Σ wₖ rₖ gives answers with different rewards the same advantage when the sums are equal, and the reward
    with the largest spread decides; here none does. Stds unbiased. The batch is counted by answers, not by tokens.

    Args:
        rewards: R rewards of one group along the last axis, `*batch R G`; all that is passed in is the batch.
        weights: w, one a reward, `R`; all 1 by default.
        valid: True where an answer exists, `*batch G`; all by default.
        eps: ε ≥ 0.
        group_ids: `*batch G`, equal within a group, for ragged groups in any order.

    Returns:
        `*batch G`, zero where invalid. A reward that is equal in the whole group adds exactly 0 to its answers' S.

    Raises:
        ValueError: if eps is negative.

    Reference:
        Liu et al. (GDPO), arXiv 2601.05242, equations 4 to 7.

    >>> import jax.numpy as jnp
    >>> right, brief = jnp.array([1.0, 0.0, 1.0, 0.0]), jnp.array([0.0, 0.0, 0.1, 0.0])
    >>> [round(x, 2) for x in gdpo_advantages(jnp.stack([right, brief])).tolist()]
    [0.21, -0.77, 1.33, -0.77]

    """
    answers = (*rewards.shape[:-2], rewards.shape[-1])
    has_shape(rewards.shape[-2:-1], weights=weights)
    has_shape(answers, valid=valid, group_ids=group_ids)
    r, w = as_float(rewards, jnp.ones(rewards.shape[-2]) if weights is None else weights)
    (eps,) = numbers(r.dtype, NOT_NEGATIVE, eps=eps)
    exists = valid_of(r[..., 0, :], valid)
    each = jnp.broadcast_to(exists[..., None, :], r.shape)
    ids = None if group_ids is None else jnp.broadcast_to(as_ids(group_ids)[..., None, :], r.shape)
    group = within(r, each, ids)
    normalised = divide(group.deviation, sqrt(group.variance) + eps)
    column = w.reshape((*(1,) * (r.ndim - 2), -1, 1))
    total = jnp.sum(column * normalised, axis=-2)
    return whiten(total, exists, eps=eps)
