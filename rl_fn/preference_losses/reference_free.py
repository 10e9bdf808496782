"""Losses of pairs that need no reference model, one value per pair."""

import jax
import jax.numpy as jnp

from rl_fn._numerics import ANY, NOT_NEGATIVE, Number, as_float, keep, numbers, same_shape
from rl_fn._pairs import PairMask, Pairs, beta_of, both, smoothed_logistic, smoothing_of, softplus


def _log_odds(logprob: jax.Array) -> jax.Array:
    """Take log p − log(1 − p) of p = e^logprob; a logprob of 0 or more counts as the largest one below 0."""
    x = jnp.minimum(logprob, -float(jnp.finfo(logprob.dtype).tiny))
    near = x > -0.5
    # Two forms of log(1 − eˣ): one keeps the digits near 0, the other far from it; each sees only its own half.
    close = jnp.log(-jnp.expm1(jnp.where(near, x, -0.5)))
    far = jnp.log1p(-jnp.exp(jnp.where(near, -0.5, x)))
    return x - jnp.where(near, close, far)


def orpo(chosen: Pairs, rejected: Pairs, mask: PairMask | None = None, *, lam: Number = 0.1) -> Pairs:
    """Odds-ratio preference optimisation: likelihood of the preferred response plus a penalty on the odds ratio.

    −log p_w − λ log σ(log odds(p_w) − log odds(p_l));  odds(p) = p/(1 − p),  log p = mean log π per token

    Nothing is clamped: log(1 − p) is taken without cancellation, and a log-probability that rounding put at 0 or above
    counts as the largest number below 0 (log-odds 87 in float32), without gradient. The gradient's factor 1/(1 − p)
    grows without bound as p_l → 1; that is the formula's. TRL averages −log p_w over the tokens of the batch instead.

    Args:
        chosen: mean log π per token of the preferred response, in nats, `*batch`.
        rejected: mean log π per token of the dispreferred response, `*batch`.
        mask: True where a pair counts, `*batch`; without it every pair does.
        lam: λ ≥ 0, weight of the odds ratio.

    Returns:
        Loss per pair, `*batch`, zero where masked.

    Raises:
        ValueError: for λ < 0.

    Reference:
        Hong et al., arXiv 2403.07691, equations 4 to 7.

    >>> import jax.numpy as jnp
    >>> half = jnp.log(jnp.array([0.5]))
    >>> print(orpo(half, half, lam=1.0).round(4))
    [1.3863]

    """
    c, r = both(chosen, rejected, mask)
    (lam,) = numbers(c.dtype, NOT_NEGATIVE, lam=lam)
    return keep(lam * softplus(_log_odds(r) - _log_odds(c)) - c, mask)


def simpo(
    chosen: Pairs, rejected: Pairs, mask: PairMask | None = None, *, beta: Number = 2.0, gamma: Number = 1.0
) -> Pairs:
    """SimPO, simple preference optimisation: mean log-probabilities as rewards, and a target margin.

    −log σ(β log p_w − β log p_l − γ);  log p = mean log π per token

    Args:
        chosen: mean log π per token of the preferred response, in nats, `*batch`.
        rejected: mean log π per token of the dispreferred response, `*batch`.
        mask: True where a pair counts, `*batch`; without it every pair does.
        beta: β > 0.
        gamma: γ, the target margin, in units of reward.

    Returns:
        Loss per pair, `*batch`, zero where masked.

    Raises:
        ValueError: for β ≤ 0.

    Reference:
        Meng et al., arXiv 2405.14734, equation 6.

    >>> import jax.numpy as jnp
    >>> print(simpo(jnp.array([-1.0]), jnp.array([-1.5])).round(4))
    [0.6931]

    """
    c, r = both(chosen, rejected, mask)
    beta = beta_of(c, beta)
    (gamma,) = numbers(c.dtype, ANY, gamma=gamma)
    return keep(softplus(gamma - beta * (c - r)), mask)


def cpo(
    chosen: Pairs,
    rejected: Pairs,
    mask: PairMask | None = None,
    *,
    beta: Number = 0.1,
    alpha: Number = 1.0,
    label_smoothing: Number = 0.0,
) -> Pairs:
    """Contrastive preference optimisation: DPO with a uniform reference, plus the preferred response's likelihood.

    −(1 − ε) log σ(z) − ε log σ(−z) − α log π(y_w);  z = β log π(y_w)/π(y_l)

    The paper has ε = 0 and α = 1 with the whole log π(y_w); TRL averages that term over the tokens of the batch.

    Args:
        chosen: log π of the whole preferred response, in nats, `*batch`.
        rejected: log π of the whole dispreferred response, `*batch`.
        mask: True where a pair counts, `*batch`; without it every pair does.
        beta: β > 0.
        alpha: α ≥ 0, weight of the likelihood.
        label_smoothing: ε in [0, ½).

    Returns:
        Loss per pair, `*batch`, zero where masked.

    Raises:
        ValueError: for β ≤ 0, α < 0 or ε outside [0, ½).

    Reference:
        Xu et al., arXiv 2401.08417.

    >>> import jax.numpy as jnp
    >>> print(cpo(jnp.array([-2.0]), jnp.array([-2.0])).round(4))
    [2.6931]

    """
    c, r = both(chosen, rejected, mask)
    beta, label_smoothing = beta_of(c, beta), smoothing_of(c, label_smoothing)
    (alpha,) = numbers(c.dtype, NOT_NEGATIVE, alpha=alpha)
    return keep(smoothed_logistic(beta * (c - r), label_smoothing) - alpha * c, mask)


def tpo(
    chosen: Pairs,
    rejected: Pairs,
    gold: Pairs,
    mask: PairMask | None = None,
    *,
    beta: Number = 0.01,
    alpha: Number = 1.0,
    gamma: Number = 0.0,
) -> Pairs:
    """Triple preference optimisation: a preference between two responses and the likelihood of a third, the gold one.

    −log σ(β log π(y_w) − β log π(y_l) − γ) − α log π(y_gold)

    With mean log-probabilities per token for the pair and γ > 0 it is the paper's TPO-L. TRL averages the gold term
    over the tokens of the batch.

    Args:
        chosen: log π of the preferred response, in nats, `*batch`.
        rejected: log π of the dispreferred response, `*batch`.
        gold: log π of the gold response, `*batch`.
        mask: True where a triple counts, `*batch`; without it every triple does.
        beta: β > 0.
        alpha: α ≥ 0, weight of the gold response.
        gamma: γ, the target margin of TPO-L, in units of reward.

    Returns:
        Loss per triple, `*batch`, zero where masked.

    Raises:
        ValueError: for β ≤ 0 or α < 0.

    Reference:
        Saeidi et al., arXiv 2405.16681.

    >>> import jax.numpy as jnp
    >>> print(tpo(jnp.array([-2.0]), jnp.array([-2.0]), jnp.array([-3.0])).round(4))
    [3.6931]

    """
    same_shape(chosen=chosen, rejected=rejected, gold=gold, mask=mask)
    c, r, g = as_float(chosen, rejected, gold)
    beta = beta_of(c, beta)
    (alpha,) = numbers(c.dtype, NOT_NEGATIVE, alpha=alpha)
    (gamma,) = numbers(c.dtype, ANY, gamma=gamma)
    c, r, g = keep(c, mask), keep(r, mask), keep(g, mask)
    return keep(softplus(gamma - beta * (c - r)) - alpha * g, mask)
