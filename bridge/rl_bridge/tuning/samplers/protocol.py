"""The interface of all samplers, and how one is made by its name."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rl_bridge.tuning.space import Assignment, Space, Value


@dataclass(frozen=True)
class Result:
    """What became of a trial. Every loss is minimised: of a goal that is maximised it is the negative value.

    ``losses`` is None where there is nothing to compare. ``violations``: how far each constraint is broken, ≤ 0 where
    it holds.
    """

    status: Literal["complete", "pruned", "failed"]
    losses: tuple[float, ...] | None = None
    violations: tuple[float, ...] = ()

    @property
    def feasible(self) -> bool:
        """Whether every constraint holds."""
        return all(violation <= 0 for violation in self.violations)

    @property
    def usable(self) -> bool:
        """Whether a sampler that knows numbers alone can learn from the losses."""
        return self.status != "failed" and self.losses is not None and self.feasible


class Sampler(Protocol):
    """Made anew from space and seed, and given the same calls in the same order, it proposes the same again.

    A study that goes on relies on that: its journal is the list of the calls.
    """

    def ask(self, number: int) -> Assignment | None:
        """The assignment of trial ``number``; None if there is nothing left to try."""
        ...

    def tell(self, number: int, assignment: Mapping[str, Value], result: Result) -> None:
        """What became of a trial, whether this sampler proposed it or another one did."""
        ...


_OPTUNA, _NEEDS_ONE = "rl_bridge.tuning.samplers.optuna", "one goal"
SAMPLERS = {
    "random": ("rl_bridge.tuning.samplers.random:RandomSampler", ""),
    "grid": ("rl_bridge.tuning.samplers.grid:GridSampler", ""),
    "tpe": (f"{_OPTUNA}:TPE", ""),
    "gp": (f"{_OPTUNA}:GP", ""),
    "cma-es": (f"{_OPTUNA}:CMAES", _NEEDS_ONE),
    "skopt": ("rl_bridge.tuning.samplers.skopt:SkoptSampler", _NEEDS_ONE),
    "hyperopt": ("rl_bridge.tuning.samplers.hyperopt:HyperoptSampler", _NEEDS_ONE),
    "bayes": ("rl_bridge.tuning.samplers.bayes:BayesSampler", _NEEDS_ONE),
}
"""Name → (where it is, what it needs)."""


def make_sampler(
    name: str,
    space: Space,
    seed: int,
    *,
    goals: int = 1,
    grid_points: int = 3,
    startup: int | None = None,
    trials: int | None = None,
) -> Sampler:
    """A sampler by its name. ``goals``: how many losses a result has.

    ``startup``: trials that are drawn at random before the sampler learns from results. None takes the library's
    number, and at most a quarter of ``trials`` (three of few). Libraries draw up to 20 at random whatever a study's
    length: one of 8 trials would be a random search in all but its name.

    Raises:
        ValueError: an unknown name, several goals for a sampler of one, or ``startup`` below 1.
        ModuleNotFoundError: its library is not installed; the message says what to install.
    """
    if name not in SAMPLERS:
        raise ValueError(f"unknown sampler {name!r}; there is {', '.join(SAMPLERS)}")
    place, needs = SAMPLERS[name]
    if needs == _NEEDS_ONE and goals > 1:
        able = ", ".join(other for other, (_, wanted) in SAMPLERS.items() if not wanted)
        raise ValueError(f"the sampler {name} takes one goal, got {goals}; of several goals learn {able}")
    if startup is not None and startup < 1:
        raise ValueError(f"startup must be at least 1, got {startup}")
    module, kind = place.split(":")
    made = getattr(importlib.import_module(module), kind)
    if name in ("random", "grid"):
        return made(space, seed, grid_points) if name == "grid" else made(space, seed)
    if startup is None:
        startup = made.STARTUP if trials is None else min(made.STARTUP, max(3, trials // 4))
    return made(space, seed, goals, startup)


def library(name: str) -> Any:
    """A module of a sampler's library.

    Raises:
        ModuleNotFoundError: it is not installed; the message says what to install.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error.name} is not installed: pip install '.[tune]'") from error


def penalised(told: list[tuple[Assignment, Result]]) -> list[tuple[Assignment, float]]:
    """The first losses for a library that knows neither failures nor constraints: those trials get the worst seen loss.

    Failures before the first loss are left out: no number is worse than none.
    """
    losses = [result.losses[0] for _, result in told if result.usable and result.losses is not None]
    if not losses:
        return []
    worst = max(losses)
    return [(a, r.losses[0] if r.usable and r.losses is not None else worst) for a, r in told]
