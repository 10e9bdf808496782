"""Outcome advantages by a baseline or a scale of the group other than GRPO's and RLOO's."""

import jax.numpy as jnp
from jaxtyping import Float, Integer, Real

from rl_fn._groups import diagonal, own, peers, rows_of, valid_of
from rl_fn._numerics import (
    POSITIVE,
    Array,
    Number,
    as_float,
    deviations,
    divide,
    has_shape,
    numbers,
    require,
    same_shape,
    sqrt,
    variance,
)
from rl_fn.advantages.group import Rewards, Valid

Groups = Integer[Array, "*batch G"]


def remax_advantages(rewards: Rewards, greedy_rewards: Float[Array, "..."], valid: Valid | None = None) -> Rewards:
    """ReMax: the reward of the greedy answer is the baseline.

    r − r(greedy)

    Args:
        rewards: `*batch G`, of the sampled answers to one prompt.
        greedy_rewards: `*batch`, of the answer decoded greedily to the same prompt; or `*batch G`, one for each of the
            sampled answers, where these are of several prompts.
        valid: True where an answer exists, `*batch G`; all by default.

    Returns:
        `*batch G`, zero where invalid.

    Raises:
        ValueError: if the shapes do not belong together.

    Reference:
        Li et al. (ReMax), arXiv 2310.10505.

    >>> import jax.numpy as jnp
    >>> remax_advantages(jnp.array([[1.0, 0.0]]), jnp.array([0.5])).tolist()
    [[0.5, -0.5]]

    """
    one_each = greedy_rewards.ndim == rewards.ndim
    has_shape(rewards.shape if one_each else rewards.shape[:-1], greedy_rewards=greedy_rewards)
    has_shape(rewards.shape, valid=valid)
    r, greedy = as_float(rewards, greedy_rewards)
    baseline = greedy if one_each else jnp.broadcast_to(greedy[..., None], r.shape)
    return jnp.where(valid_of(r, valid), r - baseline, 0.0)


def opo_advantages(
    rewards: Rewards, lengths: Real[Array, "*batch G"], valid: Valid | None = None, *, group_ids: Groups | None = None
) -> Rewards:
    """OPO: the baseline is the mean reward weighted by length, which minimises the variance of the gradient.

    r − Σ l r / Σ l

    Optimal if the squared norm of an answer's gradient grows with its length l.

    Args:
        rewards: `*batch G`, one group along the last axis.
        lengths: l ≥ 0, tokens of each answer, `*batch G`.
        valid: True where an answer exists, `*batch G`; all by default.
        group_ids: `*batch G`, equal within a group, for ragged groups in any order.

    Returns:
        `*batch G`, zero where invalid. A group of one, equal rewards, and a group without a token give exactly 0.

    Raises:
        ValueError: if the shapes differ.

    Reference:
        Hao et al. (OPO), arXiv 2505.23585.

    >>> import jax.numpy as jnp
    >>> opo_advantages(jnp.array([1.0, 0.0]), jnp.array([30, 10])).tolist()
    [0.25, -0.75]

    """
    same_shape(rewards=rewards, lengths=lengths, valid=valid, group_ids=group_ids)
    r, length = as_float(rewards, lengths)
    exists = valid_of(r, valid)
    together = peers(exists, group_ids)
    # Weighted mean of distances to the plain mean: a common offset of the rewards costs no precision.
    _, deviation, _ = deviations(rows_of(r), together, axis=-1)
    weight = jnp.where(together, rows_of(length), 0.0)
    total = jnp.sum(weight, axis=-1)
    shift = divide(jnp.sum(weight * deviation, axis=-1), total)
    return jnp.where(exists & (total != 0), own(deviation) - shift, 0.0)


def gpg_advantages(
    rewards: Rewards,
    valid: Valid | None = None,
    *,
    norm: Number = 1.0,
    alpha: str = "informative",
    group_ids: Groups | None = None,
) -> Rewards:
    """GPG: centred rewards, scaled up for the answers of the batch that carry no gradient.

    α (r − mean)/norm;  α = B / number of informative answers among the B of the batch

    Informative in the paper is an answer of a group whose rewards are not all equal. verl counts rewards that are not
    0 instead (alpha "nonzero").

    Args:
        rewards: `*batch G`, one group along the last axis; all that is passed in is the batch.
        valid: True where an answer exists, `*batch G`; all by default.
        norm: > 0, the paper's F_norm.
        alpha: "informative", "nonzero", or "none" for α = 1.
        group_ids: `*batch G`, equal within a group, for ragged groups in any order.

    Returns:
        `*batch G`, zero where invalid. A group of one and equal rewards give exactly 0.

    Raises:
        ValueError: for an unknown alpha or a norm that is not positive.

    Reference:
        Chu et al. (GPG), arXiv 2504.02546, equations 6 and 7.

    >>> import jax.numpy as jnp
    >>> gpg_advantages(jnp.array([[1.0, 0.0], [1.0, 1.0]])).tolist()
    [[1.0, -1.0], [0.0, 0.0]]

    """
    kinds = ("informative", "nonzero", "none")
    require(alpha in kinds, f"alpha must be one of {kinds}, got {alpha!r}")
    same_shape(rewards=rewards, valid=valid, group_ids=group_ids)
    (r,) = as_float(rewards)
    (norm,) = numbers(r.dtype, POSITIVE, norm=norm)
    exists = valid_of(r, valid)
    together = peers(exists, group_ids)
    _, deviation, _ = deviations(rows_of(r), together, axis=-1)
    centred = jnp.where(exists, own(deviation), 0.0)
    if alpha == "none":
        return centred / norm
    informative = jnp.any(deviation != 0, axis=-1) if alpha == "informative" else r != 0
    share = divide(jnp.sum(exists, dtype=r.dtype), jnp.sum(exists & informative, dtype=r.dtype))
    return share * centred / norm


def maxrl_advantages(rewards: Rewards, valid: Valid | None = None, *, group_ids: Groups | None = None) -> Rewards:
    """MaxRL: divided by the success rate, so that the gradient tends to the maximum-likelihood one.

    (r − mean)/mean, 0 where the mean is 0

    Args:
        rewards: 0 or 1 in the paper, ≥ 0 here, `*batch G`, one group along the last axis.
        valid: True where an answer exists, `*batch G`; all by default.
        group_ids: `*batch G`, equal within a group, for ragged groups in any order.

    Returns:
        `*batch G`, zero where invalid. A group of one and equal rewards give exactly 0.

    Raises:
        ValueError: if the shapes differ.

    Reference:
        Tajwar et al. (MaxRL), arXiv 2602.02710, equation 10 and algorithm 1 (there divided by the group's size).

    >>> import jax.numpy as jnp
    >>> maxrl_advantages(jnp.array([1.0, 0.0, 0.0, 0.0])).tolist()
    [3.0, -1.0, -1.0, -1.0]

    """
    same_shape(rewards=rewards, valid=valid, group_ids=group_ids)
    (r,) = as_float(rewards)
    exists = valid_of(r, valid)
    mean, deviation, _ = deviations(rows_of(r), peers(exists, group_ids), axis=-1)
    return jnp.where(exists, divide(own(deviation), mean[..., 0]), 0.0)


def leave_one_out_std_advantages(
    rewards: Rewards, valid: Valid | None = None, *, group_ids: Groups | None = None
) -> Rewards:
    """Mean and standard deviation both of the other answers.

    (rᵢ − mean₋ᵢ)/std₋ᵢ where std₋ᵢ > 0, else rᵢ − mean₋ᵢ;  std unbiased

    The others' deviations are computed for each answer, not from sums over the group: no cancellation.

    Args:
        rewards: `*batch G`, one group along the last axis.
        valid: True where an answer exists, `*batch G`; all by default.
        group_ids: `*batch G`, equal within a group, for ragged groups in any order.

    Returns:
        `*batch G`, zero where invalid, and for an answer without others. Equal rewards give exactly 0.

    Raises:
        ValueError: if the shapes differ.

    Reference:
        None: NeMo-RL's default baseline.

    >>> import jax.numpy as jnp
    >>> print(leave_one_out_std_advantages(jnp.array([0.25, 0.25, 0.75])).round(3))
    [-0.707 -0.707  0.5  ]

    """
    same_shape(rewards=rewards, valid=valid, group_ids=group_ids)
    (r,) = as_float(rewards)
    exists = valid_of(r, valid)
    together = peers(exists, group_ids)
    others = together & ~diagonal(together.shape)
    # Centred in the group first: a large common offset of the rewards then costs no precision.
    _, centred, _ = deviations(rows_of(r), together, axis=-1)
    mean, deviation, count = deviations(centred, others, axis=-1)
    spread = sqrt(variance(deviation, count, -1))[..., 0]
    distance = jnp.where(exists & (count[..., 0] > 0), own(centred) - mean[..., 0], 0.0)
    return jnp.where(spread > 0, divide(distance, spread), distance)
