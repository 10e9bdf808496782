"""Constraints on a loss by Lagrange multipliers: a differentiable Lagrangian and the ascent of its multipliers."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from rl_fn._numerics import ANY, NOT_NEGATIVE, POSITIVE, Array, Number, as_float, known, numbers, require
from rl_fn.control.kl import FLOAT

DIRECTIONS = ("<=", ">=")


class LagrangianState(NamedTuple):
    """State of a Lagrangian: one multiplier ≥ 0 for each constraint."""

    multipliers: Float[Array, " n"]


class Lagrangian(NamedTuple):
    """Pure functions of constrained optimisation.

    init() → state; loss(state, objective, constraints) → scalar, to be minimised in the policy;
    update(state, constraints) → state, the multipliers' step; violations(constraints) → `n`, > 0 where violated.
    """

    init: Callable[[], LagrangianState]
    loss: Callable[[LagrangianState, Array, Array], jax.Array]
    update: Callable[[LagrangianState, Array], LagrangianState]
    violations: Callable[[Array], jax.Array]


def lagrangian(
    limits: Sequence[Number] | Float[Array, " n"],
    *,
    directions: Sequence[str],
    lr: Number,
    penalty: Number = 0.0,
    start: Number = 0.0,
    high: Number = float("inf"),
) -> Lagrangian:
    """Minimise a loss under constraints, by gradient descent in the policy and ascent in the multipliers.

    vᵢ = gᵢ − limitᵢ for gᵢ ≤ limitᵢ, limitᵢ − gᵢ for gᵢ ≥ limitᵢ;
    ℒ = L + Σ λᵢ vᵢ + (penalty / 2) Σ max(0, vᵢ)²;  λᵢ ← min(high, max(0, λᵢ + lr · vᵢ))

    Examples of constraints: KL ≤ δ, entropy ≥ h, length ≤ l, accuracy of a second reward ≥ a. A violation is signed: a
    multiplier shrinks while its constraint has slack, and reaches 0 where it is not needed.

    Args:
        limits: one for each of n constraints, in the units of gᵢ.
        directions: "<=" or ">=" for each constraint.
        lr: step of the multipliers, > 0; slower than the policy's own progress, else the two oscillate.
        penalty: weight ≥ 0 of the quadratic penalty, which damps that oscillation and leaves the solution where it is.
        start: every multiplier at the start, ≥ 0.
        high: largest multiplier: what a constraint that cannot be met may cost.

    Returns:
        Lagrangian(init, loss, update, violations). loss takes the objective L (a scalar) and the constraints g, `n`;
        its gradient flows into both and not into λ. update takes g, measured; a NaN leaves its multiplier as it is.

    Raises:
        ValueError: unless there is a direction for each limit, lr > 0, penalty ≥ 0 and 0 ≤ start ≤ high; when g does
            not have one entry for each limit.

    Reference:
        Bertsekas, Constrained Optimization and Lagrange Multiplier Methods (1982), chapter 2; in RL, Tessler et al.,
        arXiv 1805.11074.

    >>> import jax.numpy as jnp
    >>> constrained = lagrangian([0.1, 2.0], directions=["<=", ">="], lr=0.5)
    >>> state = constrained.update(constrained.init(), jnp.array([0.3, 2.5]))  # KL too high, entropy high enough
    >>> [round(float(x), 4) for x in state.multipliers]
    [0.1, 0.0]
    >>> round(float(constrained.loss(state, jnp.array(1.0), jnp.array([0.3, 2.5]))), 4)
    1.02

    """
    require(len(limits) > 0, "limits must not be empty")
    listed = len(directions) == len(limits) and set(directions) <= set(DIRECTIONS)
    require(listed, f"directions must be one of {DIRECTIONS} for each of {len(limits)} limits, got {list(directions)}")
    (lr,) = numbers(FLOAT, POSITIVE, lr=lr)
    (penalty,) = numbers(FLOAT, NOT_NEGATIVE, penalty=penalty)
    start, high = numbers(FLOAT, ANY, start=start, high=high)
    for holds in (start >= 0, start <= high):
        require(holds, f"need 0 ≤ start ≤ high, got start={start}, high={high}")
    bounds = jnp.stack([jnp.asarray(numbers(FLOAT, ANY, limits=limit)[0], FLOAT) for limit in limits])
    signs = np.asarray([1.0 if direction == "<=" else -1.0 for direction in directions], np.float32)

    def init() -> LagrangianState:
        return LagrangianState(jnp.full(bounds.shape, start, jnp.float32))

    def violations(constraints: Array) -> jax.Array:
        (g,) = as_float(constraints)
        require(g.shape == bounds.shape, f"constraints must have shape {bounds.shape}, got {g.shape}")
        return jnp.asarray(signs, g.dtype) * (g - bounds.astype(g.dtype))

    def loss(state: LagrangianState, objective: Array, constraints: Array) -> jax.Array:
        value, v = as_float(objective, violations(constraints))
        require(value.shape == (), f"objective must be a scalar, got shape {value.shape}")
        multipliers = jax.lax.stop_gradient(state.multipliers).astype(v.dtype)
        # A multiplier of 0 is an absent constraint, whatever was measured: 0 · ∞ would be NaN.
        linear = multipliers * jnp.where(multipliers > 0, v, 0.0)
        total = value + jnp.sum(linear)
        if known(penalty) and penalty == 0:
            return total
        squares = jnp.sum(jnp.square(jnp.maximum(v, 0.0)))
        if not known(penalty):
            squares = jnp.where((penalty > 0) | jnp.isfinite(squares), squares, 0.0)
        return total + 0.5 * penalty * squares

    def update(state: LagrangianState, constraints: Array) -> LagrangianState:
        v = jax.lax.stop_gradient(violations(constraints)).astype(jnp.float32)
        moved = jnp.clip(state.multipliers + lr * v, 0.0, high)
        return LagrangianState(jnp.where(jnp.isnan(v), state.multipliers, moved))

    return Lagrangian(init, loss, update, violations)
