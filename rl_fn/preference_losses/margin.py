"""Losses of pairs that want Δ at a target or beyond a margin, one value per pair."""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from rl_fn._numerics import POSITIVE, UNIT, Array, Number, as_float, exp, keep, numbers, repeating
from rl_fn._pairs import PairMask, Pairs, beta_of, log_ratios, softplus


def ipo(
    chosen: Pairs,
    rejected: Pairs,
    ref_chosen: Pairs,
    ref_rejected: Pairs,
    mask: PairMask | None = None,
    *,
    beta: Number = 0.1,
) -> Pairs:
    """Identity preference optimisation: regress Δ on a finite target, where DPO pushes it without end.

    (Δ − 1/(2β))²

    The paper writes log-probabilities of whole responses, as OpenRLHF computes; TRL averages them per token, which by
    its account is what the paper's experiments did. Pass either: the function does not know lengths.

    Args:
        chosen: log π of the preferred response, in nats, summed or averaged over its tokens, `*batch`.
        rejected: log π of the dispreferred response, `*batch`.
        ref_chosen: log π_ref of the preferred response, `*batch`.
        ref_rejected: log π_ref of the dispreferred response, `*batch`.
        mask: True where a pair counts, `*batch`; without it every pair does.
        beta: β > 0, the paper's τ.

    Returns:
        Loss per pair, `*batch`, zero where masked.

    Raises:
        ValueError: for β ≤ 0.

    Reference:
        Azar et al., arXiv 2310.12036, equation 17.

    >>> import jax.numpy as jnp
    >>> zero = jnp.zeros(2)
    >>> ipo(jnp.array([0.0, 1.0]), zero, zero, zero, beta=0.5).tolist()
    [1.0, 0.0]

    """
    c, r = log_ratios(chosen, rejected, ref_chosen, ref_rejected, mask)
    beta = beta_of(c, beta)
    return keep(jnp.square(c - r - 0.5 / beta), mask)


def hinge(
    chosen: Pairs,
    rejected: Pairs,
    ref_chosen: Pairs,
    ref_rejected: Pairs,
    mask: PairMask | None = None,
    *,
    beta: Number = 0.1,
) -> Pairs:
    """Hinge loss of βΔ (SLiC's calibration loss, normalised by a reference).

    max(0, 1 − βΔ)

    SLiC-HF itself has no reference (pass zeros for it) and adds a likelihood term; RSO brought in the reference.

    Args:
        chosen: log π of the whole preferred response, in nats, `*batch`.
        rejected: log π of the whole dispreferred response, `*batch`.
        ref_chosen: log π_ref of the preferred response, `*batch`.
        ref_rejected: log π_ref of the dispreferred response, `*batch`.
        mask: True where a pair counts, `*batch`; without it every pair does.
        beta: β > 0, the inverse of the margin.

    Returns:
        Loss per pair, `*batch`, zero where masked.

    Raises:
        ValueError: for β ≤ 0.

    Reference:
        Zhao et al. (SLiC-HF), arXiv 2305.10425; Liu et al. (RSO), arXiv 2309.06657 (hinge-norm).

    >>> import jax.numpy as jnp
    >>> zero = jnp.zeros(2)
    >>> hinge(jnp.array([0.5, 4.0]), zero, zero, zero, beta=0.5).tolist()
    [0.75, 0.0]

    """
    c, r = log_ratios(chosen, rejected, ref_chosen, ref_rejected, mask)
    beta = beta_of(c, beta)
    return keep(jnp.maximum(1.0 - beta * (c - r), 0.0), mask)


def sppo(
    chosen: Pairs,
    rejected: Pairs,
    ref_chosen: Pairs,
    ref_rejected: Pairs,
    mask: PairMask | None = None,
    *,
    beta: Number = 1e-3,
    chosen_win_rate: Number | Float[Array, "..."] = 1.0,
    rejected_win_rate: Number | Float[Array, "..."] = 0.0,
) -> Pairs:
    """Self-play preference optimisation: regress each log-ratio on the win rate of its response.

    (log π(y_w)/π_ref(y_w) − (p_w − ½)/β)² + (log π(y_l)/π_ref(y_l) − (p_l − ½)/β)²

    With the default win rates 1 and 0 this is the hard form of TRL; the paper estimates them with a preference model.

    Args:
        chosen: log π of the whole preferred response, in nats, `*batch`.
        rejected: log π of the whole dispreferred response, `*batch`.
        ref_chosen: log π_ref of the preferred response, `*batch`; in the paper π_ref is the policy of the last round.
        ref_rejected: log π_ref of the dispreferred response, `*batch`.
        mask: True where a pair counts, `*batch`; without it every pair does.
        beta: β > 0, 1/η in the paper.
        chosen_win_rate: p_w, probability that the response beats one of the policy's, a number or `*batch` (1 where
            it repeats).
        rejected_win_rate: p_l, likewise.

    Returns:
        Loss per pair, `*batch`, zero where masked.

    Raises:
        ValueError: for β ≤ 0, or a win rate outside of [0, 1].

    Reference:
        Wu et al., arXiv 2405.00675, equation 4.7.

    >>> import jax.numpy as jnp
    >>> zero = jnp.zeros(1)
    >>> sppo(zero + 1, zero, zero, zero, beta=0.5).tolist()
    [1.0]

    """
    c, r = log_ratios(chosen, rejected, ref_chosen, ref_rejected, mask)
    beta = beta_of(c, beta)
    rates = {"chosen_win_rate": chosen_win_rate, "rejected_win_rate": rejected_win_rate}
    chosen_win_rate, rejected_win_rate = repeating(c.shape, UNIT, **rates)
    _, p_w, p_l = as_float(c, chosen_win_rate, rejected_win_rate)
    p_w, p_l = keep(p_w, mask), keep(p_l, mask)
    return keep(jnp.square(c - (p_w - 0.5) / beta) + jnp.square(r - (p_l - 0.5) / beta), mask)


def discopop(
    chosen: Pairs,
    rejected: Pairs,
    ref_chosen: Pairs,
    ref_rejected: Pairs,
    mask: PairMask | None = None,
    *,
    beta: Number = 0.05,
    tau: Number = 0.05,
) -> Pairs:
    """DiscoPOP, the log-ratio modulated loss: a blend of the logistic and the exponential loss; not convex.

    (1 − σ(z/τ)) · (−log σ(z)) + σ(z/τ) · e^{−z};  z = βΔ

    The second term is taken as exp(log σ(z/τ) − z): for τ < 1 it cannot overflow, for τ ≥ 1 and z → −∞ it goes on as
    the exponential's tangent.

    Args:
        chosen: log π of the whole preferred response, in nats, `*batch`.
        rejected: log π of the whole dispreferred response, `*batch`.
        ref_chosen: log π_ref of the preferred response, `*batch`.
        ref_rejected: log π_ref of the dispreferred response, `*batch`.
        mask: True where a pair counts, `*batch`; without it every pair does.
        beta: β > 0.
        tau: τ > 0, temperature of the blend.

    Returns:
        Loss per pair, `*batch`, zero where masked.

    Raises:
        ValueError: for β ≤ 0 or τ ≤ 0.

    Reference:
        Lu et al., arXiv 2406.08414, equation 5.

    >>> import jax.numpy as jnp
    >>> zero = jnp.zeros(1)
    >>> print(discopop(zero, zero, zero, zero).round(4))
    [0.8466]

    """
    c, r = log_ratios(chosen, rejected, ref_chosen, ref_rejected, mask)
    beta = beta_of(c, beta)
    (tau,) = numbers(c.dtype, POSITIVE, tau=tau)
    z = beta * (c - r)
    logistic = jax.nn.sigmoid(-z / tau) * softplus(-z)
    return keep(logistic + exp(-softplus(-z / tau) - z), mask)
