"""Log-ratios between policies, and the weights that correct for tokens another policy sampled."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from rl_fn._numerics import (
    NOT_NEGATIVE,
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
    expm1,
    log,
    numbers,
    require,
    same_shape,
)
from rl_fn.divergences.estimators import kl_k3
from rl_fn.recurrence import segment_starts, segment_totals

LEVELS = ("token", "sequence", "sequence_sum")


def _at_level(log_ratios: jax.Array, mask: jax.Array, level: str, segment_ids: Array | None) -> jax.Array:
    require(level in LEVELS, f"level must be one of {LEVELS}, got {level!r}")
    token = jnp.where(mask, log_ratios, 0.0)
    if level == "token":
        return token
    total = segment_totals(token, segment_ids)
    if level == "sequence":
        total = divide(total, segment_totals(mask.astype(token.dtype), segment_ids))
    return jnp.where(mask, total, 0.0)


def log_ratio(
    logprobs: Tokens,
    old_logprobs: Tokens,
    mask: Mask,
    *,
    level: str = "token",
    segment_ids: Segments | None = None,
) -> Tokens:
    """Log importance ratio of each token, of its sequence, or of its sequence per token.

    token: log π − log π_old;  sequence: mean over the sequence's tokens (GSPO);  sequence_sum: sum over them

    Args:
        logprobs: log π of the sampled tokens, in nats, `*batch T`.
        old_logprobs: log π_old of the same tokens, `*batch T`.
        mask: True where a token counts, `*batch T`.
        level: "token", "sequence" or "sequence_sum"; the latter two repeat one number over a sequence's tokens.
        segment_ids: `*batch T`, for several sequences packed into a row.

    Returns:
        `*batch T`, differentiable, zero where masked.

    Raises:
        ValueError: for an unknown level.

    Reference:
        Zheng et al. (GSPO), arXiv 2507.18071, equation 7.

    >>> import jax.numpy as jnp
    >>> new, old = jnp.array([-1.0, -2.0, -9.0]), jnp.array([-1.5, -2.5, 0.0])
    >>> log_ratio(new, old, jnp.array([True, True, False]), level="sequence_sum").tolist()
    [1.0, 1.0, 0.0]

    """
    same_shape(logprobs=logprobs, old_logprobs=old_logprobs, mask=mask, segment_ids=segment_ids)
    new, old = as_float(logprobs, old_logprobs)
    return _at_level(new - old, as_mask(mask), level, segment_ids)


def truncated_importance_weights(
    log_ratios: Tokens, mask: Mask, *, cap: Number, level: str = "token", segment_ids: Segments | None = None
) -> Tokens:
    """Truncate importance ratios at a cap (TIS). No gradient flows through them.

    w = min(exp(log ratio), C)

    Args:
        log_ratios: per-token log(target / sampler), usually old_logprobs − rollout_logprobs, `*batch T`.
        mask: True where a token counts, `*batch T`.
        cap: C > 0.
        level: "token", "sequence" (geometric mean of the sequence's ratios) or "sequence_sum" (their product).
        segment_ids: `*batch T`, for several sequences packed into a row.

    Returns:
        w, `*batch T`, zero where masked.

    Raises:
        ValueError: for an unknown level or a cap that is not positive.

    Reference:
        Ionides, Truncated Importance Sampling (2008); for rollouts, Yao et al., "Your Efficient RL
        Framework Secretly Brings You Off-Policy RL Training" (2025).

    >>> import jax.numpy as jnp
    >>> truncated_importance_weights(jnp.array([0.0, 100.0]), jnp.ones(2, bool), cap=2.0).round(4).tolist()
    [1.0, 2.0]

    """
    same_shape(log_ratios=log_ratios, mask=mask, segment_ids=segment_ids)
    (ratios,) = as_float(log_ratios)
    (cap,) = numbers(ratios.dtype, POSITIVE, cap=cap)
    counted = as_mask(mask)
    at_level = _at_level(ratios, counted, level, segment_ids)
    weights = jnp.minimum(jnp.exp(jnp.minimum(at_level, log(cap) + 1.0)), cap)
    return jax.lax.stop_gradient(jnp.where(counted, weights, 0.0))


def masked_importance_weights(
    log_ratios: Tokens,
    mask: Mask,
    *,
    low: Number,
    high: Number,
    level: str = "token",
    segment_ids: Segments | None = None,
) -> Tokens:
    """Masked importance sampling (IcePop): the ratio inside an interval, 0 outside it. No gradient flows through it.

    w = ratio · 1[low ≤ ratio ≤ high]

    Args:
        log_ratios: per-token log(target / sampler), usually old_logprobs − rollout_logprobs, `*batch T`.
        mask: True where a token counts, `*batch T`.
        low: smallest ratio kept, ≥ 0.
        high: largest ratio kept, > low.
        level: "token", "sequence" (geometric mean of the sequence's ratios) or "sequence_sum" (their product).
        segment_ids: `*batch T`, for several sequences packed into a row.

    Returns:
        w, `*batch T`, zero where masked.

    Raises:
        ValueError: for an unknown level, or unless 0 ≤ low < high.

    Reference:
        Ling Team (IcePop), arXiv 2510.18855, equation 2 (Ring-1T has low 0.5, high 5).

    >>> import jax.numpy as jnp
    >>> masked_importance_weights(jnp.array([0.0, 3.0]), jnp.ones(2, bool), low=0.5, high=5.0).tolist()
    [1.0, 0.0]

    """
    same_shape(log_ratios=log_ratios, mask=mask, segment_ids=segment_ids)
    (ratios,) = as_float(log_ratios)
    low, high = numbers(ratios.dtype, NOT_NEGATIVE, "need 0 ≤ low < high: both", low=low, high=high)
    require(low < high, f"need 0 ≤ low < high, got low={low}, high={high}")
    counted = as_mask(mask)
    weights = exp(_at_level(ratios, counted, level, segment_ids))
    outside = (weights < low) | (weights > high)
    return jax.lax.stop_gradient(jnp.where(counted & ~outside, weights, 0.0))


def effective_sample_size(weights: Tokens, mask: Mask) -> Float[Array, ""]:
    """Effective sample size: how many equally weighted samples that would estimate as well.

    (Σ w)² / Σ w²

    Args:
        weights: importance weights, ≥ 0, `*batch T`.
        mask: True where a weight counts, `*batch T`.

    Returns:
        Scalar between 1 and the number of counted entries; 0 when nothing counts or all weights are 0.

    Raises:
        ValueError: if the mask is not boolean.

    Reference:
        Kong, A note on importance sampling using standardized weights (1992).

    >>> import jax.numpy as jnp
    >>> float(effective_sample_size(jnp.array([1.0, 1.0, 0.0]), jnp.ones(3, bool)))
    2.0

    """
    same_shape(weights=weights, mask=mask)
    (w,) = as_float(weights)
    w = jnp.where(as_mask(mask), w, 0.0)
    # The ratio does not depend on the scale of w; dividing by the largest keeps the squares in range.
    w = divide(w, jnp.broadcast_to(jax.lax.stop_gradient(jnp.max(w, initial=0.0)), w.shape))
    return divide(jnp.square(jnp.sum(w)), jnp.sum(jnp.square(w)))


class MismatchMetrics(NamedTuple):
    """How far the policy is from the one that sampled; scalars, over counted tokens."""

    probability_gap_mean: Float[Array, ""]
    probability_gap_max: Float[Array, ""]
    k1: Float[Array, ""]
    k3: Float[Array, ""]
    chi_squared: Float[Array, ""]
    perplexity_ratio: Float[Array, ""]
    effective_sample_share: Float[Array, ""]
    share_over_2: Float[Array, ""]
    share_over_8: Float[Array, ""]


def mismatch_metrics(
    logprobs: Tokens, rollout_logprobs: Tokens, mask: Mask, *, segment_ids: Segments | None = None
) -> MismatchMetrics:
    """Distance between the trainer's and the sampler's probabilities of the same tokens.

    w = π/μ;  k1 = E[−log w],  k3 = E[w − 1 − log w]  (both estimate KL(μ‖π));  χ² = E[w²] − 1

    Args:
        logprobs: log π from the trainer, in nats, `*batch T`.
        rollout_logprobs: log μ from the engine that sampled, `*batch T`.
        mask: True where a token counts, `*batch T`.
        segment_ids: `*batch T`, for several sequences packed into a row.

    Returns:
        MismatchMetrics of scalars: mean and largest |π − μ|; k1, k3, χ²; perplexity_ratio, the mean over sequences of
        ppl_π / ppl_μ; effective_sample_share, the effective sample size of w over the token count; share_over_2 and
        share_over_8, the share of tokens with w outside [1/2, 2] and [1/8, 8]. All 0 when nothing counts.

    Raises:
        ValueError: if the mask is not boolean.

    Reference:
        Schulman, "Approximating KL Divergence" (2020), for k1 and k3.

    >>> import jax.numpy as jnp
    >>> same = jnp.array([-1.0, -2.0])
    >>> float(mismatch_metrics(same, same, jnp.ones(2, bool)).effective_sample_share)
    1.0

    """
    same_shape(logprobs=logprobs, rollout_logprobs=rollout_logprobs, mask=mask, segment_ids=segment_ids)
    new, rollout = as_float(logprobs, rollout_logprobs)
    counted = as_mask(mask)
    new, rollout = (jax.lax.stop_gradient(jnp.where(counted, x, 0.0)) for x in (new, rollout))
    d = new - rollout
    count = jnp.sum(counted, dtype=d.dtype)

    def mean(x: jax.Array) -> jax.Array:
        return divide(jnp.sum(jnp.where(counted, x, 0.0)), count)

    gap = jnp.where(counted, jnp.abs(jnp.exp(new) - jnp.exp(rollout)), 0.0)
    tokens = segment_totals(counted.astype(d.dtype), segment_ids)
    heads = (segment_starts(d.shape, segment_ids) & (tokens > 0)).astype(d.dtype)
    per_sequence = exp(-divide(segment_totals(d, segment_ids), tokens))
    return MismatchMetrics(
        probability_gap_mean=mean(gap),
        probability_gap_max=jnp.max(gap, initial=0.0),
        k1=mean(-d),
        k3=mean(kl_k3(-d, jnp.zeros_like(d))),
        chi_squared=mean(expm1(2.0 * d)),
        perplexity_ratio=divide(jnp.sum(heads * per_sequence), jnp.sum(heads)),
        effective_sample_share=divide(effective_sample_size(exp(d), counted), count),
        share_over_2=mean((jnp.abs(d) > float(np.log(2.0))).astype(d.dtype)),
        share_over_8=mean((jnp.abs(d) > float(np.log(8.0))).astype(d.dtype)),
    )
