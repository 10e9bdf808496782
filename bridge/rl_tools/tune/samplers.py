"""What proposes the next trial: the protocol, and the samplers that need no library."""

import importlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import numpy as np

from rl_bridge.common.user_files import load_file
from rl_tools.tune.space import Assignment, Space, Value

# The interface of all samplers, and how one is made by its name.


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


_OPTUNA, _NEEDS_ONE = "rl_tools.tune.library_samplers", "one goal"
SAMPLERS = {
    "random": ("rl_tools.tune.samplers:RandomSampler", ""),
    "grid": ("rl_tools.tune.samplers:GridSampler", ""),
    "tpe": (f"{_OPTUNA}:TPE", ""),
    "gp": (f"{_OPTUNA}:GP", ""),
    "cma-es": (f"{_OPTUNA}:CMAES", _NEEDS_ONE),
    "skopt": ("rl_tools.tune.library_samplers:SkoptSampler", _NEEDS_ONE),
    "hyperopt": ("rl_tools.tune.library_samplers:HyperoptSampler", _NEEDS_ONE),
    "bayes": ("rl_tools.tune.library_samplers:BayesSampler", _NEEDS_ONE),
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


# Random search.


class RandomSampler:
    """A trial depends on the seed and its number alone."""

    def __init__(self, space: Space, seed: int, goals: int = 1) -> None:
        self._space, self._seed = space, seed

    def ask(self, number: int) -> Assignment:
        """Uniform, or uniform in the logarithm."""
        return self._space.draw(np.random.default_rng([self._seed, number]))

    def tell(self, number: int, assignment: Mapping[str, Value], result: Result) -> None:
        """Nothing is learned."""


# Every combination, once.


class GridSampler:
    """All choices, and ``points`` values at equal distances of each range, in an order that the seed shuffles.

    A grid that is not run to its end has then been tried evenly.
    """

    def __init__(self, space: Space, seed: int, points: int = 3) -> None:
        names = [parameter.name for parameter in space]
        values = [parameter.domain.points(points) for parameter in space]
        every = [space.active(dict(zip(names, row, strict=True))) for row in itertools.product(*values)]
        # Combinations that differ only in what does not apply are one.
        distinct = list({tuple(sorted(row.items())): row for row in every}.values())
        order = np.random.default_rng(seed).permutation(len(distinct))
        self._grid = [distinct[i] for i in order]

    def __len__(self) -> int:
        return len(self._grid)

    def ask(self, number: int) -> Assignment | None:
        """The combination with this number."""
        return dict(self._grid[number]) if number < len(self._grid) else None

    def tell(self, number: int, assignment: Mapping[str, Value], result: Result) -> None:
        """Nothing is learned."""


# A user's function that proposes: ``module:function`` or ``FILE.py:function``.

Propose = Callable[[int, list[dict[str, Any]]], Mapping[str, Value] | None]
"""``propose(number, told)``: options and values of trial ``number``, or None at the end.

``told``: of each earlier trial that ended, in the order of their ends, ``{"trial", "assignment", "status", "losses",
"violations"}``. A function whose result depends on nothing else makes a study that can go on after a kill.
"""


class FunctionSampler:
    """``check`` looks at every proposal: the trainer's own options."""

    def __init__(self, propose: Propose, check: Callable[[Mapping[str, Value]], None] = lambda _: None) -> None:
        self._propose, self._check = propose, check
        self._told: list[dict[str, Any]] = []

    def ask(self, number: int) -> Assignment | None:
        """What the function proposes.

        Raises:
            TypeError: neither a mapping nor None.
        """
        proposed = self._propose(number, [dict(told) for told in self._told])
        if proposed is None:
            return None
        if not isinstance(proposed, Mapping):
            raise TypeError(f"a function that proposes returns a mapping or None, got {type(proposed).__name__}")
        values = {name.replace("_", "-"): value for name, value in proposed.items()}
        self._check(values)
        return values

    def tell(self, number: int, assignment: Mapping[str, Value], result: Result) -> None:
        """Remembered for the next call."""
        about = {"status": result.status, "losses": result.losses, "violations": result.violations}
        self._told.append({"trial": number, "assignment": dict(assignment), **about})


def load_function(place: str) -> Propose:
    """The function that ``place`` names.

    Raises:
        ValueError: there is no such module or function.
    """
    module, _, name = place.rpartition(":")
    if not module or not name:
        raise ValueError(f"a function that proposes is named module:function or FILE.py:function, got {place!r}")
    try:
        holder = load_file(Path(module), "proposal") if module.endswith(".py") else importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"there is no module {module}: {error}") from error
    found: Any = getattr(holder, name, None)
    if not callable(found):
        raise ValueError(f"{module} has no function {name}")
    return cast(Propose, found)
