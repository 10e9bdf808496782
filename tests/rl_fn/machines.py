"""State machines among the public functions: those that return a named tuple with `init`, found by their annotation.

`MACHINES["name"]` or `MACHINES["name[variant]"]`: how to make one, and what to measure at a step.
"""

import dataclasses
import inspect
import typing
from collections.abc import Callable
from typing import Any

import numpy as np

import rl_fn


def _returned(function: Callable[..., Any]) -> Any:
    return inspect.signature(function).return_annotation


def is_machine(function: Callable[..., Any]) -> bool:
    """Whether a function returns pure functions of a state: its return type has the field `init`."""
    return "init" in getattr(_returned(function), "_fields", ())


CONSTRUCTORS = tuple(
    name for name in rl_fn.__all__ if inspect.isfunction(getattr(rl_fn, name)) and is_machine(getattr(rl_fn, name))
)


@dataclasses.dataclass(frozen=True)
class Machine:
    """One way to make one machine. inputs: arguments of a step after the state. other: of the functions beside it."""

    name: str
    options: dict[str, Any]
    inputs: Callable[[np.random.Generator], tuple[Any, ...]]

    def make(self) -> Any:
        return getattr(rl_fn, self.name)(**self.options)

    @property
    def step(self) -> str:
        """Name of the function that takes the state and returns the next: update, or insert."""
        hints = typing.get_type_hints(_returned(getattr(rl_fn, self.name)))
        state = typing.get_args(hints["init"])[1]
        steps = [
            name
            for name, hint in hints.items()
            if name != "init" and typing.get_args(hint)[0][:1] == [state] and typing.get_args(hint)[1] == state
        ]
        assert len(steps) == 1, (self.name, steps)
        return steps[0]


def _measured(rng: np.random.Generator) -> tuple[Any, ...]:
    return (np.array(rng.exponential(0.3), np.float32),)


def _constraints(rng: np.random.Generator) -> tuple[Any, ...]:
    return (rng.normal(0.5, 1.0, 2).astype(np.float32),)


def _points(rng: np.random.Generator) -> tuple[Any, ...]:
    """From a small grid: some are repeated, some tie in one objective."""
    return rng.integers(0, 6, 3).astype(np.float32), np.array(rng.integers(1000), np.int32)


MACHINES = {
    key: Machine(key.split("[")[0], options, inputs)
    for key, options, inputs in (
        ("fixed_kl", {"coef": 0.2}, _measured),
        ("exponential_kl", {"target": 0.2, "up": 1.2, "down": 0.8, "low": 0.1, "high": 0.4}, _measured),
        ("linear_kl", {"target": 0.2, "coef": 0.3, "horizon": 20, "samples": 8, "clip": 0.5, "high": 0.5}, _measured),
        ("pid_kl", {"target": 0.2, "coef": 0.3, "kp": 0.2, "ki": 0.1, "kd": 0.1, "high": 0.9}, _measured),
        ("adaptive_entropy", {"target": 0.3, "step": 0.02, "high": 0.1}, _measured),
        ("scheduled_kl[cosine]", {"kind": "cosine", "start": 0.3, "end": 0.1, "steps": 5}, _measured),
        ("scheduled_kl[linear]", {"kind": "linear", "start": 0.3, "end": 0.0, "steps": 5}, _measured),
        ("scheduled_kl[exponential]", {"kind": "exponential", "start": 0.3, "end": 0.1, "steps": 5}, _measured),
        (
            "scheduled_kl[warmup]",
            {"kind": "warmup_cosine", "start": 0.3, "end": 0.1, "steps": 7, "warmup": 3},
            _measured,
        ),
        (
            "lagrangian",
            {"limits": [0.3, 0.6], "directions": ["<=", ">="], "lr": 0.2, "penalty": 0.5, "start": 0.1, "high": 0.6},
            _constraints,
        ),
        ("pareto_archive", {"capacity": 4, "objectives": 3, "maximize": (True, False, True)}, _points),
        ("pareto_archive[large]", {"capacity": 16, "objectives": 3, "maximize": True}, _points),
    )
}
