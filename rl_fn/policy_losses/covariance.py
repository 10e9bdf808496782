"""What costs entropy: losses that hold back tokens of high covariance, and the mask of high-entropy tokens."""

import jax
import jax.numpy as jnp
from jaxtyping import Bool

from rl_fn._numerics import (
    ANY,
    NOT_NEGATIVE,
    UNIT,
    Array,
    Constant,
    Mask,
    Number,
    Tokens,
    as_float,
    as_mask,
    deviations,
    exp,
    keep,
    known,
    magnitude,
    numbers,
    require,
    same_shape,
)
from rl_fn.policy_losses.ppo import clipped_tokens, ppo_clip


def _covariances(logprobs: jax.Array, advantages: jax.Array, counted: jax.Array) -> jax.Array:
    """(log π − mean)(A − mean), means over the counted tokens of the batch; no gradient."""
    _, new, _ = deviations(jax.lax.stop_gradient(logprobs), counted)
    _, a, _ = deviations(jax.lax.stop_gradient(advantages), counted)
    return new * a


def _smallest(score: jax.Array, eligible: jax.Array, number: jax.Array) -> jax.Array:
    """Mark the eligible entries with the given number of smallest scores; those equal to the last one too."""
    ascending = jnp.sort(jnp.where(eligible, score, jnp.inf).reshape(-1))
    place = jnp.arange(ascending.shape[0], dtype=score.dtype)
    cut = jnp.max(ascending, where=place < number, initial=-jnp.inf)
    return eligible & (score <= cut)


def _number(fraction: Constant, counted: jax.Array, dtype: jnp.dtype) -> jax.Array:
    tokens = jnp.sum(counted, dtype=dtype)
    least = (1.0 if fraction > 0 else 0.0) if known(fraction) else jnp.where(fraction > 0, 1.0, 0.0).astype(dtype)
    return jnp.maximum(jnp.floor(fraction * tokens), least)


def clip_cov(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Tokens,
    mask: Mask,
    noise: Tokens | None = None,
    *,
    fraction: Number = 2e-4,
    cov_low: Number = 1.0,
    cov_high: Number = 5.0,
    clip_low: Number = 0.2,
    clip_high: Number = 0.2,
) -> Tokens:
    """Clip-Cov: PPO's clipped loss without a few tokens of high covariance, whose updates cost the most entropy.

    0 for ⌊fraction · N⌋ of the N tokens (at least one), drawn from those with cov_low < cov < cov_high that the clip
    leaves alone; ppo_clip for the others;  cov = (A − mean A)(log π − mean log π)

    Means are over all counted tokens passed in (one batch). The draw is an argument, not a key: noise holds one number
    a token, and the eligible tokens with the smallest are dropped. `jax.random.uniform(key, mask.shape)`, or
    `torch.rand(mask.shape)` through the bridge, is the paper's uniform draw. Equal numbers at the cut are dropped
    together.

    Args:
        logprobs: log π of the sampled tokens, in nats, `*batch T`.
        old_logprobs: log π_old of the same tokens, `*batch T`.
        advantages: A, `*batch T`.
        mask: True where a token counts, `*batch T`.
        noise: independent uniform numbers, `*batch T`. Without it nothing is drawn: the eligible tokens of largest
            covariance are dropped.
        fraction: of the counted tokens, in [0, 1]; 0 is ppo_clip.
        cov_low: lower bound of the covariance, exclusive.
        cov_high: upper bound of the covariance, exclusive.
        clip_low: ε_low ≥ 0.
        clip_high: ε_high ≥ 0.

    Returns:
        Loss per token, `*batch T`, zero where masked or dropped.

    Raises:
        ValueError: for a fraction outside [0, 1], cov_low ≥ cov_high, or a negative clip.

    Reference:
        Cui et al. (The Entropy Mechanism of RL), arXiv 2505.22617, equations 10 to 12, section 4.3 for the defaults;
        the clip is that of its listing 1.

    >>> import jax, jax.numpy as jnp
    >>> new, a, mask = jnp.array([-1.0, -6.0, -5.0]), jnp.array([1.0, -1.5, -0.5]), jnp.ones(3, bool)
    >>> noise = jax.random.uniform(jax.random.key(0), mask.shape)
    >>> clip_cov(new, new, a, mask, noise, cov_high=2.5).tolist()
    [-1.0, 0.0, 0.5]

    """
    same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask, noise=noise)
    clips = {"clip_low": clip_low, "clip_high": clip_high}
    loss = ppo_clip(logprobs, old_logprobs, advantages, mask, **clips)
    new, a = as_float(logprobs, advantages)
    (fraction,) = numbers(new.dtype, UNIT, fraction=fraction)
    cov_low, cov_high = numbers(new.dtype, ANY, cov_low=cov_low, cov_high=cov_high)
    require(cov_low < cov_high, f"need cov_low < cov_high, got {cov_low} and {cov_high}")
    counted = as_mask(mask)
    cov = _covariances(new, a, counted)
    clipped = clipped_tokens(logprobs, old_logprobs, advantages, mask, **clips)
    eligible = counted & ~clipped & (cov > cov_low) & (cov < cov_high)
    score = -cov if noise is None else as_float(noise, cov)[0]
    return jnp.where(_smallest(score, eligible, _number(fraction, counted, cov.dtype)), 0.0, loss)


def kl_cov(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Tokens,
    mask: Mask,
    *,
    fraction: Number = 2e-4,
    coef: Number = 1.0,
) -> Tokens:
    """KL-Cov: an unclipped ratio, and a KL penalty on the tokens of the highest covariance.

    −ρA, plus β |log ρ| for the ⌊fraction · N⌋ of the N tokens (at least one) with the largest cov;
    ρ = π/π_old,  cov = (A − mean A)(log π − mean log π)

    Means are over all counted tokens passed in (one batch). Tokens equal to the last one chosen are chosen too. At
    ρ = 1 the penalty has gradient 0: it works from the second step on the same rollouts. For large log-ratios ρ goes on
    as the exponential's tangent (docs/numerics.md).

    Args:
        logprobs: log π of the sampled tokens, in nats, `*batch T`.
        old_logprobs: log π_old of the same tokens, `*batch T`.
        advantages: A, `*batch T`.
        mask: True where a token counts, `*batch T`.
        fraction: of the counted tokens, in [0, 1]; 0 is −ρA everywhere.
        coef: β ≥ 0.

    Returns:
        Loss per token, `*batch T`, zero where masked.

    Raises:
        ValueError: for a fraction outside [0, 1] or a negative coef.

    Reference:
        Cui et al. (The Entropy Mechanism of RL), arXiv 2505.22617, equations 10, 13 and 14, section 4.3 for the
        defaults (its fraction for 32B; for 7B it is 2e-3); |log ρ| as the KL is that of its listing 1.

    >>> import jax.numpy as jnp
    >>> new, old = jnp.array([-1.0, -3.0]), jnp.array([-1.5, -3.0])
    >>> print(kl_cov(new, old, jnp.array([0.0, -1.0]), jnp.ones(2, bool), fraction=0.5))
    [0.5 1. ]

    """
    same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    new, old, a = as_float(logprobs, old_logprobs, advantages)
    (fraction,) = numbers(new.dtype, UNIT, fraction=fraction)
    (coef,) = numbers(new.dtype, NOT_NEGATIVE, coef=coef)
    new, old, a = keep(new, mask), keep(old, mask), keep(a, mask)
    counted = as_mask(mask)
    chosen = _smallest(-_covariances(new, a, counted), counted, _number(fraction, counted, new.dtype))
    d = new - old
    return -exp(d) * a + jnp.where(chosen, coef * magnitude(d), 0.0)


def high_entropy_mask(entropies: Tokens, mask: Mask, *, quantile: Number = 0.8) -> Bool[Array, "*batch T"]:
    """Keep the tokens of highest entropy, where the policy decides; the rest follows by itself.

    keep where H ≥ the q-quantile of H over the counted tokens of the batch

    The quantile of N tokens in rising order is the one at place ⌈q(N − 1)⌉ from 0: the tokens kept are those that an
    interpolated quantile would keep. Tokens equal to it are kept together.

    Args:
        entropies: H of the policy at each token, in nats, `*batch T`; all that is passed in is the batch.
        mask: True where a token counts, `*batch T`.
        quantile: q in [0, 1]; 0.8 keeps the top fifth, 0 everything.

    Returns:
        `*batch T`, False where masked.

    Raises:
        ValueError: if quantile is outside [0, 1].

    Reference:
        Wang et al. (Beyond the 80/20 Rule), arXiv 2506.01939.

    >>> import jax.numpy as jnp
    >>> high_entropy_mask(jnp.array([0.1, 2.0, 0.2, 0.3, 0.0]), jnp.ones(5, bool)).tolist()
    [False, True, False, False, False]

    """
    same_shape(entropies=entropies, mask=mask)
    (h,) = as_float(entropies)
    (quantile,) = numbers(h.dtype, UNIT, quantile=quantile)
    counted = as_mask(mask)
    h = jnp.where(counted, h, jnp.inf)
    ascending = jnp.sort(h.reshape(-1))
    last = jnp.sum(counted, dtype=h.dtype) - 1.0
    # A product that should be whole may come out a rounding above; the ceiling of that would drop a token.
    at = jnp.ceil(quantile * last * (1.0 - 1e-6))
    place = jnp.arange(ascending.shape[0], dtype=h.dtype)
    cut = jnp.max(ascending, where=place <= at, initial=-jnp.inf)
    return counted & (h >= cut)
