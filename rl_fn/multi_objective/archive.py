"""The non-dominated points seen so far, in a fixed number of slots."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Bool, Float, Integer

from rl_fn._numerics import Array, require
from rl_fn.multi_objective.pareto import crowding_distance, pareto_mask
from rl_fn.multi_objective.scalarise import Directions, signs


class ArchiveState(NamedTuple):
    """State of a Pareto archive: points and tags in slots, and which slots are used; the others hold 0."""

    points: Float[Array, "capacity M"]
    tags: Integer[Array, " capacity"]
    used: Bool[Array, " capacity"]


class ParetoArchive(NamedTuple):
    """A pair of pure functions: `init() → state` and `insert(state, point, tag) → state`."""

    init: Callable[[], ArchiveState]
    insert: Callable[[ArchiveState, Array, Array | int], ArchiveState]


def pareto_archive(capacity: int, objectives: int, *, maximize: Directions) -> ParetoArchive:
    """Keep the Pareto front of everything inserted, thinned out where it is crowded.

    front(archive ∪ {point}); beyond the capacity, without the point of the smallest crowding distance

    Args:
        capacity: number of slots ≥ 1, static; at least 2 · objectives + 1 keeps the ends of the front for certain.
        objectives: M, static.
        maximize: True where larger is better; one flag, or one for each objective.

    Returns:
        ParetoArchive(init, insert). insert takes one point, `M`, and its tag (an integer, a checkpoint's step, say). A
        dominated point, a repeated one (the older stays) and one that is not finite change nothing. Points lie in the
        order they came in, used slots first.

    Raises:
        ValueError: for a capacity or number of objectives below 1, or if there is not one flag or one for each.

    Reference:
        Deb et al. (NSGA-II), A fast and elitist multiobjective genetic algorithm (2002), for the crowding distance.

    >>> import jax.numpy as jnp
    >>> archive = pareto_archive(8, 2, maximize=True)
    >>> state = archive.init()
    >>> for step, point in enumerate([[1.0, 1.0], [2.0, 0.0], [1.0, 2.0], [0.0, 0.0]]):
    ...     state = archive.insert(state, jnp.array(point), step)
    >>> state.tags[state.used].tolist()
    [1, 2]

    """
    require(capacity >= 1 and objectives >= 1, f"need capacity, objectives ≥ 1, got {capacity} and {objectives}")
    signs(maximize, objectives)  # raises here, not at the first insert

    def init() -> ArchiveState:
        points = jnp.zeros((capacity, objectives), jnp.float32)
        return ArchiveState(points, jnp.zeros(capacity, jnp.int32), jnp.zeros(capacity, bool))

    def insert(state: ArchiveState, point: Array, tag: Array | int) -> ArchiveState:
        new = jnp.asarray(point).astype(jnp.float32)
        require(new.shape == (objectives,), f"point must have shape {(objectives,)}, got {new.shape}")
        repeated = jnp.any(state.used & jnp.all(state.points == jnp.broadcast_to(new, state.points.shape), axis=-1))
        welcome = jnp.all(jnp.isfinite(new)) & ~repeated
        points = jnp.concatenate([state.points, new[None]])
        tags = jnp.concatenate([state.tags, jnp.asarray(tag).astype(jnp.int32)[None]])
        used = jnp.concatenate([state.used, welcome[None]])
        # A NaN point is on no front and dominates nothing: that is what an empty slot must be.
        front = pareto_mask(jnp.where(used[:, None], points, jnp.nan), maximize=maximize)
        # Used only where all slots and the newcomer are on the front: no empty slot disturbs the distances then.
        crowding = crowding_distance(points)
        crowded = jnp.arange(capacity + 1) == jnp.argmin(crowding)
        keep = front & ~(crowded & jnp.all(front))
        order = jnp.argsort(~keep, stable=True)[:capacity]
        kept = keep[order]
        return ArchiveState(jnp.where(kept[:, None], points[order], 0.0), jnp.where(kept, tags[order], 0), kept)

    return ParetoArchive(init, insert)
