"""Which points of a set no other point dominates, and how far apart the points lie."""

import jax.numpy as jnp
from jaxtyping import Bool, Float

from rl_fn._numerics import Array, as_float, divide, require
from rl_fn.multi_objective.scalarise import Directions, Points, as_gains


def pareto_mask(points: Points, *, maximize: Directions) -> Bool[Array, "*batch N"]:
    """Mark the points that no other point dominates.

    i is out if some j is at least as good in every objective and better in one

    Args:
        points: N points with M objectives, `*batch N M`.
        maximize: True where larger is better; one flag, or one for each objective.

    Returns:
        `*batch N`, True on the front. Equal points do not dominate each other: all of them are kept. A point with a NaN
        is not on the front and dominates nothing.

    Raises:
        ValueError: if there is not one flag or one for each objective.

    Reference:
        Deb et al. (NSGA-II), A fast and elitist multiobjective genetic algorithm (2002).

    >>> import jax.numpy as jnp
    >>> pareto_mask(jnp.array([[1.0, 3.0], [2.0, 2.0], [1.0, 2.0]]), maximize=True).tolist()
    [True, True, False]

    """
    (x,) = as_float(points)
    known = ~jnp.any(jnp.isnan(x), axis=-1)
    gains = as_gains(x, maximize)
    shape = (*gains.shape[:-1], gains.shape[-2], gains.shape[-1])
    one = jnp.broadcast_to(gains[..., :, None, :], shape)
    other = jnp.broadcast_to(gains[..., None, :, :], shape)
    better = jnp.all(other >= one, axis=-1) & jnp.any(other > one, axis=-1)
    dominated = better & jnp.broadcast_to(known[..., None, :], better.shape)
    return known & ~jnp.any(dominated, axis=-1)


def crowding_distance(points: Points) -> Float[Array, "*batch N"]:
    """Crowding distance: how far apart a point's neighbours on the front are, summed over objectives.

    Σₘ (next in objective m − previous in objective m) / range of objective m

    Args:
        points: N points of one front, `*batch N M`; the direction of the objectives does not matter.

    Returns:
        `*batch N`, ≥ 0; ∞ for the first and last point in any objective. An objective in which all are equal adds 0,
        to a single point too. Among points that tie in an objective, the earlier counts as the smaller.

    Raises:
        ValueError: without points.

    Reference:
        Deb et al. (NSGA-II), A fast and elitist multiobjective genetic algorithm (2002).

    >>> import jax.numpy as jnp
    >>> crowding_distance(jnp.array([[0.0, 4.0], [1.0, 1.0], [4.0, 0.0]])).tolist()
    [inf, 2.0, inf]

    """
    (x,) = as_float(points)
    require(x.shape[-2] > 0, f"crowding needs points, got shape {x.shape}")
    order = jnp.argsort(x, axis=-2, stable=True)
    ascending = jnp.take_along_axis(x, order, axis=-2)
    span = ascending[..., -1:, :] - ascending[..., :1, :]
    edge = jnp.where(span > 0, jnp.inf, 0.0).astype(x.dtype)
    gaps = ascending[..., 2:, :] - ascending[..., :-2, :]
    inner = divide(gaps, jnp.broadcast_to(span, gaps.shape))
    ranked = jnp.concatenate([edge, inner, edge], axis=-2)[..., : x.shape[-2], :]
    back = jnp.argsort(order, axis=-2, stable=True)
    return jnp.sum(jnp.take_along_axis(ranked, back, axis=-2), axis=-1)
