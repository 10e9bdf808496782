"""Advantages that differ inside an answer, from a group and without a critic: per token, and per step of an agent."""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Integer

from rl_fn._groups import Groups, within
from rl_fn._numerics import (
    ANY,
    NOT_NEGATIVE,
    Array,
    Number,
    as_float,
    as_ids,
    as_mask,
    deviations,
    divide,
    has_shape,
    numbers,
    require,
    same_shape,
    sqrt,
)
from rl_fn.advantages.baselines import opo_advantages
from rl_fn.advantages.group import Valid
from rl_fn.advantages.returns import discounted_returns

GroupTokens = Float[Array, "*batch G T"]
GroupMask = Bool[Array, "*batch G T"]
STEP_SCALES = ("group", "none")


def optimal_token_baseline_advantages(
    token_rewards: GroupTokens,
    logprobs: GroupTokens,
    sum_squared_probs: GroupTokens,
    mask: GroupMask,
    valid: Valid | None = None,
    *,
    gamma: Number = 1.0,
    group_ids: Groups | None = None,
) -> GroupTokens:
    """Give every token its own baseline: the mean return of the group at that position, weighted by gradient energy.

    Gₜ − Bₜ;  Bₜ = Σᵢ Gᵢₜ Wᵢₜ / Σᵢ Wᵢₜ;  Wₜ = Σ_{s≤t} (1 − 2πₛ + Σᵥ πₛᵥ²)

    A term of W is the squared norm of the gradient of log πₛ in the logits, so Bₜ minimises Σᵢ Wₜ(Gₜ − B)², the
    variance if gradients in the parameters grow as those in the logits do. The sums run over the answers of the group
    that have a counted token at position t; an answer is in its own baseline. No gradient flows into W.

    In the tail that one answer alone reaches its return is its baseline, and the advantage 0. verl sets the baseline of
    that tail to 0 by default (`handle_zero_tail`): the advantage there is the return.

    Args:
        token_rewards: r, `*batch G T`, one group along the axis before the last.
        logprobs: log π of the sampled tokens, in nats, `*batch G T`.
        sum_squared_probs: Σᵥ π² over the vocabulary, `*batch G T`.
        mask: True where a token counts, `*batch G T`; an answer counts at a position if its token there does.
        valid: True where an answer exists, `*batch G`; all by default.
        gamma: discount per counted token of the return G, in [0, 1].
        group_ids: `*batch G`, equal within a group, for ragged groups in any order; takes memory that grows with G² T,
            which dense groups with `valid` do not.

    Returns:
        `*batch G T`, zero where masked or invalid, where no other answer reaches t, and where all W are 0. Equal
        returns give exactly 0.

    Raises:
        ValueError: if gamma is outside [0, 1].

    Reference:
        Optimal Token Baseline, arXiv 2602.07078, in the form of verl's documentation; the paper was not checked.

    >>> import jax.numpy as jnp
    >>> rewards, logprobs = jnp.array([[0.0, 1.0], [0.0, 0.0]]), jnp.log(jnp.full((2, 2), 0.5))
    >>> squares = jnp.array([[0.75, 0.75], [0.25, 0.25]])
    >>> advantages = optimal_token_baseline_advantages(rewards, logprobs, squares, jnp.ones((2, 2), bool))
    >>> [[round(x, 3) for x in answer] for answer in advantages.tolist()]
    [[0.25, 0.25], [-0.75, -0.75]]

    """
    same_shape(token_rewards=token_rewards, logprobs=logprobs, sum_squared_probs=sum_squared_probs, mask=mask)
    has_shape(mask.shape[:-1], valid=valid, group_ids=group_ids)
    r, new, squares = as_float(token_rewards, logprobs, sum_squared_probs)
    counted = as_mask(mask) if valid is None else as_mask(mask) & as_mask(valid)[..., None]
    new, squares = jnp.where(counted, new, 0.0), jnp.where(counted, squares, 1.0)
    # The same sum of two terms that cannot be negative: rounding may not make a weight so.
    energy = jnp.square(jnp.expm1(new)) + jnp.maximum(squares - jnp.exp(2.0 * new), 0.0)
    weight = jax.lax.stop_gradient(jnp.where(counted, jnp.cumsum(energy, axis=-1), 0.0))
    returns = discounted_returns(r, counted, gamma=gamma)
    if group_ids is not None:
        columns = [jnp.swapaxes(x, -1, -2) for x in (returns, weight, counted)]
        ids = jnp.broadcast_to(as_ids(group_ids)[..., None, :], columns[0].shape)
        return jnp.swapaxes(opo_advantages(*columns, group_ids=ids), -1, -2)
    # Weighted mean of distances to the plain mean: a common offset of the returns costs no precision.
    _, deviation, _ = deviations(returns, counted, axis=-2)
    total = jnp.sum(weight, axis=-2, keepdims=True)
    shift = divide(jnp.sum(weight * deviation, axis=-2, keepdims=True), total)
    return jnp.where(counted & (total != 0), deviation - shift, 0.0)


def step_group_advantages(
    rewards: Float[Array, "*batch G S"],
    state_ids: Integer[Array, "*batch G S"],
    mask: Bool[Array, "*batch G S"],
    valid: Valid | None = None,
    *,
    gamma: Number = 0.95,
    weight: Number = 1.0,
    scale: str = "group",
    eps: Number = 1e-6,
    group_ids: Groups | None = None,
) -> Float[Array, "*batch G S"]:
    """GiGPO: an episode against its group, plus each step against the steps taken from the same state.

    Aᴱ + ω Aˢ;  Aᴱ = (R − mean)/(std + ε) over the group's episodes, R = Σₜ rₜ;
    Aˢ = (Gₜ − mean)/(std + ε) over the group's steps with the same state, Gₜ = rₜ + γ Gₜ₊₁

    A state that the group met once has Aˢ = 0. Every visit counts, also several of one episode. Std unbiased.

    Args:
        rewards: r of S steps of G episodes that began alike, `*batch G S`.
        state_ids: equal where two steps of a group started in the same state, `*batch G S`; made by the caller from
            the observations.
        mask: True where a step was taken, `*batch G S`.
        valid: True where an episode exists, `*batch G`; by default those with a step, since the others have no reward.
        gamma: discount per step of G, in [0, 1]; R is not discounted.
        weight: ω, of the step's advantage.
        scale: "group" divides by std + ε, "none" does not divide.
        eps: ε, ≥ 0.
        group_ids: `*batch G`, equal within a group, for ragged groups in any order.

    Returns:
        `*batch G S`, one number a step (for all of its tokens), zero where masked or invalid.

    Raises:
        ValueError: for an unknown scale, a negative eps, or gamma outside [0, 1].

    Reference:
        Feng et al. (GiGPO), arXiv 2505.10978, equations 3, 5, 7 and 8.

    >>> import jax.numpy as jnp
    >>> rewards, states = jnp.array([[0.0, 1.0], [0.0, 0.0]]), jnp.array([[7, 8], [7, 9]])
    >>> taken = jnp.ones((2, 2), bool)
    >>> step_group_advantages(rewards, states, taken, gamma=0.5, scale="none").tolist()
    [[0.75, 0.5], [-0.75, -0.5]]

    """
    require(scale in STEP_SCALES, f"scale must be one of {STEP_SCALES}, got {scale!r}")
    same_shape(rewards=rewards, state_ids=state_ids, mask=mask)
    has_shape(mask.shape[:-1], valid=valid, group_ids=group_ids)
    (r,) = as_float(rewards)
    (eps,) = numbers(r.dtype, NOT_NEGATIVE, eps=eps)
    (weight,) = numbers(r.dtype, ANY, weight=weight)
    taken = as_mask(mask)
    exists = jnp.any(taken, axis=-1) if valid is None else as_mask(valid)
    taken = taken & exists[..., None]

    def relative(x: jax.Array, exists: jax.Array, ids: Array | tuple[Array, ...] | None) -> jax.Array:
        group = within(x, exists, ids)
        return group.deviation if scale == "none" else divide(group.deviation, sqrt(group.variance) + eps)

    total = jnp.sum(jnp.where(taken, r, 0.0), axis=-1)
    episode = relative(total, exists, group_ids)
    flat = (*r.shape[:-2], r.shape[-2] * r.shape[-1])
    returns = discounted_returns(r, taken, gamma=gamma)
    places = as_ids(state_ids).reshape(flat)
    if group_ids is not None:
        places = (places, jnp.broadcast_to(as_ids(group_ids)[..., None], r.shape).reshape(flat))
    step = relative(returns.reshape(flat), taken.reshape(flat), places)
    return jnp.where(taken, episode[..., None] + weight * step.reshape(r.shape), 0.0)
