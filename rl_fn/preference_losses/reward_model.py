"""Losses for reward models from comparisons, and what to watch while training on pairs."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from rl_fn._numerics import (
    NOT_NEGATIVE,
    Array,
    Mask,
    Number,
    Tokens,
    as_float,
    as_mask,
    keep,
    numbers,
    repeating,
    same_shape,
)
from rl_fn._pairs import PairMask, Pairs, beta_of, both, log_ratios, softplus


class PreferenceMetrics(NamedTuple):
    """Implicit rewards of each pair, their difference, and 1.0 where the preferred response has the larger one."""

    chosen_reward: Pairs
    rejected_reward: Pairs
    margin: Pairs
    accuracy: Pairs


def bradley_terry(
    chosen_rewards: Pairs,
    rejected_rewards: Pairs,
    mask: PairMask | None = None,
    *,
    margin: Number | Float[Array, "..."] = 0.0,
    center: Number = 0.0,
) -> Pairs:
    """Negative log-likelihood of a comparison under Bradley and Terry's model.

    −log σ(r_w − r_l − m) + c (r_w + r_l)²

    Args:
        chosen_rewards: r_w, `*batch`.
        rejected_rewards: r_l, `*batch`.
        mask: True where a pair counts, `*batch`; without it every pair does.
        margin: m, how much better the preferred response is said to be, a number or `*batch` (1 where it repeats).
        center: c ≥ 0, pulls the mean reward of a pair to 0, which comparisons leave free.

    Returns:
        Loss per pair, `*batch`, zero where masked.

    Raises:
        ValueError: for c < 0.

    Reference:
        Bradley & Terry, Rank Analysis of Incomplete Block Designs (1952); m: Touvron et al. (Llama 2), arXiv
        2307.09288; c: Eisenstein et al., arXiv 2312.09244.

    >>> import jax.numpy as jnp
    >>> print(bradley_terry(jnp.array([1.0]), jnp.array([1.0]), center=0.01).round(4))
    [0.7331]

    """
    c, r = both(chosen_rewards, rejected_rewards, mask)
    (margin,) = repeating(c.shape, margin=margin)
    (center,) = numbers(c.dtype, NOT_NEGATIVE, center=center)
    _, gap = as_float(c, margin)
    return keep(softplus(keep(gap, mask) - (c - r)) + center * jnp.square(c + r), mask)


def plackett_luce(rewards: Tokens, mask: Mask | None = None) -> Float[Array, "*batch"]:
    """Negative log-likelihood of a ranking: the best is chosen among all, the next among the rest, and so on.

    −Σₖ (r₍ₖ₎ − log Σ_{j ≥ k} exp r₍ⱼ₎)

    Args:
        rewards: rewards of the candidates from the best to the worst, `*batch T`.
        mask: True for candidates that take part, `*batch T`; without it all do.

    Returns:
        Loss per ranking, `*batch`; 0 with fewer than two candidates.

    Raises:
        ValueError: if the mask is not boolean.

    Reference:
        Plackett, The Analysis of Permutations (1975); Rafailov et al., arXiv 2305.18290, for DPO from rankings.

    >>> import jax.numpy as jnp
    >>> print(f"{plackett_luce(jnp.zeros((1, 3))).item():.4f}")
    1.7918

    """
    same_shape(rewards=rewards, mask=mask)
    (values,) = as_float(rewards)
    size = values.shape[-1]
    counted = jnp.ones(values.shape, bool) if mask is None else as_mask(mask)
    r = keep(values, counted)
    later = jnp.arange(size)[None, :] >= jnp.arange(size)[:, None]
    rest = later.reshape((1,) * (r.ndim - 1) + (size, size)) & counted[..., None, :]
    across = jnp.broadcast_to(r[..., None, :], rest.shape)
    largest = jax.lax.stop_gradient(jnp.max(across, axis=-1, where=rest, initial=-jnp.inf))
    base = jnp.where(largest != -jnp.inf, largest, 0.0)
    shifted = jnp.where(rest, across - base[..., None], 0.0)
    total = jnp.sum(jnp.where(rest, jnp.exp(shifted), 0.0), axis=-1)
    terms = base + jnp.log(jnp.where(counted, total, 1.0)) - r
    return jnp.sum(keep(terms, counted), axis=-1)


def preference_metrics(
    chosen: Pairs,
    rejected: Pairs,
    ref_chosen: Pairs,
    ref_rejected: Pairs,
    mask: PairMask | None = None,
    *,
    beta: Number = 0.1,
) -> PreferenceMetrics:
    """Implicit rewards of pairs, their margin and whether they order the pair as labelled; reduce with aggregate.

    r = β log π/π_ref;  margin = r_w − r_l;  accuracy = 1 where r_w > r_l

    Args:
        chosen: log π of the whole preferred response, in nats, `*batch`.
        rejected: log π of the whole dispreferred response, `*batch`.
        ref_chosen: log π_ref of the preferred response, `*batch`.
        ref_rejected: log π_ref of the dispreferred response, `*batch`.
        mask: True where a pair counts, `*batch`; without it every pair does.
        beta: β > 0.

    Returns:
        PreferenceMetrics(chosen_reward, rejected_reward, margin, accuracy), each `*batch`, zero where masked, without
        gradient. A tie counts as wrong.

    Raises:
        ValueError: for β ≤ 0.

    Reference:
        Rafailov et al., arXiv 2305.18290, for the implicit reward.

    >>> import jax.numpy as jnp
    >>> zero = jnp.zeros(2)
    >>> preference_metrics(jnp.array([1.0, 0.0]), zero, zero, zero, beta=0.5).margin.tolist()
    [0.5, 0.0]

    """
    c, r = log_ratios(chosen, rejected, ref_chosen, ref_rejected, mask)
    beta = beta_of(c, beta)
    c, r = beta * jax.lax.stop_gradient(c), beta * jax.lax.stop_gradient(r)
    return PreferenceMetrics(c, r, c - r, (c > r).astype(c.dtype))
