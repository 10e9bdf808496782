"""Several objectives at once: scalarisations, the Pareto front and how crowded it is."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from rl_fn._numerics import NOT_NEGATIVE, Array, Number, as_float, has_shape, numbers, require

Objectives = Float[Array, "*batch M"]
Points = Float[Array, "*batch N M"]
Directions = bool | Sequence[bool]


def signs(maximize: Directions, objectives: int) -> np.ndarray:
    """+1 where larger is better, −1 where smaller is."""
    return np.broadcast_to(_signs(maximize, objectives), (objectives,))


def as_gains(points: jax.Array, maximize: Directions) -> jax.Array:
    """Return the points with the sign that makes larger better."""
    direction = jnp.asarray(_signs(maximize, points.shape[-1]), points.dtype)
    return points * jnp.broadcast_to(direction, points.shape)


def _signs(maximize: Directions, objectives: Any) -> np.ndarray:
    """One sign, or one for each objective, whose number may be a symbol of jax.export."""
    up = np.asarray(maximize)
    require(up.shape in ((), (objectives,)), f"maximize must be one flag or one of {objectives}, got {maximize}")
    return np.where(up, 1.0, -1.0).astype(np.float32)


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
    has_shape(objectives.shape[-1:], weights=weights)
    f, w = as_float(objectives, weights)
    return -jnp.sum(jnp.broadcast_to(w, f.shape) * as_gains(f, maximize), axis=-1)


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
    has_shape(objectives.shape[-1:], weights=weights, ideal=ideal)
    f, w, z = as_float(objectives, weights, ideal)
    (rho,) = numbers(f.dtype, NOT_NEGATIVE, rho=rho)
    shortfall = as_gains(jnp.broadcast_to(z, f.shape) - f, maximize)
    return jnp.max(jnp.broadcast_to(w, f.shape) * shortfall, axis=-1) + rho * jnp.sum(shortfall, axis=-1)
