"""Returns and advantages from a critic, per token; each is one call of the linear recurrence."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Float, Real

from rl_fn._numerics import (
    ANY,
    NOT_NEGATIVE,
    POSITIVE,
    UNIT,
    Array,
    Mask,
    Number,
    Segments,
    Tokens,
    as_float,
    as_mask,
    deviations,
    divide,
    numbers,
    per_row,
    same_shape,
    variance,
)
from rl_fn.recurrence import following_recurrence, linear_recurrence, next_counted


class Advantages(NamedTuple):
    """Per-token advantages and the returns that a critic regresses on, both `*batch T`, zero where masked.

    An Objective without a critic has no returns: they are None.
    """

    advantages: Tokens
    returns: Tokens


def discounted_returns(
    rewards: Tokens, mask: Mask, *, gamma: Number = 1.0, segment_ids: Segments | None = None
) -> Tokens:
    """Discounted return of every token.

    Gₜ = rₜ + γ Gₜ₊₁

    Args:
        rewards: per-token rewards, `*batch T`.
        mask: True where a token counts, `*batch T`; the recursion jumps over the others.
        gamma: discount per counted token, in [0, 1].
        segment_ids: `*batch T`, for several sequences packed into a row.

    Returns:
        G, `*batch T`, zero where masked.

    Raises:
        ValueError: if gamma is outside [0, 1].

    Reference:
        Sutton & Barto, Reinforcement Learning (2018), chapter 3.

    >>> import jax.numpy as jnp
    >>> discounted_returns(jnp.array([0.0, 0.0, 1.0]), jnp.ones(3, bool), gamma=0.5).tolist()
    [0.25, 0.5, 1.0]

    """
    same_shape(rewards=rewards, mask=mask, segment_ids=segment_ids)
    (gamma,) = numbers(as_float(rewards)[0].dtype, UNIT, gamma=gamma)
    return linear_recurrence(gamma, rewards, mask, segment_ids=segment_ids)


def gae(
    rewards: Tokens,
    values: Tokens,
    mask: Mask,
    *,
    gamma: Number = 1.0,
    lam: Number | Float[Array, "..."] = 1.0,
    bootstrap: Number | Float[Array, "..."] = 0.0,
    segment_ids: Segments | None = None,
) -> Advantages:
    """Generalised advantage estimation.

    δₜ = rₜ + γ Vₜ₊₁ − Vₜ;  Aₜ = δₜ + γλ Aₜ₊₁;  returns = A + V

    Args:
        rewards: per-token rewards, `*batch T`.
        values: V, `*batch T`.
        mask: True where a token counts, `*batch T`. Tool outputs inside a sequence are masked out and skipped: t + 1 is
            the next counted token.
        gamma: discount, in [0, 1].
        lam: λ in [0, 1], a number or one per row `*batch` (see length_adaptive_lambda).
        bootstrap: value after the last token (of every segment), a number or `*batch`.
        segment_ids: `*batch T`, for several sequences packed into a row.

    Returns:
        Advantages(advantages, returns), both `*batch T`, zero where masked.

    Raises:
        ValueError: if gamma, or lam as a number, is outside [0, 1].

    Reference:
        Schulman et al., arXiv 1506.02438, equation 16.

    >>> import jax.numpy as jnp
    >>> gae(jnp.array([0.0, 1.0]), jnp.array([0.5, 0.5]), jnp.ones(2, bool)).advantages.tolist()
    [0.5, 0.5]

    """
    same_shape(rewards=rewards, values=values, mask=mask, segment_ids=segment_ids)
    (lam,) = per_row(rewards.shape[:-1], UNIT, lam=lam)
    (bootstrap,) = per_row(rewards.shape[:-1], ANY, bootstrap=bootstrap)
    r, v, lam_, last = as_float(rewards, values, lam, bootstrap)
    (gamma,) = numbers(r.dtype, UNIT, gamma=gamma)
    counted = as_mask(mask)
    r, v = jnp.where(counted, r, 0.0), jnp.where(counted, v, 0.0)
    # One recurrence for Vₜ₊₁ and Aₜ₊₁ together: U = V + λA, Uₜ = (1 − λ)Vₜ + λrₜ + γλUₜ₊₁, Aₜ = rₜ + γUₜ₊₁ − Vₜ.
    rows = lam_[..., None] if lam_.ndim else lam_
    after = following_recurrence(gamma * lam_, (1.0 - rows) * v + rows * r, counted, last, segment_ids)
    advantages = jnp.where(counted, r + gamma * after - v, 0.0)
    return Advantages(advantages, jnp.where(counted, advantages + v, 0.0))


def td_lambda(
    rewards: Tokens,
    values: Tokens,
    mask: Mask,
    *,
    gamma: Number = 1.0,
    lam: Number | Float[Array, "..."] = 1.0,
    bootstrap: Number | Float[Array, "..."] = 0.0,
    segment_ids: Segments | None = None,
) -> Advantages:
    """λ-returns, and advantages as their distance to the critic; equal to gae, reached by another recursion.

    Gₜ = rₜ + γ[(1 − λ)Vₜ₊₁ + λ Gₜ₊₁];  A = G − V

    Args:
        rewards: per-token rewards, `*batch T`.
        values: V, `*batch T`.
        mask: True where a token counts, `*batch T`; t + 1 is the next counted token.
        gamma: discount, in [0, 1].
        lam: λ in [0, 1], a number or one per row `*batch`.
        bootstrap: value after the last token (of every segment), a number or `*batch`.
        segment_ids: `*batch T`, for several sequences packed into a row.

    Returns:
        Advantages(advantages, returns), both `*batch T`, zero where masked.

    Raises:
        ValueError: if gamma, or lam as a number, is outside [0, 1].

    Reference:
        Sutton & Barto, Reinforcement Learning (2018), chapter 12 (λ-returns, with a state value).

    >>> import jax.numpy as jnp
    >>> td_lambda(jnp.array([0.0, 1.0]), jnp.array([0.5, 0.5]), jnp.ones(2, bool)).returns.tolist()
    [1.0, 1.0]

    """
    same_shape(rewards=rewards, values=values, mask=mask, segment_ids=segment_ids)
    (lam,) = per_row(rewards.shape[:-1], UNIT, lam=lam)
    (bootstrap,) = per_row(rewards.shape[:-1], ANY, bootstrap=bootstrap)
    r, v, lam_, last = as_float(rewards, values, lam, bootstrap)
    (gamma,) = numbers(r.dtype, UNIT, gamma=gamma)
    counted = as_mask(mask)
    r, v = jnp.where(counted, r, 0.0), jnp.where(counted, v, 0.0)
    column = lam_[..., None] if lam_.ndim else lam_
    inputs = r + gamma * (1.0 - column) * next_counted(v, counted, last, segment_ids)
    returns = linear_recurrence(gamma * lam_, inputs, counted, init=last, segment_ids=segment_ids)
    return Advantages(jnp.where(counted, returns - v, 0.0), returns)


def length_adaptive_lambda(
    lengths: Real[Array, "*batch"], *, alpha: Number = 0.05, minimum: Number | None = None
) -> Float[Array, "*batch"]:
    """VAPO's λ for a sequence of l tokens, so that the effective horizon grows with the answer.

    λ = 1 − 1/(α l)

    The paper has no lower bound, and below l = 1/α the formula is negative; `minimum=0.0` bounds it.

    Args:
        lengths: l, counted tokens per sequence, `*batch`.
        alpha: share of the length that the horizon spans, > 0.
        minimum: lower bound of λ; none by default.

    Returns:
        λ, `*batch`; 0 for an empty sequence, where nothing is discounted.

    Raises:
        ValueError: if alpha is not positive.

    Reference:
        Yue et al. (VAPO), arXiv 2504.05118, equation 5 (length-adaptive GAE).

    >>> import jax.numpy as jnp
    >>> print(length_adaptive_lambda(jnp.array([100, 1000])))
    [0.8  0.98]

    """
    (length,) = as_float(lengths)
    (alpha,) = numbers(length.dtype, POSITIVE, alpha=alpha)
    lam = jnp.where(length > 0, 1.0 - divide(jnp.ones_like(length), alpha * length), 0.0)
    if minimum is None:
        return lam
    return jnp.maximum(lam, numbers(length.dtype, ANY, minimum=minimum)[0])


def whiten(x: Tokens, mask: Mask, *, shift_mean: bool = True, eps: Number = 1e-8) -> Tokens:
    """Mean 0 and variance 1 over all masked-in entries of all dimensions.

    (x − mean) / √(var + ε), variance unbiased (n − 1)

    Args:
        x: `*batch T`.
        mask: True where an entry counts, `*batch T`.
        shift_mean: False adds the mean back, so that only the scale changes.
        eps: ε, added to the variance; with 0, equal entries still give 0.

    Returns:
        Whitened x, `*batch T`, zero where masked. One entry has variance 0, and becomes 0.

    Raises:
        ValueError: if eps is negative.

    Reference:
        Ziegler et al., arXiv 1909.08593 (the released code whitens rewards and advantages so).

    >>> import jax.numpy as jnp
    >>> whiten(jnp.array([1.0, 2.0, 3.0]), jnp.ones(3, bool)).round(4).tolist()
    [-1.0, 0.0, 1.0]

    """
    same_shape(x=x, mask=mask)
    (values,) = as_float(x)
    (eps,) = numbers(values.dtype, NOT_NEGATIVE, eps=eps)
    counted = as_mask(mask)
    mean, deviation, count = deviations(values, counted)
    spread = variance(deviation, count, None) + eps
    flat = spread == 0
    whitened = jnp.where(flat, 0.0, deviation / jnp.sqrt(jnp.where(flat, 1.0, spread)))
    return whitened if shift_mean else jnp.where(counted, whitened + mean, 0.0)
