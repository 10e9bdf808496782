"""Advantages from a group of answers to one prompt: the other answers are the baseline."""

import jax.numpy as jnp
from jaxtyping import Bool, Float

from rl_fn._groups import Groups, valid_of, within
from rl_fn._numerics import (
    NOT_NEGATIVE,
    Array,
    Number,
    as_float,
    deviations,
    divide,
    numbers,
    require,
    same_shape,
    sqrt,
    variance,
)

SCALES = ("group", "batch", "none")

Rewards = Float[Array, "*batch G"]
Valid = Bool[Array, "*batch G"]


def grpo_advantages(
    rewards: Rewards,
    valid: Valid | None = None,
    *,
    scale: str = "group",
    eps: Number = 1e-6,
    group_ids: Groups | None = None,
) -> Rewards:
    """GRPO's group-relative advantage.

    (r − mean) / (std + ε), std unbiased (n − 1)

    The paper says std without saying which; the unbiased one is the field's choice. ε is absolute: it shrinks
    advantages noticeably once std comes near it. `eps=0` is legal.

    Args:
        rewards: `*batch G`, one group of G answers along the last axis.
        valid: True where an answer exists, `*batch G`; all by default.
        scale: what std is taken over: "group", "batch" (all valid rewards passed in), or "none" (Dr. GRPO: no
            division).
        eps: ε, ≥ 0.
        group_ids: `*batch G`, equal within a group, for ragged groups in any order.

    Returns:
        `*batch G`, zero where invalid. A group of one and a group of equal rewards give exactly 0.

    Raises:
        ValueError: for an unknown scale or a negative eps.

    Reference:
        Shao et al. (DeepSeekMath), arXiv 2402.03300, section 4.1.2; "none": Liu et al., arXiv 2503.20783, section 3.2.

    >>> import jax.numpy as jnp
    >>> grpo_advantages(jnp.array([[1.0, 0.0, 0.5], [0.7, 0.7, 0.7]])).round(3).tolist()
    [[1.0, -1.0, 0.0], [0.0, 0.0, 0.0]]

    """
    require(scale in SCALES, f"scale must be one of {SCALES}, got {scale!r}")
    same_shape(rewards=rewards, valid=valid, group_ids=group_ids)
    (r,) = as_float(rewards)
    (eps,) = numbers(r.dtype, NOT_NEGATIVE, eps=eps)
    exists = valid_of(r, valid)
    group = within(r, exists, group_ids)
    if scale == "none":
        return group.deviation
    if scale == "group":
        return divide(group.deviation, sqrt(group.variance) + eps)
    _, from_batch_mean, answers = deviations(r, exists)
    spread = sqrt(variance(from_batch_mean, answers, None))
    return divide(group.deviation, jnp.broadcast_to(spread + eps, r.shape))


def rloo_advantages(rewards: Rewards, valid: Valid | None = None, *, group_ids: Groups | None = None) -> Rewards:
    """REINFORCE leave-one-out: the mean of the other answers is the baseline.

    rᵢ − 1/(G − 1) Σ_{j≠i} rⱼ = G/(G − 1) (rᵢ − mean)

    Args:
        rewards: `*batch G`, one group of G ≥ 2 answers along the last axis.
        valid: True where an answer exists, `*batch G`; all by default.
        group_ids: `*batch G`, equal within a group, for ragged groups in any order.

    Returns:
        `*batch G`, zero where invalid, and where an answer is the only valid one of its group (it has no baseline, and
        contributes nothing). Equal rewards give exactly 0.

    Raises:
        ValueError: if G < 2.

    Reference:
        Ahmadian et al., arXiv 2402.14740 (RLOO).

    >>> import jax.numpy as jnp
    >>> rloo_advantages(jnp.array([1.0, 0.0, 0.5])).tolist()
    [0.75, -0.75, 0.0]

    """
    size = rewards.shape[-1]
    require(size >= 2, f"leaving one out needs a group of at least 2, got rewards of shape {rewards.shape}")
    same_shape(rewards=rewards, valid=valid, group_ids=group_ids)
    (r,) = as_float(rewards)
    group = within(r, valid_of(r, valid), group_ids)
    return group.deviation * divide(group.size, jnp.maximum(group.size - 1.0, 0.0))
