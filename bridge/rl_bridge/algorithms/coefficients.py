"""Coefficients that change between steps: a controller for each, its state part of a checkpoint."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import rl_fn


class ConstraintState(NamedTuple):
    """State of ``constraint``: the coefficient in force, and the multiplier."""

    coef: jax.Array
    multipliers: rl_fn.LagrangianState


def constraint(
    limit: float,
    direction: str,
    *,
    lr: float,
    penalty: float = 0.0,
    start: float = 0.0,
    high: float = float("inf"),
) -> rl_fn.Controller:
    """A constraint ``direction limit`` of what is measured, as the controller of its term's coefficient.

    The coefficient is |∂ℒ/∂g| at the last measured g: the multiplier, and the slope of the quadratic penalty where the
    constraint is violated. The other arguments are those of ``rl_fn.lagrangian``.

    >>> floor = constraint(2.0, ">=", lr=0.5)
    >>> float(floor.update(floor.init(), 1.0).coef)
    0.5
    """
    constrained = rl_fn.lagrangian([limit], directions=[direction], lr=lr, penalty=penalty, start=start, high=high)

    def coef(state: rl_fn.LagrangianState, measured: jax.Array) -> jax.Array:
        zero = jnp.zeros(())
        return jnp.abs(jax.grad(lambda g: constrained.loss(state, zero, g))(measured))[0]

    def init() -> ConstraintState:
        state = constrained.init()
        return ConstraintState(state.multipliers[0], state)

    def update(state: ConstraintState, measured: Any) -> ConstraintState:
        measurement = jnp.asarray(measured, jnp.float32)[None]
        moved = constrained.update(state.multipliers, measurement)
        return ConstraintState(jnp.where(jnp.isnan(measurement[0]), state.coef, coef(moved, measurement)), moved)

    return rl_fn.Controller(init, update)


@dataclass(frozen=True)
class Controlled:
    """A term whose coefficient a controller sets, by the metric that it measures."""

    controller: rl_fn.Controller
    metric: str


class Coefficients:
    """The coefficients in force. ``update`` once a step; one without a finite measurement leaves them as they are."""

    def __init__(self, terms: Mapping[str, Controlled] | None = None) -> None:
        """``terms``: slot of the objective → its controller. Without any nothing changes."""
        self._terms = dict(terms or {})
        self._states = {name: term.controller.init() for name, term in self._terms.items()}

    def __bool__(self) -> bool:
        return bool(self._terms)

    def values(self) -> dict[str, float]:
        """The coefficient of each term."""
        return {name: float(state.coef) for name, state in self._states.items()}

    def metrics(self) -> dict[str, float]:
        """The coefficients as a record names them."""
        return {f"{name}_coef": value for name, value in self.values().items()}

    def update(self, metrics: Mapping[str, float]) -> None:
        """Give each controller what was measured in this step: of an update that was skipped it may not be finite."""
        for name, term in self._terms.items():
            value = metrics.get(term.metric, math.nan)
            measured = value if math.isfinite(value) else math.nan
            self._states[name] = term.controller.update(self._states[name], measured)

    def checkpoint_state(self) -> dict[str, Any]:
        """The numbers of every state."""
        return {name: [np.asarray(x).tolist() for x in jax.tree.leaves(s)] for name, s in self._states.items()}

    def load_checkpoint_state(self, state: dict[str, Any]) -> None:
        """Take back what ``checkpoint_state`` gave.

        Raises:
            ValueError: the checkpoint has other terms, or another controller's numbers.
        """
        if state.keys() != self._states.keys():
            raise ValueError(f"the checkpoint controls {sorted(state)}, this run controls {sorted(self._states)}")
        for name, numbers in state.items():
            leaves, tree = jax.tree.flatten(self._states[name])
            if len(leaves) != len(numbers):
                raise ValueError(f"the checkpoint's controller of {name} has {len(numbers)} numbers, not {len(leaves)}")
            pairs = zip(numbers, leaves, strict=True)
            self._states[name] = jax.tree.unflatten(tree, [jnp.asarray(x, leaf.dtype) for x, leaf in pairs])
