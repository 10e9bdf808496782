"""Masks that drop the tokens or sequences that drifted too far from the policy that sampled them. No gradients."""

import jax.numpy as jnp
from jaxtyping import Bool

from rl_fn._numerics import (
    ANY,
    POSITIVE,
    Array,
    Mask,
    Number,
    Segments,
    Tokens,
    as_float,
    as_mask,
    divide,
    exp,
    numbers,
    require,
    same_shape,
)
from rl_fn.divergences.estimators import kl_k3
from rl_fn.recurrence import segment_totals

STATISTICS = ("k1", "k2", "k3")
REJECTION_LEVELS = ("token", "seq_sum", "seq_mean", "seq_max")

Kept = Bool[Array, "*batch T"]


def rejection_mask(
    log_ratios: Tokens,
    mask: Mask,
    *,
    threshold: Number,
    statistic: str = "k3",
    level: str = "token",
    segment_ids: Segments | None = None,
) -> Kept:
    """Rejection sampling: keep what is close to the policy that sampled, by a KL statistic.

    keep where |S| ≤ δ;  k1 = −d, k2 = d²/2, k3 = e^d − 1 − d;  d = log π/μ

    S is the statistic of the token, or its sum, mean or largest size over the sequence. For an interval that is not
    symmetric in log π/μ take masked_importance_weights, which knows the same levels.

    Args:
        log_ratios: d, per token, `*batch T`.
        mask: True where a token counts, `*batch T`.
        threshold: δ > 0, in nats (k2: nats²).
        statistic: "k1", "k2" or "k3".
        level: "token", "seq_sum", "seq_mean" or "seq_max".
        segment_ids: `*batch T`, for several sequences packed into a row.

    Returns:
        `*batch T`, False where masked.

    Raises:
        ValueError: for an unknown statistic or level, or a threshold that is not positive.

    Reference:
        Schulman, "Approximating KL Divergence" (2020), for the statistics; the options are verl's.

    >>> import jax.numpy as jnp
    >>> rejection_mask(jnp.array([0.0, 1.0]), jnp.ones(2, bool), threshold=0.5).tolist()
    [True, False]

    """
    require(statistic in STATISTICS, f"statistic must be one of {STATISTICS}, got {statistic!r}")
    require(level in REJECTION_LEVELS, f"level must be one of {REJECTION_LEVELS}, got {level!r}")
    same_shape(log_ratios=log_ratios, mask=mask, segment_ids=segment_ids)
    (d,) = as_float(log_ratios)
    (threshold,) = numbers(d.dtype, POSITIVE, threshold=threshold)
    counted = as_mask(mask)
    d = jnp.where(counted, d, 0.0)
    value = {"k1": -d, "k2": 0.5 * jnp.square(d), "k3": kl_k3(-d, jnp.zeros_like(d))}[statistic]
    if level == "seq_max":
        # Some token is too far exactly where their number is not 0.
        value = segment_totals((jnp.abs(value) > threshold).astype(d.dtype), segment_ids)
        return counted & (value == 0)
    if level != "token":
        value = segment_totals(value, segment_ids)
    if level == "seq_mean":
        value = divide(value, segment_totals(counted.astype(d.dtype), segment_ids))
    return counted & (jnp.abs(value) <= threshold)


def off_policy_sequence_mask(
    advantages: Tokens,
    logprobs: Tokens,
    rollout_logprobs: Tokens,
    mask: Mask,
    *,
    threshold: Number,
    segment_ids: Segments | None = None,
) -> Kept:
    """Drop bad answers that the policy has moved away from; what it still does, or did well, it may learn from.

    drop where A < 0 and mean over the sequence of log μ/π > δ

    Args:
        advantages: A, `*batch T`.
        logprobs: log π of the sampled tokens, in nats, `*batch T`.
        rollout_logprobs: log μ, the policy that sampled, `*batch T`.
        mask: True where a token counts, `*batch T`.
        threshold: δ, nats per token.
        segment_ids: `*batch T`, for several sequences packed into a row.

    Returns:
        `*batch T`, False where masked or dropped.

    Raises:
        ValueError: if the mask is not boolean.

    Reference:
        DeepSeek-AI (DeepSeek-V3.2), arXiv 2512.02556, equation 9 (off-policy sequence masking).

    >>> import jax.numpy as jnp
    >>> new, rollout = jnp.array([-3.0, -3.0]), jnp.array([-1.0, -1.0])
    >>> off_policy_sequence_mask(jnp.array([1.0, -1.0]), new, rollout, jnp.ones(2, bool), threshold=1.0).tolist()
    [True, False]

    """
    same_shape(logprobs=logprobs, advantages=advantages, rollout_logprobs=rollout_logprobs, mask=mask)
    same_shape(mask=mask, segment_ids=segment_ids)
    a, new, rollout = as_float(advantages, logprobs, rollout_logprobs)
    (threshold,) = numbers(a.dtype, ANY, threshold=threshold)
    counted = as_mask(mask)
    gap = jnp.where(counted, rollout - new, 0.0)
    mean = divide(segment_totals(gap, segment_ids), segment_totals(counted.astype(gap.dtype), segment_ids))
    return counted & ~((a < 0) & (mean > threshold))


def second_moment_mask(log_ratios: Tokens, mask: Mask, *, threshold: Number) -> Kept:
    """M2PO's mask: drop the largest squared log-ratios until the mean of the rest is small enough.

    keep the largest set {d² < cut} with mean(d²) ≤ τ;  d = log π/μ

    The mean is over all tokens passed in (one batch). Tokens equal to the cut are dropped together, so their order
    does not matter. All counted tokens may be dropped, as AReaL does, whatever the sign of their advantage; the
    paper drops only those that PPO's clip could (d > 0 where A > 0, d < 0 where A < 0). NaN is no size: it is kept, and
    seen in the loss.

    Args:
        log_ratios: d, per token, `*batch T`.
        mask: True where a token counts, `*batch T`.
        threshold: τ > 0, nats².

    Returns:
        `*batch T`, False where masked or dropped.

    Raises:
        ValueError: if the threshold is not positive.

    Reference:
        Zheng et al. (M2PO), arXiv 2510.01161, equation 4 and algorithm 1 (τ = 0.04 in all its experiments).

    >>> import jax.numpy as jnp
    >>> second_moment_mask(jnp.array([0.1, -3.0, 0.2]), jnp.ones(3, bool), threshold=0.04).tolist()
    [True, False, True]

    """
    same_shape(log_ratios=log_ratios, mask=mask)
    (d,) = as_float(log_ratios)
    (threshold,) = numbers(d.dtype, POSITIVE, threshold=threshold)
    counted = as_mask(mask)
    unknown = jnp.isnan(d)
    square = jnp.where(counted & ~unknown, jnp.square(d), jnp.inf)
    ascending = jnp.sort(square.reshape(-1))
    if ascending.shape[0] == 0:
        return counted
    number = jnp.arange(1, ascending.shape[0] + 1, dtype=d.dtype)
    # Means of the smallest k grow with k: those within the threshold come first, the next value is the cut.
    within = jnp.cumsum(ascending) <= threshold * number
    cut = jnp.min(jnp.where(within, jnp.inf, ascending))
    return counted & ((square < cut) | unknown)


def total_variation_mask(
    advantages: Tokens,
    logprobs: Tokens,
    rollout_logprobs: Tokens,
    mask: Mask,
    *,
    threshold: Number,
    segment_ids: Segments | None = None,
) -> Kept:
    """In sequences that drifted too far, drop the tokens whose update would take them further.

    drop where ½ mean over the sequence of |ρ − 1| > δ and A log ρ > 0;  ρ = π/μ

    Half the mean of |ρ − 1| over tokens of μ is an unbiased estimate of the total variation distance of π and μ.
    open-instruct compares the mean without the half.

    Args:
        advantages: A, `*batch T`.
        logprobs: log π of the sampled tokens, in nats, `*batch T`.
        rollout_logprobs: log μ, the policy that sampled, `*batch T`.
        mask: True where a token counts, `*batch T`.
        threshold: δ > 0, a probability.
        segment_ids: `*batch T`, for several sequences packed into a row.

    Returns:
        `*batch T`, False where masked or dropped.

    Raises:
        ValueError: if the threshold is not positive.

    Reference:
        Honari et al. (VACO), arXiv 2603.01365, in the form open-instruct gives it; not checked against the paper.

    >>> import jax.numpy as jnp
    >>> new, rollout = jnp.log(jnp.array([0.8, 0.1])), jnp.log(jnp.array([0.2, 0.2]))
    >>> total_variation_mask(jnp.ones(2), new, rollout, jnp.ones(2, bool), threshold=0.5).tolist()
    [False, True]

    """
    same_shape(logprobs=logprobs, advantages=advantages, rollout_logprobs=rollout_logprobs, mask=mask)
    same_shape(mask=mask, segment_ids=segment_ids)
    a, new, rollout = as_float(advantages, logprobs, rollout_logprobs)
    (threshold,) = numbers(a.dtype, POSITIVE, threshold=threshold)
    counted = as_mask(mask)
    d = new - rollout
    tokens = segment_totals(counted.astype(d.dtype), segment_ids)
    # Beyond any threshold the size does not matter, and a bounded one cannot overflow in the sum.
    gap = jnp.minimum(jnp.abs(exp(d) - 1.0), 1e30)
    distance = 0.5 * divide(segment_totals(jnp.where(counted, gap, 0.0), segment_ids), tokens)
    return counted & ~((distance > threshold) & (a * d > 0))
