"""Losses of pairs that act on Δ, the difference of two log-ratios to a reference, one value per pair."""

from typing import Literal

import jax
import jax.numpy as jnp

from rl_fn._numerics import NOT_NEGATIVE, UNIT, Constant, Number, expm1, keep, known, numbers, require, same_shape
from rl_fn._pairs import (
    Lengths,
    PairMask,
    Pairs,
    beta_of,
    log_ratios,
    per_token,
    smoothed_logistic,
    smoothing_of,
    softplus,
)

Divergence = Literal["reverse_kl", "forward_kl", "js", "alpha"]


def dpo(
    chosen: Pairs,
    rejected: Pairs,
    ref_chosen: Pairs,
    ref_rejected: Pairs,
    mask: PairMask | None = None,
    *,
    beta: Number = 0.1,
    label_smoothing: Number = 0.0,
) -> Pairs:
    """Direct preference optimisation; with label smoothing, the conservative DPO (cDPO).

    −(1 − ε) log σ(βΔ) − ε log σ(−βΔ);  Δ = log π(y_w)/π_ref(y_w) − log π(y_l)/π_ref(y_l)

    Args:
        chosen: log π of the whole preferred response, in nats, `*batch`.
        rejected: log π of the whole dispreferred response, `*batch`.
        ref_chosen: log π_ref of the preferred response, `*batch`.
        ref_rejected: log π_ref of the dispreferred response, `*batch`.
        mask: True where a pair counts, `*batch`; without it every pair does.
        beta: β > 0, the strength of the pull to the reference.
        label_smoothing: ε in [0, ½), the believed share of flipped labels.

    Returns:
        Loss per pair, `*batch`, zero where masked.

    Raises:
        ValueError: for β ≤ 0 or ε outside [0, ½).

    Reference:
        Rafailov et al., arXiv 2305.18290, equation 7; ε: Mitchell, A note on DPO with noisy preferences (2023).

    >>> import jax.numpy as jnp
    >>> zero = jnp.zeros(1)
    >>> print(dpo(zero, zero, zero, zero).round(4))
    [0.6931]

    """
    c, r = log_ratios(chosen, rejected, ref_chosen, ref_rejected, mask)
    beta, label_smoothing = beta_of(c, beta), smoothing_of(c, label_smoothing)
    return keep(smoothed_logistic(beta * (c - r), label_smoothing), mask)


def dpo_robust(
    chosen: Pairs,
    rejected: Pairs,
    ref_chosen: Pairs,
    ref_rejected: Pairs,
    mask: PairMask | None = None,
    *,
    beta: Number = 0.1,
    label_smoothing: Number = 0.1,
) -> Pairs:
    """Robust DPO (rDPO): under labels flipped with probability ε, its expectation is the loss of the clean labels.

    [−(1 − ε) log σ(βΔ) + ε log σ(−βΔ)] / (1 − 2ε)

    Unlike cDPO it has no lower bound: it falls as −εβΔ/(1 − 2ε) for a growing Δ.

    Args:
        chosen: log π of the whole preferred response, in nats, `*batch`.
        rejected: log π of the whole dispreferred response, `*batch`.
        ref_chosen: log π_ref of the preferred response, `*batch`.
        ref_rejected: log π_ref of the dispreferred response, `*batch`.
        mask: True where a pair counts, `*batch`; without it every pair does.
        beta: β > 0.
        label_smoothing: ε in [0, ½), the rate of flipped labels.

    Returns:
        Loss per pair, `*batch`, zero where masked; may be negative.

    Raises:
        ValueError: for β ≤ 0 or ε outside [0, ½).

    Reference:
        Chowdhury et al., arXiv 2403.00409.

    >>> import jax.numpy as jnp
    >>> zero = jnp.zeros(1)
    >>> print(f"{dpo_robust(zero + 8, zero, zero, zero, beta=1.0).item():.4f}")
    -0.9997

    """
    c, r = log_ratios(chosen, rejected, ref_chosen, ref_rejected, mask)
    beta, label_smoothing = beta_of(c, beta), smoothing_of(c, label_smoothing)
    z = beta * (c - r)
    return keep(softplus(-z) - (label_smoothing / (1.0 - 2.0 * label_smoothing)) * z, mask)


def dpo_norm(
    chosen: Pairs,
    rejected: Pairs,
    ref_chosen: Pairs,
    ref_rejected: Pairs,
    chosen_lengths: Lengths,
    rejected_lengths: Lengths,
    mask: PairMask | None = None,
    *,
    beta: Number = 5.0,
    label_smoothing: Number = 0.0,
) -> Pairs:
    """Length-normalised DPO: each log-ratio is averaged over the tokens of its response.

    −(1 − ε) log σ(z) − ε log σ(−z);  z = (β/|y_w|) log π(y_w)/π_ref(y_w) − (β/|y_l|) log π(y_l)/π_ref(y_l)

    Args:
        chosen: log π of the whole preferred response, in nats, `*batch`.
        rejected: log π of the whole dispreferred response, `*batch`.
        ref_chosen: log π_ref of the preferred response, `*batch`.
        ref_rejected: log π_ref of the dispreferred response, `*batch`.
        chosen_lengths: tokens of the preferred response, `*batch`; a length of 0 gives a log-ratio of 0.
        rejected_lengths: tokens of the dispreferred response, `*batch`.
        mask: True where a pair counts, `*batch`; without it every pair does.
        beta: β > 0; larger than DPO's, since the log-ratios are per token.
        label_smoothing: ε in [0, ½).

    Returns:
        Loss per pair, `*batch`, zero where masked.

    Raises:
        ValueError: for β ≤ 0 or ε outside [0, ½).

    Reference:
        Lambert et al. (Tülu 3), arXiv 2411.15124, length-normalised DPO; without the reference it is SimPO's margin.

    >>> import jax.numpy as jnp
    >>> zero, four = jnp.zeros(1), jnp.array([4])
    >>> print(f"{dpo_norm(zero + 4, zero, zero, zero, four, four, beta=1.0).item():.4f}")
    0.3133

    """
    c, r = log_ratios(chosen, rejected, ref_chosen, ref_rejected, mask)
    beta, label_smoothing = beta_of(c, beta), smoothing_of(c, label_smoothing)
    same_shape(chosen=chosen, chosen_lengths=chosen_lengths, rejected_lengths=rejected_lengths)
    z = beta * (per_token(c, chosen_lengths, mask) - per_token(r, rejected_lengths, mask))
    return keep(smoothed_logistic(z, label_smoothing), mask)


def _slope(x: jax.Array, divergence: Divergence, alpha: Constant) -> jax.Array:
    """f′(eˣ) up to a constant, which cancels between the two sides of a pair."""
    if divergence == "reverse_kl" or (divergence == "alpha" and known(alpha) and alpha == 0):
        return x
    if divergence == "forward_kl":
        return -expm1(-x)
    if divergence == "js":
        return -softplus(-x)
    if known(alpha):
        return -expm1(-alpha * x) / alpha
    # A traced α may be 0, where the quotient has a limit and a derivative: near it they are those of its series.
    y = alpha * jnp.where((alpha == 0) & jnp.isinf(x), 0.0, x)
    near = jnp.abs(y) < 1e-2
    small = jnp.where(near, y, 0.0)
    series = 1.0 - small * (1 / 2 - small * (1 / 6 - small * (1 / 24 - small * (1 / 120 - small / 720))))
    quotient = -expm1(-jnp.where(near, 1.0, y)) / jnp.where(alpha == 0, 1.0, alpha)
    return jnp.where(near, x * series, quotient)


def f_dpo(
    chosen: Pairs,
    rejected: Pairs,
    ref_chosen: Pairs,
    ref_rejected: Pairs,
    mask: PairMask | None = None,
    *,
    divergence: Divergence = "reverse_kl",
    alpha: Number = 0.5,
    beta: Number = 0.1,
    label_smoothing: Number = 0.0,
) -> Pairs:
    """DPO under another divergence from the reference than the reverse KL.

    −(1 − ε) log σ(z) − ε log σ(−z);  z = β f′(u_w) − β f′(u_l),  u = π/π_ref;  f′(u) up to a constant:
    reverse_kl log u;  forward_kl −1/u;  js log u/(1 + u);  alpha (1 − u^{−α})/α

    "alpha" is reverse_kl for α → 0 and forward_kl for α = 1. TRL counts the other way round: its coefficient is 1 − α.
    forward_kl and alpha grow exponentially as a log-ratio falls; beyond −64/α (float32) they go on as their tangents.

    Args:
        chosen: log π of the whole preferred response, in nats, `*batch`.
        rejected: log π of the whole dispreferred response, `*batch`.
        ref_chosen: log π_ref of the preferred response, `*batch`.
        ref_rejected: log π_ref of the dispreferred response, `*batch`.
        mask: True where a pair counts, `*batch`; without it every pair does.
        divergence: "reverse_kl" (DPO), "forward_kl", "js" or "alpha".
        alpha: α in [0, 1], read by "alpha" only.
        beta: β > 0.
        label_smoothing: ε in [0, ½).

    Returns:
        Loss per pair, `*batch`, zero where masked.

    Raises:
        ValueError: for β ≤ 0, ε outside [0, ½), α outside [0, 1] or an unknown divergence.

    Reference:
        Wang et al. (f-DPO), arXiv 2309.16240.

    >>> import jax.numpy as jnp
    >>> zero = jnp.zeros(1)
    >>> print(f"{f_dpo(zero + 1, zero, zero, zero, divergence='forward_kl', beta=1.0).item():.4f}")
    0.4262

    """
    require(divergence in ("reverse_kl", "forward_kl", "js", "alpha"), f"unknown divergence {divergence!r}")
    c, r = log_ratios(chosen, rejected, ref_chosen, ref_rejected, mask)
    beta, label_smoothing = beta_of(c, beta), smoothing_of(c, label_smoothing)
    (alpha,) = numbers(c.dtype, UNIT, alpha=alpha)
    z = beta * (_slope(c, divergence, alpha) - _slope(r, divergence, alpha))
    return keep(smoothed_logistic(z, label_smoothing), mask)


def rpo(
    chosen: Pairs,
    rejected: Pairs,
    ref_chosen: Pairs,
    ref_rejected: Pairs,
    chosen_lengths: Lengths,
    mask: PairMask | None = None,
    *,
    alpha: Number = 1.0,
    beta: Number = 0.1,
    label_smoothing: Number = 0.0,
) -> Pairs:
    """DPO plus the negative log-likelihood per token of the preferred response (iterative RPO).

    dpo − α log π(y_w) / |y_w|

    Args:
        chosen: log π of the whole preferred response, in nats, `*batch`.
        rejected: log π of the whole dispreferred response, `*batch`.
        ref_chosen: log π_ref of the preferred response, `*batch`.
        ref_rejected: log π_ref of the dispreferred response, `*batch`.
        chosen_lengths: tokens of the preferred response, `*batch`; for a length of 0 the likelihood is left out.
        mask: True where a pair counts, `*batch`; without it every pair does.
        alpha: α ≥ 0, weight of the likelihood.
        beta: β > 0.
        label_smoothing: ε in [0, ½), of the DPO part.

    Returns:
        Loss per pair, `*batch`, zero where masked.

    Raises:
        ValueError: for β ≤ 0, α < 0 or ε outside [0, ½).

    Reference:
        Pang et al. (Iterative Reasoning Preference Optimization), arXiv 2404.19733. Other methods share the
        name: Nemotron's reward-aware RPO (arXiv 2406.11704) is not this one.

    >>> import jax.numpy as jnp
    >>> zero, two = jnp.zeros(1), jnp.array([2])
    >>> print(rpo(zero - 4, zero, zero - 4, zero, two).round(4))
    [2.6931]

    """
    c, r = log_ratios(chosen, rejected, ref_chosen, ref_rejected, mask)
    beta, label_smoothing = beta_of(c, beta), smoothing_of(c, label_smoothing)
    (alpha,) = numbers(c.dtype, NOT_NEGATIVE, alpha=alpha)
    same_shape(chosen=chosen, chosen_lengths=chosen_lengths)
    preference = smoothed_logistic(beta * (c - r), label_smoothing)
    likelihood = per_token(keep(jnp.asarray(chosen).astype(c.dtype), mask), chosen_lengths, mask)
    return keep(preference - alpha * likelihood, mask)
