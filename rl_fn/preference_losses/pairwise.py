"""Losses of pairs that look at the two log-ratios separately, not only at their difference; one value per pair."""

import jax
from jaxtyping import Float

from rl_fn._numerics import Array, Number, Range, as_float, keep, log, log1p, numbers, repeating
from rl_fn._pairs import PairMask, Pairs, beta_of, log_ratios, softplus

_INSIDE_HALF = Range("must be in (0, 0.5)", lambda x: 0 < x < 0.5)


def exo(
    chosen: Pairs,
    rejected: Pairs,
    ref_chosen: Pairs,
    ref_rejected: Pairs,
    mask: PairMask | None = None,
    *,
    beta: Number = 0.1,
    label_smoothing: Number = 1e-3,
) -> Pairs:
    """Efficient exact optimisation from pairs: the reverse KL where DPO with smoothing has the forward one.

    q log(q/(1 − ε)) + (1 − q) log((1 − q)/ε);  q = σ(βΔ)

    Zero exactly where q = 1 − ε, and its gradient vanishes as Δ → −∞, where DPO's is largest.

    Args:
        chosen: log π of the whole preferred response, in nats, `*batch`.
        rejected: log π of the whole dispreferred response, `*batch`.
        ref_chosen: log π_ref of the preferred response, `*batch`.
        ref_rejected: log π_ref of the dispreferred response, `*batch`.
        mask: True where a pair counts, `*batch`; without it every pair does.
        beta: β > 0, the paper's β_π.
        label_smoothing: ε in (0, ½); at 0 the KL is infinite.

    Returns:
        Loss per pair, `*batch`, ≥ 0 to rounding, zero where masked.

    Raises:
        ValueError: for β ≤ 0 or ε outside (0, ½).

    Reference:
        Ji et al., arXiv 2402.00856, equation 16.

    >>> import jax.numpy as jnp
    >>> zero = jnp.zeros(1)
    >>> print(f"{exo(zero, zero, zero, zero, label_smoothing=0.25).item():.4f}")
    0.1438

    """
    c, r = log_ratios(chosen, rejected, ref_chosen, ref_rejected, mask)
    beta = beta_of(c, beta)
    (label_smoothing,) = numbers(c.dtype, _INSIDE_HALF, label_smoothing=label_smoothing)
    z = beta * (c - r)
    chosen_part = jax.nn.sigmoid(z) * (-softplus(-z) - log1p(-label_smoothing))
    rejected_part = jax.nn.sigmoid(-z) * (-softplus(z) - log(label_smoothing))
    return keep(chosen_part + rejected_part, mask)


def nca(
    chosen: Pairs,
    rejected: Pairs,
    ref_chosen: Pairs,
    ref_rejected: Pairs,
    mask: PairMask | None = None,
    *,
    beta: Number = 0.01,
) -> Pairs:
    """Noise-contrastive alignment of a pair: it keeps the likelihood of the preferred response from falling.

    −log σ(r_w) − ½ log σ(−r_w) − ½ log σ(−r_l);  r = β log π/π_ref

    Args:
        chosen: log π of the whole preferred response, in nats, `*batch`.
        rejected: log π of the whole dispreferred response, `*batch`.
        ref_chosen: log π_ref of the preferred response, `*batch`.
        ref_rejected: log π_ref of the dispreferred response, `*batch`.
        mask: True where a pair counts, `*batch`; without it every pair does.
        beta: β > 0.

    Returns:
        Loss per pair, `*batch`, zero where masked.

    Raises:
        ValueError: for β ≤ 0.

    Reference:
        Chen et al., arXiv 2402.05369.

    >>> import jax.numpy as jnp
    >>> zero = jnp.zeros(1)
    >>> print(nca(zero, zero, zero, zero).round(4))
    [1.3863]

    """
    c, r = log_ratios(chosen, rejected, ref_chosen, ref_rejected, mask)
    beta = beta_of(c, beta)
    return keep(softplus(-beta * c) + 0.5 * softplus(beta * c) + 0.5 * softplus(beta * r), mask)


def bco(
    chosen: Pairs,
    rejected: Pairs,
    ref_chosen: Pairs,
    ref_rejected: Pairs,
    mask: PairMask | None = None,
    *,
    beta: Number = 0.01,
    delta: Number | Float[Array, "..."] = 0.0,
) -> Pairs:
    """Binary classifier optimisation: the logit of "preferred" is the reward less a shift.

    −log σ(r_w − δ) − log σ(−(r_l − δ));  r = β log π/π_ref

    The paper's shift is a running mean of rewards, δ = ½(E[r_w] + E[r_l]); TRL's loss on pairs leaves it at 0.

    Args:
        chosen: log π of the whole preferred response, in nats, `*batch`.
        rejected: log π of the whole dispreferred response, `*batch`.
        ref_chosen: log π_ref of the preferred response, `*batch`.
        ref_rejected: log π_ref of the dispreferred response, `*batch`.
        mask: True where a pair counts, `*batch`; without it every pair does.
        beta: β > 0.
        delta: δ, in units of reward, a number or `*batch` (1 where it repeats); no gradient flows through it.

    Returns:
        Loss per pair, `*batch`, zero where masked.

    Raises:
        ValueError: for β ≤ 0.

    Reference:
        Jung et al., arXiv 2404.04656.

    >>> import jax.numpy as jnp
    >>> zero = jnp.zeros(1)
    >>> print(bco(zero + 1, zero - 1, zero, zero, beta=1.0).round(4))
    [0.6265]

    """
    c, r = log_ratios(chosen, rejected, ref_chosen, ref_rejected, mask)
    beta = beta_of(c, beta)
    (delta,) = repeating(c.shape, delta=delta)
    shift = keep(jax.lax.stop_gradient(as_float(c, delta)[1]), mask)
    return keep(softplus(shift - beta * c) + softplus(beta * r - shift), mask)


def apo_zero(
    chosen: Pairs,
    rejected: Pairs,
    ref_chosen: Pairs,
    ref_rejected: Pairs,
    mask: PairMask | None = None,
    *,
    beta: Number = 0.1,
) -> Pairs:
    """Anchored preference optimisation for preferred responses better than the policy's: one up, the other down.

    1 − σ(r_w) + σ(r_l);  r = β log π/π_ref

    The paper has no 1: it keeps the loss positive, as in TRL.

    Args:
        chosen: log π of the whole preferred response, in nats, `*batch`.
        rejected: log π of the whole dispreferred response, `*batch`.
        ref_chosen: log π_ref of the preferred response, `*batch`.
        ref_rejected: log π_ref of the dispreferred response, `*batch`.
        mask: True where a pair counts, `*batch`; without it every pair does.
        beta: β > 0.

    Returns:
        Loss per pair, `*batch`, in (0, 2), zero where masked.

    Raises:
        ValueError: for β ≤ 0.

    Reference:
        D'Oosterlinck et al., arXiv 2408.06266, equation 7.

    >>> import jax.numpy as jnp
    >>> zero = jnp.zeros(1)
    >>> apo_zero(zero, zero, zero, zero).tolist()
    [1.0]

    """
    c, r = log_ratios(chosen, rejected, ref_chosen, ref_rejected, mask)
    beta = beta_of(c, beta)
    return keep(jax.nn.sigmoid(-beta * c) + jax.nn.sigmoid(beta * r), mask)


def apo_down(
    chosen: Pairs,
    rejected: Pairs,
    ref_chosen: Pairs,
    ref_rejected: Pairs,
    mask: PairMask | None = None,
    *,
    beta: Number = 0.1,
) -> Pairs:
    """Anchored preference optimisation for preferred responses worse than the policy's: both down, one more so.

    σ(r_w) + 1 − σ(r_w − r_l);  r = β log π/π_ref

    The paper has no 1: it keeps the loss positive, as in TRL.

    Args:
        chosen: log π of the whole preferred response, in nats, `*batch`.
        rejected: log π of the whole dispreferred response, `*batch`.
        ref_chosen: log π_ref of the preferred response, `*batch`.
        ref_rejected: log π_ref of the dispreferred response, `*batch`.
        mask: True where a pair counts, `*batch`; without it every pair does.
        beta: β > 0.

    Returns:
        Loss per pair, `*batch`, in (0, 2), zero where masked.

    Raises:
        ValueError: for β ≤ 0.

    Reference:
        D'Oosterlinck et al., arXiv 2408.06266, equation 8.

    >>> import jax.numpy as jnp
    >>> zero = jnp.zeros(1)
    >>> apo_down(zero, zero, zero, zero).tolist()
    [1.0]

    """
    c, r = log_ratios(chosen, rejected, ref_chosen, ref_rejected, mask)
    beta = beta_of(c, beta)
    return keep(jax.nn.sigmoid(beta * c) + jax.nn.sigmoid(-beta * (c - r)), mask)
