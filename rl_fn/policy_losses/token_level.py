"""Policy losses whose token depends on itself alone, to be minimised: variants of PPO and of REINFORCE."""

import jax
import jax.numpy as jnp

from rl_fn._numerics import (
    NOT_NEGATIVE,
    POSITIVE,
    Mask,
    Number,
    Tokens,
    as_float,
    exp,
    keep,
    log,
    numbers,
    own_gradient,
    require,
    same_shape,
)
from rl_fn.policy_losses.ppo import ppo_clip, reinforce

DIVERGENCES = ("tv", "kl")


def gpg_loss(logprobs: Tokens, advantages: Tokens, mask: Mask | None = None) -> Tokens:
    """Group policy gradient: REINFORCE under the name of its recipe; what is new is in gpg_advantages.

    −A log π

    Args:
        logprobs: log π of the sampled tokens, in nats, `*batch T`.
        advantages: A, `*batch T`.
        mask: True where a token counts, `*batch T`; without it every token does.

    Returns:
        Loss per token, `*batch T`, zero where masked.

    Raises:
        ValueError: if the mask is not boolean.

    Reference:
        Chu et al. (GPG), arXiv 2504.02546, equation 5.

    >>> import jax.numpy as jnp
    >>> gpg_loss(jnp.array([-0.5]), jnp.array([2.0])).tolist()
    [1.0]

    """
    return reinforce(logprobs, advantages, mask)


def decoupled_ppo(
    logprobs: Tokens,
    proximal_logprobs: Tokens,
    rollout_logprobs: Tokens,
    advantages: Tokens,
    mask: Mask | None = None,
    *,
    clip_low: Number = 0.2,
    clip_high: Number = 0.2,
    dual_clip: Number | None = None,
    weight_cap: Number | None = None,
) -> Tokens:
    """PPO whose trust region is around a recent policy, while the data come from an older one.

    −(π_prox/μ) min(uA, clip(u, 1 − ε_low, 1 + ε_high)A);  u = π/π_prox

    The weight π_prox/μ carries no gradient and is not bounded in the paper: beyond a log-ratio of 64 (float32) it goes
    on as the exponential's tangent, and times an unclipped u it can overflow. weight_cap and dual_clip bound the two.

    Args:
        logprobs: log π of the sampled tokens, in nats, `*batch T`.
        proximal_logprobs: log π_prox, usually the policy before this step's updates, `*batch T`.
        rollout_logprobs: log μ, the policy that sampled, `*batch T`.
        advantages: A, `*batch T`.
        mask: True where a token counts, `*batch T`; without it every token does.
        clip_low: ε_low ≥ 0.
        clip_high: ε_high ≥ 0.
        dual_clip: bound of u for A < 0, > 1; none by default.
        weight_cap: bound of π_prox/μ, > 0; none by default.

    Returns:
        Loss per token, `*batch T`, zero where masked.

    Raises:
        ValueError: for a negative clip, dual_clip ≤ 1 or a weight_cap that is not positive.

    Reference:
        Fu et al. (AReaL), arXiv 2505.24298, equations 4 and 5; after Hilton et al., arXiv 2110.00641.

    >>> import jax.numpy as jnp
    >>> new, prox, rollout = (jnp.log(jnp.array([x])) for x in (0.6, 0.4, 0.2))
    >>> print(decoupled_ppo(new, prox, rollout, jnp.array([1.0]), clip_high=0.25).round(3))
    [-2.5]

    """
    same_shape(logprobs=logprobs, proximal_logprobs=proximal_logprobs, rollout_logprobs=rollout_logprobs, mask=mask)
    prox, rollout = as_float(proximal_logprobs, rollout_logprobs)
    weight = jax.lax.stop_gradient(exp(keep(prox, mask) - keep(rollout, mask)))
    if weight_cap is not None:
        weight = jnp.minimum(weight, numbers(weight.dtype, POSITIVE, weight_cap=weight_cap)[0])
    loss = ppo_clip(
        logprobs, proximal_logprobs, advantages, mask, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    return weight * loss


def cispo(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Tokens,
    mask: Mask | None = None,
    *,
    clip_high: Number,
    clip_low: Number | None = None,
) -> Tokens:
    """Clip the importance weight instead of the update, so that every token keeps a gradient.

    −sg(clip(ρ, 1 − ε_low, 1 + ε_high)) A log π;  ρ = π/π_old

    The paper imposes no lower bound. Libraries differ in what clip_high means: an offset from 1 as here (verl, slime,
    NeMo-RL), or the cap itself (TRL).

    Args:
        logprobs: log π of the sampled tokens, in nats, `*batch T`.
        old_logprobs: log π_old of the same tokens, `*batch T`.
        advantages: A, `*batch T`.
        mask: True where a token counts, `*batch T`; without it every token does.
        clip_high: ε_high ≥ 0.
        clip_low: ε_low ≥ 0; no lower bound by default.

    Returns:
        Loss per token, `*batch T`, zero where masked.

    Raises:
        ValueError: for a negative clip.

    Reference:
        MiniMax (MiniMax-M1), arXiv 2506.13585, equations 4 and 5.

    >>> import jax.numpy as jnp
    >>> new, old = jnp.array([-1.0, -1.0]), jnp.array([-4.0, -1.0])
    >>> cispo(new, old, jnp.array([1.0, 1.0]), clip_high=1.0).tolist()
    [2.0, 1.0]

    """
    same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    new, old, a = as_float(logprobs, old_logprobs, advantages)
    (clip_high,) = numbers(new.dtype, NOT_NEGATIVE, clip_high=clip_high)
    new, old, a = keep(new, mask), keep(old, mask), keep(a, mask)
    weight = jnp.minimum(exp(new - old), 1.0 + clip_high)
    if clip_low is not None:
        weight = jnp.maximum(weight, 1.0 - numbers(new.dtype, NOT_NEGATIVE, clip_low=clip_low)[0])
    return -jax.lax.stop_gradient(weight) * a * new


def sapo(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Tokens,
    mask: Mask | None = None,
    *,
    tau_pos: Number = 1.0,
    tau_neg: Number = 1.05,
) -> Tokens:
    """Soft gate in place of the clip: the gradient fades as the ratio leaves 1, and at 1 it is REINFORCE's.

    −(4/τ) σ(τ(ρ − 1)) A;  ρ = π/π_old,  τ = τ_pos where A > 0, else τ_neg

    Args:
        logprobs: log π of the sampled tokens, in nats, `*batch T`.
        old_logprobs: log π_old of the same tokens, `*batch T`.
        advantages: A, `*batch T`.
        mask: True where a token counts, `*batch T`; without it every token does.
        tau_pos: τ_pos > 0.
        tau_neg: τ_neg > 0; larger fades faster.

    Returns:
        Loss per token, `*batch T`, zero where masked; at most 4|A|/τ in size.

    Raises:
        ValueError: if a τ is not positive.

    Reference:
        Gao et al. (SAPO), arXiv 2511.20347, equations 5 and 6.

    >>> import jax.numpy as jnp
    >>> sapo(jnp.zeros(2), jnp.zeros(2), jnp.array([1.0, -1.0]), tau_neg=2.0).tolist()
    [-2.0, 1.0]

    """
    same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    new, old, a = as_float(logprobs, old_logprobs, advantages)
    tau_pos, tau_neg = numbers(new.dtype, POSITIVE, "τ", tau_pos=tau_pos, tau_neg=tau_neg)
    new, old, a = keep(new, mask), keep(old, mask), keep(a, mask)
    tau = jnp.where(a > 0, jnp.asarray(tau_pos, a.dtype), jnp.asarray(tau_neg, a.dtype))
    return -(4.0 / tau) * jax.nn.sigmoid(tau * (exp(new - old) - 1.0)) * a


def _binary_kl(old: jax.Array, new: jax.Array) -> jax.Array:
    """KL between Bernoulli distributions of "this token or another", from the token's two log-probabilities."""
    p, q = jnp.exp(old), jnp.exp(new)
    other = jnp.where(p < 1.0, (1.0 - p) * (jnp.log1p(-jnp.where(p < 1.0, p, 0.0)) - jnp.log1p(-q)), 0.0)
    return p * (old - new) + other


def dppo(
    logprobs: Tokens,
    old_logprobs: Tokens,
    advantages: Tokens,
    mask: Mask | None = None,
    *,
    threshold: Number,
    divergence: str = "tv",
    ratio_cap: Number | None = None,
) -> Tokens:
    """PPO whose trust region is a divergence of the token's probability rather than its ratio.

    −M ρ A;  M = 0 where D > δ and the update would move ρ further from 1 (A > 0 ∧ ρ > 1, or A < 0 ∧ ρ < 1), else 1

    D is the divergence between "this token or another" under the two policies: tv |π − π_old|, kl
    π_old log(π_old/π) + (1 − π_old) log((1 − π_old)/(1 − π)). A rare token may change its ratio a lot, a likely one
    may not. π_old is the policy that sampled. verl truncates ρ at 20 and differentiates log π, as ratio_cap does.

    Args:
        logprobs: log π of the sampled tokens, in nats, `*batch T`.
        old_logprobs: log π_old of the same tokens, `*batch T`.
        advantages: A, `*batch T`.
        mask: True where a token counts, `*batch T`; without it every token does.
        threshold: δ > 0: a probability for tv, nats for kl.
        divergence: "tv" or "kl".
        ratio_cap: ρ is held at this value, in the value and in the gradient ρA∇log π, > 0; none by default.

    Returns:
        Loss per token, `*batch T`, zero where masked and outside the trust region.

    Raises:
        ValueError: for an unknown divergence, or a threshold or ratio_cap that is not positive.

    Reference:
        Qi et al. (DPPO), arXiv 2602.04879, equations 12 to 14 of its version 3.

    >>> import jax.numpy as jnp
    >>> new, old = jnp.log(jnp.array([0.02, 0.9])), jnp.log(jnp.array([0.01, 0.6]))
    >>> dppo(new, old, jnp.ones(2), threshold=0.2).round(3).tolist()
    [-2.0, 0.0]

    """
    require(divergence in DIVERGENCES, f"divergence must be one of {DIVERGENCES}, got {divergence!r}")
    same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    new, old, a = as_float(logprobs, old_logprobs, advantages)
    (threshold,) = numbers(new.dtype, POSITIVE, threshold=threshold)
    new, old, a = keep(new, mask), keep(old, mask), keep(a, mask)
    fixed = jax.lax.stop_gradient(new)
    distance = jnp.abs(jnp.exp(fixed) - jnp.exp(old)) if divergence == "tv" else _binary_kl(old, fixed)
    outward = ((a > 0) & (fixed > old)) | ((a < 0) & (fixed < old))
    ratio = exp(new - old)
    if ratio_cap is not None:
        (ratio_cap,) = numbers(new.dtype, POSITIVE, ratio_cap=ratio_cap)
        held = jnp.exp(jnp.minimum(fixed - old, log(ratio_cap)))
        ratio = held * jnp.exp(own_gradient(new))
    return jnp.where(outward & (distance > threshold), 0.0, -ratio * a)
