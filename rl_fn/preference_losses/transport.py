"""Alignment via optimal transport: the logistic loss between sorted batches instead of between the sides of a pair."""

import jax
import jax.numpy as jnp

from rl_fn._numerics import Array, Number, as_float, as_mask, keep, same_shape
from rl_fn._pairs import PairMask, Pairs, beta_of, both, log_ratios, smoothed_logistic, smoothing_of


def _matched(x: jax.Array, other: jax.Array, mask: Array | None) -> jax.Array:
    """At each counted entry of x: the entry of other that has the same rank among the counted ones of the last axis."""

    def order(values: jax.Array) -> jax.Array:
        last = jnp.zeros(values.shape, bool) if mask is None else jnp.broadcast_to(~as_mask(mask), values.shape)
        # Masked entries come after every other one, NaN included, which must be matched to be seen.
        return jnp.lexsort((jax.lax.stop_gradient(values), last), axis=-1)

    ranks = jnp.argsort(order(x), axis=-1)
    return jnp.take_along_axis(other, jnp.take_along_axis(order(other), ranks, axis=-1), axis=-1)


def aot(
    chosen: Pairs,
    rejected: Pairs,
    ref_chosen: Pairs,
    ref_rejected: Pairs,
    mask: PairMask | None = None,
    *,
    beta: Number = 0.1,
    label_smoothing: Number = 0.0,
) -> Pairs:
    """Alignment via optimal transport, paired: the policy's margins dominate the reference's, quantile by quantile.

    −(1 − ε) log σ(βδᵢ) − ε log σ(−βδᵢ);  δᵢ = uᵢ − v₍ᵢ₎,  u = log π(y_w)/π(y_l),  v = log π_ref(y_w)/π_ref(y_l),
    v₍ᵢ₎ the entry of v with the rank that uᵢ has in u

    Each value stands at the pair of u, where the paper sums in order of rank. The sort is over the last axis, so the
    result depends on how a data set is cut into batches.

    Args:
        chosen: log π of the whole preferred response, in nats, `*batch`.
        rejected: log π of the whole dispreferred response, `*batch`.
        ref_chosen: log π_ref of the preferred response, `*batch`.
        ref_rejected: log π_ref of the dispreferred response, `*batch`.
        mask: True where a pair counts (in the sort too), `*batch`; without it every pair does.
        beta: β > 0.
        label_smoothing: ε in [0, ½).

    Returns:
        Loss per pair, `*batch`, zero where masked.

    Raises:
        ValueError: for β ≤ 0 or ε outside [0, ½).

    Reference:
        Melnyk et al., arXiv 2406.05882 (paired).

    >>> import jax.numpy as jnp
    >>> u, zero = jnp.array([2.0, -1.0]), jnp.zeros(2)
    >>> print(aot(u, zero, u[::-1], zero).round(4))
    [0.6931 0.6931]

    """
    c, r = both(chosen, rejected, mask)
    same_shape(chosen=chosen, ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    ref_c, ref_r = both(ref_chosen, ref_rejected, mask)
    beta, label_smoothing = beta_of(c, beta), smoothing_of(c, label_smoothing)
    margin, ref_margin = as_float(c - r, ref_c - ref_r)
    z = beta * (margin - _matched(margin, ref_margin, mask))
    return keep(smoothed_logistic(z, label_smoothing), mask)


def aot_unpaired(
    chosen: Pairs,
    rejected: Pairs,
    ref_chosen: Pairs,
    ref_rejected: Pairs,
    mask: PairMask | None = None,
    *,
    beta: Number = 0.1,
    label_smoothing: Number = 0.0,
) -> Pairs:
    """Alignment via optimal transport, unpaired: good responses' log-ratios dominate the bad ones', by quantile.

    −(1 − ε) log σ(βδᵢ) − ε log σ(−βδᵢ);  δᵢ = uᵢ − v₍ᵢ₎,  u = log π(y_w)/π_ref(y_w),  v = log π(y_l)/π_ref(y_l),
    v₍ᵢ₎ the entry of v with the rank that uᵢ has in u

    Each value stands at its good response, where the paper sums in order of rank. The sort is over the last axis, so
    the result depends on how a data set is cut into batches. As many good responses as bad ones.

    Args:
        chosen: log π of the whole good response, in nats, `*batch`.
        rejected: log π of the whole bad response, `*batch`; it may belong to another prompt.
        ref_chosen: log π_ref of the good response, `*batch`.
        ref_rejected: log π_ref of the bad response, `*batch`.
        mask: True where an entry of both sides counts (in the sort too), `*batch`; without it every entry does.
        beta: β > 0.
        label_smoothing: ε in [0, ½).

    Returns:
        Loss per good response, `*batch`, zero where masked.

    Raises:
        ValueError: for β ≤ 0 or ε outside [0, ½).

    Reference:
        Melnyk et al., arXiv 2406.05882 (unpaired).

    >>> import jax.numpy as jnp
    >>> u, zero = jnp.array([2.0, -1.0]), jnp.zeros(2)
    >>> print(aot_unpaired(u, u[::-1], zero, zero).round(4))
    [0.6931 0.6931]

    """
    c, r = log_ratios(chosen, rejected, ref_chosen, ref_rejected, mask)
    beta, label_smoothing = beta_of(c, beta), smoothing_of(c, label_smoothing)
    return keep(smoothed_logistic(beta * (c - _matched(c, r, mask)), label_smoothing), mask)
