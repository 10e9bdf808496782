"""Policy losses, per token, to be minimised; reduction is aggregate's business."""

import jax.numpy as jnp
from jaxtyping import Bool

from rl_fn._numerics import NOT_NEGATIVE, Array, Mask, Number, Range, Tokens, as_float, exp, keep, numbers, same_shape


def reinforce(logprobs: Tokens, advantages: Tokens, mask: Mask | None = None) -> Tokens:
    """REINFORCE with whatever baseline the advantages hold.

    −A log π

    Args:
        logprobs: log π of the sampled tokens, in nats, `*batch T`.
        advantages: A, `*batch T`; no gradient is stopped here.
        mask: True where a token counts, `*batch T`; without it every token does.

    Returns:
        Loss per token, `*batch T`, zero where masked.

    Raises:
        ValueError: if the mask is not boolean.

    Reference:
        Williams, Simple Statistical Gradient-Following Algorithms (1992).

    >>> import jax.numpy as jnp
    >>> reinforce(jnp.array([-0.5]), jnp.array([2.0])).tolist()
    [1.0]

    """
    same_shape(logprobs=logprobs, advantages=advantages, mask=mask)
    new, a = as_float(logprobs, advantages)
    return -keep(a, mask) * keep(new, mask)


_ABOVE_ONE = Range("must exceed 1", lambda x: x > 1)


def clipped_tokens(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Tokens,
    mask: Mask | None = None,
    *,
    clip_low: Number = 0.2,
    clip_high: Number = 0.2,
    dual_clip: Number | None = None,
) -> Bool[Array, "*batch T"]:
    """Tokens whose gradient ppo_clip cuts: a ratio outside the interval on the side where the clip binds.

    (A > 0 ∧ ρ > 1 + ε_high) ∨ (A < 0 ∧ ρ < 1 − ε_low) ∨ (A < 0 ∧ ρ > c)

    Args:
        logprobs: log π of the sampled tokens, in nats, `*batch T`.
        old_logprobs: log π_old of the same tokens, `*batch T`.
        advantages: A, `*batch T`.
        mask: True where a token counts, `*batch T`; without it every token does.
        clip_low: ε_low.
        clip_high: ε_high.
        dual_clip: c > 1, or None for no third case.

    Returns:
        `*batch T`, False where masked.

    Raises:
        ValueError: for a negative clip or dual_clip ≤ 1.

    Reference:
        Schulman et al. (PPO), arXiv 1707.06347, equation 7, and Ye et al., arXiv 1912.09729, equation 5 (dual clip).

    >>> import jax.numpy as jnp
    >>> clipped_tokens(jnp.array([0.5, 0.5]), jnp.zeros(2), jnp.array([1.0, -1.0])).tolist()
    [True, False]

    """
    same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    new, old, a = as_float(logprobs, old_logprobs, advantages)
    clip_low, clip_high = numbers(new.dtype, NOT_NEGATIVE, "clips", clip_low=clip_low, clip_high=clip_high)
    new, old, a = keep(new, mask), keep(old, mask), keep(a, mask)
    ratio = exp(new - old)
    cut = ((a > 0) & (ratio > 1.0 + clip_high)) | ((a < 0) & (ratio < 1.0 - clip_low))
    if dual_clip is None:
        return cut
    return cut | ((a < 0) & (ratio > numbers(new.dtype, _ABOVE_ONE, dual_clip=dual_clip)[0]))


def ppo_clip(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Tokens,
    mask: Mask | None = None,
    *,
    clip_low: Number = 0.2,
    clip_high: Number = 0.2,
    dual_clip: Number | None = None,
) -> Tokens:
    """PPO's clipped surrogate; with clip_high > clip_low, DAPO's clip-higher; with dual_clip, bounded for A < 0.

    −min(ρA, clip(ρ, 1 − ε_low, 1 + ε_high) A), and for A < 0 at most −cA;  ρ = π/π_old

    Without dual_clip the loss of A < 0 grows as ρ does. Beyond a log-ratio of 64 (float32) ρ goes on as the tangent of
    the exponential, so that value and gradient stay finite (docs/numerics.md).

    Args:
        logprobs: log π of the sampled tokens, in nats, `*batch T`.
        old_logprobs: log π_old of the same tokens, `*batch T`.
        advantages: A, `*batch T`.
        mask: True where a token counts, `*batch T`; without it every token does.
        clip_low: ε_low ≥ 0.
        clip_high: ε_high ≥ 0.
        dual_clip: c > 1, or None for no upper bound.

    Returns:
        Loss per token, `*batch T`, zero where masked.

    Raises:
        ValueError: for a negative clip or dual_clip ≤ 1.

    Reference:
        Schulman et al. (PPO), arXiv 1707.06347, equation 7; dual_clip: Ye et al., arXiv 1912.09729, equation 5;
        clip_high: Yu et al. (DAPO), arXiv 2503.14476, equation 8.

    >>> import jax.numpy as jnp
    >>> new, old = jnp.log(jnp.array([1.5, 1.5])), jnp.zeros(2)
    >>> ppo_clip(new, old, jnp.array([1.0, -1.0]), clip_high=0.25).tolist()
    [-1.25, 1.5]

    """
    cut = clipped_tokens(
        logprobs, old_logprobs, advantages, mask, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    new, old, a = as_float(logprobs, old_logprobs, advantages)
    new, old, a = keep(new, mask), keep(old, mask), keep(a, mask)
    ratio = exp(new - old)
    clip_low, clip_high = numbers(new.dtype, NOT_NEGATIVE, "clips", clip_low=clip_low, clip_high=clip_high)
    bound = jnp.where(a > 0, 1.0 + clip_high, 1.0 - clip_low)
    if dual_clip is not None:
        (dual_clip,) = numbers(new.dtype, _ABOVE_ONE, dual_clip=dual_clip)
        bound = jnp.where((a < 0) & (ratio > 1.0), dual_clip, bound)
    # A selection, not min and max: at a tie those split the gradient between their arguments.
    return -jnp.where(cut, bound, ratio) * a


def entropy_bonus(entropies: Tokens, mask: Mask | None = None) -> Tokens:
    """Entropy as a loss: adding it with a positive coefficient rewards entropy.

    −H

    Args:
        entropies: H of the policy at each token, in nats, `*batch T`.
        mask: True where a token counts, `*batch T`; without it every token does.

    Returns:
        Loss per token, `*batch T`, zero where masked.

    Raises:
        ValueError: if the mask is not boolean.

    Reference:
        Williams & Peng, Function Optimization Using Connectionist RL Algorithms (1991).

    >>> import jax.numpy as jnp
    >>> entropy_bonus(jnp.array([0.5])).tolist()
    [-0.5]

    """
    same_shape(entropies=entropies, mask=mask)
    (h,) = as_float(entropies)
    return -keep(h, mask)
