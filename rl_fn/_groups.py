"""Groups of completions: which count, and how ragged groups become dense ones.

One rule for every function of a group. A completion counts in its group's mean, spread and size if it has a reward and
`valid` does not exclude it, whatever is left of its tokens; `valid=mask.any(-1)` excludes all without a counted token.
An invalid completion has advantage 0 and changes nothing, with NaN for a reward too. Where the mask is of the rewards
themselves (steps, tokens), what is masked has no reward.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Integer

from rl_fn._numerics import Array, Shape, as_ids, as_mask, deviations, variance

Groups = Integer[Array, "*batch G"]


class Within(NamedTuple):
    """What an answer knows of its group, `*batch G`: mean, its distance to it, size, unbiased variance."""

    mean: jax.Array
    deviation: jax.Array
    size: jax.Array
    variance: jax.Array


def within(x: jax.Array, valid: jax.Array, group_ids: Array | tuple[Array, ...] | None) -> Within:
    """Return each answer's view of its group; the deviation is zero where invalid.

    Without group_ids the group is the last axis, and nothing of size G² is made. Several group_ids must all be equal.
    """
    if group_ids is None:
        mean, deviation, count = deviations(x, valid, axis=-1)
        spread = variance(deviation, count, -1)
        return Within(*(jnp.broadcast_to(part, x.shape) for part in (mean, deviation, count, spread)))
    mean, deviation, count = deviations(rows_of(x), peers(valid, group_ids), axis=-1)
    spread = variance(deviation, count, -1)
    distance = jnp.where(valid, own(deviation), 0.0)
    return Within(mean[..., 0], distance, count[..., 0], spread[..., 0])


def valid_of(rewards: jax.Array, valid: Array | None) -> jax.Array:
    """Return the mask of answers that exist; all without one."""
    return jnp.ones(rewards.shape, dtype=bool) if valid is None else as_mask(valid)


def peers(valid: jax.Array, group_ids: Array | tuple[Array, ...] | None) -> jax.Array:
    """Return `*batch N N`: at [i, j], whether answer j is a valid member of answer i's group.

    A comparison of all pairs: no sort and no scatter, and the order of the answers does not matter. Memory grows with
    N², so N is the answers of a batch, not its tokens.
    """
    counted = jnp.broadcast_to(valid[..., None, :], (*valid.shape, valid.shape[-1]))
    if group_ids is None:
        return counted
    for each in group_ids if isinstance(group_ids, tuple) else (group_ids,):
        ids = as_ids(each)
        counted = counted & (ids[..., :, None] == ids[..., None, :])
    return counted


def rows_of(x: jax.Array) -> jax.Array:
    """Return `*batch N N`: every row is x, to be read under peers."""
    return jnp.broadcast_to(x[..., None, :], (*x.shape, x.shape[-1]))


def own(x: jax.Array) -> jax.Array:
    """Return the diagonal of `*batch N N`: of what was computed in answer i's view, answer i's entry."""
    return jnp.sum(jnp.where(diagonal(x.shape), x, jnp.zeros_like(x)), axis=-1)


def diagonal(shape: Shape) -> jax.Array:
    """Return a mask, True at [i, i] of `*batch N N`."""
    return jnp.broadcast_to(jnp.eye(shape[-1], dtype=bool), shape)
