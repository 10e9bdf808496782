"""Policy losses that couple the tokens of a sequence through its importance ratio, to be minimised."""

import jax
import jax.numpy as jnp

from rl_fn._numerics import (
    NOT_NEGATIVE,
    Mask,
    Number,
    Segments,
    Tokens,
    as_float,
    as_mask,
    divide,
    exp,
    numbers,
    own_gradient,
    same_shape,
)
from rl_fn.importance.ratios import log_ratio
from rl_fn.policy_losses.ppo import ppo_clip
from rl_fn.recurrence import segment_totals


def gspo(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Tokens,
    mask: Mask,
    *,
    clip_low: Number = 3e-4,
    clip_high: Number = 4e-4,
    dual_clip: Number | None = None,
    segment_ids: Segments | None = None,
) -> Tokens:
    """Group sequence policy optimisation: PPO with one length-normalised ratio for the whole sequence.

    −min(sA, clip(s, 1 − ε_low, 1 + ε_high) A);  s = exp(mean over the sequence of log π/π_old)

    Every token of a sequence holds the sequence's loss, so "seq-mean-token-mean" gives the paper's objective.

    Args:
        logprobs: log π of the sampled tokens, in nats, `*batch T`.
        old_logprobs: log π_old of the same tokens, `*batch T`.
        advantages: A, `*batch T`, one number per sequence in the paper.
        mask: True where a token counts, `*batch T`.
        clip_low: ε_low ≥ 0.
        clip_high: ε_high ≥ 0.
        dual_clip: bound of s for A < 0, > 1; none by default.
        segment_ids: `*batch T`, for several sequences packed into a row.

    Returns:
        Loss per token, `*batch T`, zero where masked.

    Raises:
        ValueError: for a negative clip or dual_clip ≤ 1.

    Reference:
        Zheng et al. (GSPO), arXiv 2507.18071, equations 5 and 7.

    >>> import jax.numpy as jnp
    >>> new, old = jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([0.25, 1.0]))
    >>> gspo(new, old, jnp.ones(2), jnp.ones(2, bool)).tolist()
    [-1.0, -1.0]

    """
    ratio = log_ratio(logprobs, old_logprobs, mask, level="sequence", segment_ids=segment_ids)
    clips = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
    return ppo_clip(ratio, jnp.zeros_like(ratio), advantages, mask, **clips)


def gspo_token(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Tokens,
    mask: Mask,
    *,
    clip_low: Number = 3e-4,
    clip_high: Number = 4e-4,
    dual_clip: Number | None = None,
    segment_ids: Segments | None = None,
) -> Tokens:
    """GSPO with a gradient per token, for advantages that differ inside a sequence.

    −min(sₜA, clip(sₜ, 1 − ε_low, 1 + ε_high) A);  sₜ = sg(s) π/sg(π)

    The value is gspo's; so is the gradient of a sequence's mean when its advantages are equal.

    Args:
        logprobs: log π of the sampled tokens, in nats, `*batch T`.
        old_logprobs: log π_old of the same tokens, `*batch T`.
        advantages: A, `*batch T`.
        mask: True where a token counts, `*batch T`.
        clip_low: ε_low ≥ 0.
        clip_high: ε_high ≥ 0.
        dual_clip: bound of sₜ for A < 0, > 1; none by default.
        segment_ids: `*batch T`, for several sequences packed into a row.

    Returns:
        Loss per token, `*batch T`, zero where masked.

    Raises:
        ValueError: for a negative clip or dual_clip ≤ 1.

    Reference:
        Zheng et al. (GSPO), arXiv 2507.18071, equations 13 and 14.

    >>> import jax.numpy as jnp
    >>> new, old = jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([0.25, 1.0]))
    >>> gspo_token(new, old, jnp.array([1.0, 2.0]), jnp.ones(2, bool)).tolist()
    [-1.0, -2.0]

    """
    same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask, segment_ids=segment_ids)
    (new,) = as_float(logprobs)
    new = jnp.where(as_mask(mask), new, 0.0)
    ratio = log_ratio(logprobs, old_logprobs, mask, level="sequence", segment_ids=segment_ids)
    ratio = jax.lax.stop_gradient(ratio) + own_gradient(new)
    clips = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
    return ppo_clip(ratio, jnp.zeros_like(ratio), advantages, mask, **clips)


def luspo(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Tokens,
    mask: Mask,
    *,
    clip_low: Number = 2e-3,
    clip_high: Number = 2.5e-3,
    dual_clip: Number | None = None,
    segment_ids: Segments | None = None,
) -> Tokens:
    """Length-unbiased GSPO: the sequence's loss times its number of tokens.

    −|y| min(sA, clip(s, 1 − ε_low, 1 + ε_high) A)

    Every token holds the weighted loss, so "seq-mean-token-mean" gives the paper's objective; the same number comes
    from gspo with "seq-mean-token-sum".

    Args:
        logprobs: log π of the sampled tokens, in nats, `*batch T`.
        old_logprobs: log π_old of the same tokens, `*batch T`.
        advantages: A, `*batch T`, one number per sequence in the paper.
        mask: True where a token counts, `*batch T`; |y| is the number of counted tokens.
        clip_low: ε_low ≥ 0.
        clip_high: ε_high ≥ 0.
        dual_clip: bound of s for A < 0, > 1; none by default.
        segment_ids: `*batch T`, for several sequences packed into a row.

    Returns:
        Loss per token, `*batch T`, zero where masked.

    Raises:
        ValueError: for a negative clip or dual_clip ≤ 1.

    Reference:
        Liu et al. (LUSPO), arXiv 2602.05261, equation 7, section 5.1 for the defaults.

    >>> import jax.numpy as jnp
    >>> luspo(jnp.zeros(2), jnp.zeros(2), jnp.ones(2), jnp.ones(2, bool)).tolist()
    [-2.0, -2.0]

    """
    clips = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
    loss = gspo(logprobs, old_logprobs, advantages, mask, **clips, segment_ids=segment_ids)
    return loss * segment_totals(as_mask(mask).astype(loss.dtype), segment_ids)


def gmpo(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Tokens,
    mask: Mask,
    *,
    clip_low: Number = 0.4,
    clip_high: Number = 0.4,
    segment_ids: Segments | None = None,
) -> Tokens:
    """Geometric-mean policy optimisation: token log-ratios are clipped first, then averaged over the sequence.

    −A exp(mean over the sequence of ℓₜ);  ℓₜ = min(log ρₜ, ε_high) where A > 0, max(log ρₜ, −ε_low) where A < 0

    The clips are nats: ratios in (e^−ε_low, e^ε_high). As in PPO nothing bounds ρ from above for A < 0; the
    exponential goes on as its tangent beyond 64 (float32).

    Args:
        logprobs: log π of the sampled tokens, in nats, `*batch T`.
        old_logprobs: log π_old of the same tokens, `*batch T`.
        advantages: A, `*batch T`, one number per sequence in the paper.
        mask: True where a token counts, `*batch T`.
        clip_low: ε_low ≥ 0, nats.
        clip_high: ε_high ≥ 0, nats.
        segment_ids: `*batch T`, for several sequences packed into a row.

    Returns:
        Loss per token, `*batch T`, zero where masked: every token holds its sequence's loss.

    Raises:
        ValueError: for a negative clip.

    Reference:
        Zhao et al. (GMPO), arXiv 2507.20673, equation 4, section 3 for the defaults.

    >>> import jax.numpy as jnp
    >>> gmpo(jnp.array([-1.0, -1.0]), jnp.array([-9.0, -0.6]), jnp.ones(2), jnp.ones(2, bool)).tolist()
    [-1.0, -1.0]

    """
    same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask, segment_ids=segment_ids)
    (a,) = as_float(advantages)
    clip_low, clip_high = numbers(a.dtype, NOT_NEGATIVE, "clips", clip_low=clip_low, clip_high=clip_high)
    counted = as_mask(mask)
    a = jnp.where(counted, a, 0.0)
    ratio = log_ratio(logprobs, old_logprobs, counted)
    cut = ((a > 0) & (ratio > clip_high)) | ((a < 0) & (ratio < -clip_low))
    bound = jnp.where(a > 0, jnp.asarray(clip_high, a.dtype), jnp.asarray(-clip_low, a.dtype))
    clipped = jnp.where(cut, bound, ratio)
    total = segment_totals(jnp.where(counted, clipped, 0.0), segment_ids)
    mean = divide(total, segment_totals(counted.astype(a.dtype), segment_ids))
    return -exp(mean) * a


def vespo(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Tokens,
    mask: Mask,
    *,
    k_pos: Number = 2.0,
    lambda_pos: Number = 3.0,
    k_neg: Number = 3.0,
    lambda_neg: Number = 2.0,
    segment_ids: Segments | None = None,
) -> Tokens:
    """REINFORCE weighted by a smooth bump in the sequence's importance weight, 1 at 1 and 0 at both ends.

    −sg(φ(w)) A log π;  φ(w) = e^λ wᵏ e^{−λw},  w = Π over the sequence of π/π_old

    (k, λ) are the first pair where A ≥ 0, the second where A < 0. φ is computed from log w, so no w overflows.

    Args:
        logprobs: log π of the sampled tokens, in nats, `*batch T`.
        old_logprobs: log of the policy that sampled, for the same tokens, `*batch T`.
        advantages: A, `*batch T`.
        mask: True where a token counts, `*batch T`.
        k_pos: k where A ≥ 0, ≥ 0.
        lambda_pos: λ where A ≥ 0, ≥ 0.
        k_neg: k where A < 0, ≥ 0.
        lambda_neg: λ where A < 0, ≥ 0.
        segment_ids: `*batch T`, for several sequences packed into a row.

    Returns:
        Loss per token, `*batch T`, zero where masked.

    Raises:
        ValueError: if one of the four is negative.

    Reference:
        Shen et al. (VESPO), arXiv 2602.10693, equation 20 of its version 3, section 4.1 for the defaults.

    >>> import jax.numpy as jnp
    >>> vespo(jnp.array([-1.0, -1.0]), jnp.array([-1.0, -1.0]), jnp.ones(2), jnp.ones(2, bool)).tolist()
    [1.0, 1.0]

    """
    same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask, segment_ids=segment_ids)
    new, a = as_float(logprobs, advantages)
    parameters = {"k_pos": k_pos, "lambda_pos": lambda_pos, "k_neg": k_neg, "lambda_neg": lambda_neg}
    k_pos, lambda_pos, k_neg, lambda_neg = numbers(a.dtype, NOT_NEGATIVE, "k and λ", **parameters)
    counted = as_mask(mask)
    new, a = jnp.where(counted, new, 0.0), jnp.where(counted, a, 0.0)
    log_w = log_ratio(logprobs, old_logprobs, counted, level="sequence_sum", segment_ids=segment_ids)
    k = jnp.where(a >= 0, jnp.asarray(k_pos, a.dtype), jnp.asarray(k_neg, a.dtype))
    lam = jnp.where(a >= 0, jnp.asarray(lambda_pos, a.dtype), jnp.asarray(lambda_neg, a.dtype))
    phi = jnp.exp(lam + k * log_w - lam * exp(log_w))
    return -jax.lax.stop_gradient(phi) * a * new
