"""Advantages for pass@k, the reward of the best of k answers, and its unbiased estimator."""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Integer

from rl_fn._groups import Groups, diagonal, peers, rows_of, valid_of, within
from rl_fn._numerics import NOT_NEGATIVE, Array, Number, as_float, divide, numbers, require, same_shape, sqrt
from rl_fn.advantages.group import Rewards, Valid


def passk_advantages(
    rewards: Rewards,
    valid: Valid | None = None,
    *,
    scale: bool = True,
    eps: Number = 1e-6,
    group_ids: Groups | None = None,
) -> Rewards:
    """Only the best answer of the group learns, by how much it is better than the second best.

    (r₁ − r₂) / (std + ε) for the best answer, 0 for the others

    r₁ − r₂ is what the best of the group loses without that answer: leave-one-out for the maximum instead of the mean.

    Args:
        rewards: `*batch G`, one group along the last axis.
        valid: True where an answer exists, `*batch G`; all by default.
        scale: divide by the std of the group's rewards (unbiased, plus ε), or not.
        eps: ε, ≥ 0.
        group_ids: `*batch G`, equal within a group, for ragged groups in any order.

    Returns:
        `*batch G`, zero where invalid. A group of one, and a group with two best answers, give exactly 0.

    Raises:
        ValueError: if eps is negative.

    Reference:
        Tang et al., arXiv 2503.19595, for the lead of the best answer; dividing by the std is verl's ("grpo_passk").

    >>> import jax.numpy as jnp
    >>> passk_advantages(jnp.array([0.25, 1.0, 0.5]), scale=False).tolist()
    [0.0, 0.5, 0.0]

    """
    same_shape(rewards=rewards, valid=valid, group_ids=group_ids)
    (r,) = as_float(rewards)
    (eps,) = numbers(r.dtype, NOT_NEGATIVE, eps=eps)
    exists = valid_of(r, valid)
    together = peers(exists, group_ids)
    others = together & ~diagonal(together.shape)
    compared = exists & jnp.any(others, axis=-1)
    best_other = jnp.max(rows_of(r), axis=-1, where=others, initial=-jnp.inf)
    gain = jnp.where(compared, r, 0.0) - jnp.where(compared, best_other, 0.0)
    # A selection, not a maximum with 0: between equal best answers that would have half a gradient.
    gain = jnp.where(gain <= 0, 0.0, gain)
    return divide(gain, sqrt(within(r, exists, group_ids).variance) + eps) if scale else gain


def _falling_ratio(top: jax.Array, bottom: jax.Array, factors: int) -> jax.Array:
    """C(top, factors) / C(bottom, factors), factor by factor: no factorial overflows, no logarithm rounds."""
    steps = jnp.broadcast_to(jnp.arange(factors, dtype=top.dtype), (*top.shape, factors))
    return jnp.prod(divide(jnp.maximum(top[..., None] - steps, 0.0), jnp.maximum(bottom[..., None] - steps, 0.0)), -1)


def passk_analytic_advantages(
    rewards: Rewards, valid: Valid | None = None, *, k: int, group_ids: Groups | None = None
) -> Rewards:
    """Pass@k as the reward: the mean over all sets of k answers of the group, without drawing sets.

    (mean of R over the sets with answer i − mean of R over all sets) / std of R over all sets;  R = the set's best r

    With rewards of 0 and 1, n answers of which f are wrong, this is the paper's closed form: R̄ = 1 − C(f, k)/C(n, k),
    σ = √(R̄(1 − R̄)); (1 − R̄)/σ for a right answer, (1 − R̄ − C(f − 1, k − 1)/C(n − 1, k − 1))/σ for a wrong one. Here
    rewards may be any numbers: sets are counted by the rank of their best answer. k = 1 is GRPO with the biased std.

    Args:
        rewards: `*batch G`, one group along the last axis.
        valid: True where an answer exists, `*batch G`; all by default.
        k: answers in a set, from 1 to G, static.
        group_ids: `*batch G`, equal within a group, for ragged groups in any order.

    Returns:
        `*batch G`, zero where invalid, in groups of fewer than k answers, and where all sets have the same R (std 0:
        equal rewards, fewer than k answers below the best, k = G).

    Raises:
        ValueError: if k is not between 1 and G.

    Reference:
        Chen et al. (Pass@k Training), arXiv 2508.10751, equations 11 to 15.

    >>> import jax.numpy as jnp
    >>> [round(x, 3) for x in passk_analytic_advantages(jnp.array([1.0, 0.0, 0.0, 0.0]), k=2).tolist()]
    [1.0, -0.333, -0.333, -0.333]

    """
    require(1 <= k <= rewards.shape[-1], f"k must be between 1 and the group's size, got {k} for {rewards.shape}")
    same_shape(rewards=rewards, valid=valid, group_ids=group_ids)
    (r,) = as_float(rewards)
    exists = valid_of(r, valid)
    together = peers(exists, group_ids) & exists[..., :, None]
    group = within(r, exists, group_ids)
    # Distances to the best are exactly 0 for all the best: sets that tie have variance 0, not that of rounding.
    centred = rows_of(group.deviation)
    best = jax.lax.stop_gradient(jnp.max(centred, axis=-1, where=together, initial=-jnp.inf))
    short = jnp.where(exists, group.deviation - jnp.where(exists, best, 0.0), 0.0)
    # Any strict order will do among equal rewards: which of them is the best of a set changes no reward.
    place = jnp.broadcast_to(jnp.arange(r.shape[-1]), r.shape)
    mine, theirs = jnp.broadcast_to(short[..., :, None], together.shape), rows_of(short)
    earlier = rows_of(place) < jnp.broadcast_to(place[..., :, None], together.shape)
    is_below = together & ((theirs < mine) | ((theirs == mine) & earlier))
    below = jnp.sum(is_below, axis=-1, dtype=r.dtype)
    n = group.size
    # Shares of the sets of k: those whose best is j, and of those with i, whose best is i, or j above i.
    best_here = _falling_ratio(below, n - 1.0, k - 1)
    overall = best_here * divide(jnp.full_like(n, k), n)
    best_above = _falling_ratio(below - 1.0, n - 2.0, max(k - 2, 0)) * divide(jnp.full_like(n, k - 1), n - 1.0)
    above = together & ~is_below & ~diagonal(together.shape)
    mean = jnp.sum(jnp.where(together, rows_of(overall * short), 0.0), axis=-1)
    with_me = best_here * short + jnp.sum(jnp.where(above, rows_of(best_above * short), 0.0), axis=-1)
    distance = jnp.where(together, theirs - jnp.broadcast_to(mean[..., None], together.shape), 0.0)
    spread = sqrt(jnp.sum(jnp.where(together, rows_of(overall), 0.0) * jnp.square(distance), axis=-1))
    return jnp.where(exists & (n >= k), divide(with_me - mean, spread), 0.0)


def pass_at_k(correct: Integer[Array, "*batch"], total: Integer[Array, "*batch"], k: int) -> Float[Array, "*batch"]:
    """Probability that one of k answers is right, estimated without bias from more answers.

    1 − C(n − c, k)/C(n, k)

    Args:
        correct: c, right answers, `*batch`.
        total: n, answers in all, `*batch`.
        k: answers that may be given, ≥ 1, static. Where n < k it is pass@n, which is too low: there is no unbiased
            estimate.

    Returns:
        `*batch`, in [0, 1]; 0 where n = 0.

    Raises:
        ValueError: if k is below 1.

    Reference:
        Chen et al. (Codex), arXiv 2107.03374, section 2.1.

    >>> import jax.numpy as jnp
    >>> pass_at_k(jnp.array([1, 0, 3]), jnp.array([4, 4, 4]), 2).tolist()
    [0.5, 0.0, 1.0]

    """
    require(k >= 1, f"k must be at least 1, got {k}")
    same_shape(correct=correct, total=total)
    c, n = as_float(correct, total)
    steps = jnp.broadcast_to(jnp.arange(k, dtype=n.dtype), (*n.shape, k))
    left, wrong = n[..., None] - steps, (n - c)[..., None] - steps
    failures = jnp.where(left > 0, divide(jnp.maximum(wrong, 0.0), jnp.maximum(left, 0.0)), 1.0)
    return 1.0 - jnp.prod(failures, axis=-1)
