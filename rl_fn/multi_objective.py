"""Several objectives at once: scalarisations, the Pareto front and how crowded it is."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from rl_fn._numerics import Array, Number, as_float, divide, require

Objectives = Float[Array, "*batch M"]
Points = Float[Array, "*batch N M"]
Directions = bool | Sequence[bool]


def signs(maximize: Directions, objectives: int) -> np.ndarray:
    """+1 where larger is better, −1 where smaller is."""
    up = np.asarray(maximize)
    require(up.shape in ((), (objectives,)), f"maximize must be one flag or one of {objectives}, got {maximize}")
    return np.broadcast_to(np.where(up, 1.0, -1.0).astype(np.float32), (objectives,))


def _gains(points: jax.Array, maximize: Directions) -> jax.Array:
    direction = jnp.asarray(signs(maximize, points.shape[-1]), points.dtype)
    return points * jnp.broadcast_to(direction, points.shape)


def weighted_sum(
    objectives: Objectives, weights: Float[Array, " M"], *, maximize: Directions
) -> Float[Array, "*batch"]:
    """Scalarise objectives linearly, as a loss to be minimised.

    Σᵢ wᵢ fᵢ, with −fᵢ where larger is better

    It finds only the convex part of a front; tchebycheff finds all of it.

    Args:
        objectives: f, `*batch M`.
        weights: w ≥ 0, `M`.
        maximize: True where larger is better; one flag, or one for each objective.

    Returns:
        Loss, `*batch`, differentiable.

    Raises:
        ValueError: if there is not one flag or one for each objective.

    Reference:
        Zadeh, Optimality and Non-Scalar-Valued Performance Criteria (1963).

    >>> import jax.numpy as jnp
    >>> float(weighted_sum(jnp.array([3.0, 1.0]), jnp.array([0.5, 2.0]), maximize=[True, False]))
    0.5

    """
    f, w = as_float(objectives, weights)
    return -jnp.sum(jnp.broadcast_to(w, f.shape) * _gains(f, maximize), axis=-1)


def tchebycheff(
    objectives: Objectives,
    weights: Float[Array, " M"],
    ideal: Float[Array, " M"],
    *,
    maximize: Directions,
    rho: Number = 0.01,
) -> Float[Array, "*batch"]:
    """Augmented weighted Tchebycheff scalarisation, as a loss to be minimised.

    dᵢ = shortfall of fᵢ from zᵢ;  maxᵢ wᵢ dᵢ + ρ Σᵢ dᵢ

    Every Pareto-optimal point is the minimum for some weights, non-convex parts of the front included; ρ > 0 excludes
    points that are only weakly optimal. A shortfall is negative beyond the ideal point: going there is still better.

    Args:
        objectives: f, `*batch M`.
        weights: w > 0, `M`.
        ideal: z, at least as good as what can be reached in each objective, `M`.
        maximize: True where larger is better; one flag, or one for each objective.
        rho: ρ ≥ 0, small.

    Returns:
        Loss, `*batch`, differentiable; the largest term alone gets a weight's gradient, all get ρ's.

    Raises:
        ValueError: for a negative ρ, or if there is not one flag or one for each objective.

    Reference:
        Steuer and Choo, An interactive weighted Tchebycheff procedure (1983).

    >>> import jax.numpy as jnp
    >>> f, w, z = jnp.array([3.0, 1.0]), jnp.array([0.5, 2.0]), jnp.array([4.0, 0.0])
    >>> round(float(tchebycheff(f, w, z, maximize=[True, False], rho=0.1)), 4)
    2.2

    """
    require(rho >= 0, f"rho must not be negative, got {rho}")
    f, w, z = as_float(objectives, weights, ideal)
    shortfall = _gains(jnp.broadcast_to(z, f.shape) - f, maximize)
    return jnp.max(jnp.broadcast_to(w, f.shape) * shortfall, axis=-1) + rho * jnp.sum(shortfall, axis=-1)


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
    gains = _gains(x, maximize)
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
