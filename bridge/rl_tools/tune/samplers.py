"""Samplers, which propose the trials of a study: Optuna's, a grid, or a user's function."""

import importlib
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import numpy as np

from rl_bridge.common.user_files import load_file
from rl_tools.tune.journal import STUDY, Event, library
from rl_tools.tune.space import Assignment, Choice, Parameter, Space, Value


@dataclass(frozen=True)
class Result:
    """The result of a trial. Every loss is minimised: a goal that is maximised has its negative value as loss.

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
        """Whether the losses can be compared with those of other trials."""
        return self.status != "failed" and self.losses is not None and self.feasible


def result_of(event: Event) -> Result:
    """The result that a sampler gets at a trial's end, from the event ``told``."""
    losses = None if event["losses"] is None else tuple(event["losses"])
    return Result(event["status"], losses, tuple(event["violations"]))


class Sampler(Protocol):
    """Proposes trials. Its memory is the study's journal, so that a study that goes on gets the same proposals.

    Records that ``ask`` and ``tell`` write to the journal hold as soon as the study has written the event behind them.
    """

    def ask(self, number: int) -> Assignment | None:
        """The assignment of trial ``number``; None if there is nothing left to try."""

    def tell(self, number: int, result: Result) -> None:
        """Take in the result of a trial."""


SAMPLERS = ("random", "grid", "tpe", "gp", "cma-es")
STARTUP = {"tpe": 10, "gp": 10, "cma-es": 1}
"""Trials that Optuna draws at random before a sampler learns; the others never learn."""
GONE = {"skopt": ("scikit-optimize", "gp"), "bayes": ("bayesian-optimization", "gp"), "hyperopt": ("Hyperopt", "tpe")}
"""Name of a sampler that was removed → (its library, the sampler of Optuna that does the same)."""


class OptunaSampler:
    """A sampler by its name over Optuna's study, in a journal's ``storage`` or in memory.

    Each trial has a sampler of its own, seeded by the study's seed and the trial's number. All that the sampler knows
    is in the study, so that a tuner which goes on proposes the same trials as the first one would have.
    """

    def __init__(
        self,
        name: str,
        space: Space,
        seed: int,
        *,
        goals: int = 1,
        grid_points: int = 3,
        startup: int | None = None,
        trials: int | None = None,
        storage: Any = None,
    ) -> None:
        """``goals``: how many losses a result has.

        ``startup``: trials that are drawn at random before the sampler learns from results. None takes the library's
        number, and at most a quarter of ``trials`` (three of few). Optuna draws up to 10 at random whatever a study's
        length: one of 8 trials would be a random search in all but its name.

        Raises:
            ValueError: an unknown name, several goals for a sampler of one, a negative seed, no grid point, or a
                ``startup`` below 1 or of all ``trials``.
            ModuleNotFoundError: its library is not installed; the message says what to install.
        """
        if name in GONE:
            library_name, replacement = GONE[name]
            raise ValueError(
                f"the sampler {name} of {library_name} is gone: give --sampler {replacement}, which is Optuna's"
            )
        if name not in SAMPLERS:
            raise ValueError(f"unknown sampler {name!r}; there is {', '.join(SAMPLERS)}")
        if name == "cma-es" and goals > 1:
            others = ", ".join(other for other in SAMPLERS if other != name)
            raise ValueError(f"the sampler {name} takes one goal, got {goals}; of several goals learn {others}")
        if startup is not None and startup < 1:
            raise ValueError(f"startup must be at least 1, got {startup}")
        if name in STARTUP and startup is not None and trials is not None and startup >= trials:
            raise ValueError(
                f"with --startup-trials {startup} of --trials {trials} every trial is random, and the sampler {name} "
                "never learns: give fewer, or --sampler random"
            )
        if seed < 0 or grid_points < 1:
            raise ValueError(f"need --sampler-seed ≥ 0 and --grid-points ≥ 1, got {seed} and {grid_points}")
        self._optuna = optuna = library("optuna")
        if name == "cma-es":
            library("cmaes")
        self._name, self._space, self._seed = name, space, seed
        most = max(STARTUP.values()) if trials is None else max(3, trials // 4)
        self._startup = min(STARTUP.get(name, 0), most) if startup is None else startup
        self._grid = grid_of(space, seed, grid_points) if name == "grid" else None
        self._study = optuna.create_study(
            storage=storage, study_name=STUDY, directions=["minimize"] * goals, load_if_exists=True
        )

    @property
    def combinations(self) -> int | None:
        """Assignments of the grid; None for a sampler without an end."""
        return None if self._grid is None else len(self._grid)

    def ask(self, number: int) -> Assignment | None:
        """Optuna's proposal, each number with six digits; of a grid the combination with this number."""
        if self._grid is not None:
            if number >= len(self._grid):
                return None
            self._study.enqueue_trial(self._grid[number])
        self._study.sampler = self._proposer(number)
        trial = self._study.ask()
        values: Assignment = {}
        for parameter in self._space:
            # A Gaussian process and CMA-ES know a space without conditions.
            if self._name in ("gp", "cma-es") or self._space.applies(parameter, values):
                values[parameter.name] = _suggested(trial, parameter)
        return self._space.active(values)

    def _proposer(self, number: int) -> Any:
        """Optuna's sampler for one trial."""
        samplers = self._optuna.samplers
        seed = int(np.random.SeedSequence([self._seed, number]).generate_state(1)[0])
        with warnings.catch_warnings():
            # Classes and options that Optuna may change.
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            if self._name == "tpe":
                return samplers.TPESampler(seed=seed, n_startup_trials=self._startup)
            if self._name == "gp":
                # The losses are noisy.
                return samplers.GPSampler(seed=seed, deterministic_objective=False, n_startup_trials=self._startup)
            independent = samplers.RandomSampler(seed=seed)
            if self._name != "cma-es":
                return independent
            return samplers.CmaEsSampler(
                seed=seed,
                n_startup_trials=self._startup,
                independent_sampler=independent,
                warn_independent_sampling=False,
            )

    def tell(self, number: int, result: Result) -> None:
        """Tell Optuna the losses and constraints of a trial, or that it failed or was pruned."""
        # The sampler that proposed the trial has no part in its end.
        self._study.sampler = self._optuna.samplers.RandomSampler()
        trial = self._optuna.trial.Trial(self._study, self._study.trials[number]._trial_id)
        # CMA-ES knows no constraints: a trial that breaks one has failed.
        comparable = result.status != "complete" or self._name != "cma-es" or result.feasible
        for index, violation in enumerate(result.violations):
            trial.set_constraint(str(index), violation)
        if result.status == "pruned" and result.losses is not None and len(self._study.directions) == 1:
            trial.report(result.losses[0], step=0)
        state = {"complete": "COMPLETE", "pruned": "PRUNED", "failed": "FAIL"}[result.status] if comparable else "FAIL"
        losses = list(result.losses) if state == "COMPLETE" and result.losses is not None else None
        self._study.tell(trial, losses, state=self._optuna.trial.TrialState[state])


def _suggested(trial: Any, parameter: Parameter) -> Value:
    name, domain = parameter.name, parameter.domain
    if isinstance(domain, Choice):
        return trial.suggest_categorical(name, domain.values)
    if domain.whole:
        return trial.suggest_int(name, int(domain.low), int(domain.high), log=domain.log)
    return domain.rounded(trial.suggest_float(name, domain.low, domain.high, log=domain.log))


def grid_of(space: Space, seed: int, points: int) -> list[Assignment]:
    """All choices, and ``points`` values at equal distances of each range, in an order that the seed shuffles.

    A grid that is not run to its end has then been tried evenly. Optuna's own grid has no logarithms, and repeats
    combinations that differ only in parameters that do not apply.
    """
    names = [parameter.name for parameter in space]
    values = [parameter.domain.points(points) for parameter in space]
    every = [space.active(dict(zip(names, row, strict=True))) for row in itertools.product(*values)]
    distinct = list({tuple(sorted(row.items())): row for row in every}.values())
    return [distinct[i] for i in np.random.default_rng(seed).permutation(len(distinct))]


Propose = Callable[[int, list[dict[str, Any]]], Mapping[str, Value] | None]
"""``propose(number, told)``: options and values of trial ``number``, or None at the end.

``told``: ``{"trial", "assignment", "status", "losses", "violations"}`` of each earlier trial that ended, in the order
of their ends. A function whose result depends on nothing else makes a study that can go on after a kill.
"""


_PROPOSALS = (
    "a function that proposes takes the trial's number and the earlier trials, and returns a mapping of options to "
    "numbers or texts, as {'optimizer.learning-rate': 1e-5}, or None at the end"
)


class FunctionSampler:
    """A user's function as a sampler. ``events``: the journal's. ``check`` gets every proposal and may raise.

    ``name``: the function in the words of the command line.
    """

    def __init__(
        self,
        propose: Propose,
        events: Sequence[Event] = (),
        check: Callable[[Mapping[str, Value]], None] = lambda _: None,
        name: str = "the function",
    ) -> None:
        self._propose, self._events, self._check, self._name = propose, events, check, name

    def first(self) -> Assignment:
        """The proposal of a study's first trial.

        Raises:
            TypeError, ValueError: as for ``ask``; there is none.
        """
        proposed = self.ask(0)
        if proposed is None:
            raise ValueError(f"{self._name} returned None for the first trial: {_PROPOSALS}")
        return proposed

    def ask(self, number: int) -> Assignment | None:
        """The function's proposal.

        Raises:
            TypeError: neither None nor a mapping of texts to numbers and texts.
            ValueError: the function failed, or proposed what ``check`` refuses.
        """
        assignments = {event["trial"]: event["assignment"] for event in self._events if event["kind"] == "asked"}
        results = [(event["trial"], result_of(event)) for event in self._events if event["kind"] == "told"]
        earlier = [{"trial": trial, "assignment": dict(assignments[trial])} | vars(result) for trial, result in results]
        try:
            proposed = self._propose(number, earlier)
        except Exception as error:
            raise ValueError(
                f"{self._name} failed for trial {number}: {type(error).__name__}: {error}; {_PROPOSALS}"
            ) from error
        if proposed is None:
            return None
        if not isinstance(proposed, Mapping) or not all(
            isinstance(option, str) and isinstance(value, float | int | str) for option, value in proposed.items()
        ):
            raise TypeError(f"{self._name} returned {proposed!r:.100} for trial {number}: {_PROPOSALS}")
        values = {name.replace("_", "-"): value for name, value in proposed.items()}
        self._check(values)
        return values

    def tell(self, number: int, result: Result) -> None:
        """No effect: the next proposal is made from the journal's events."""


def load_function(place: str) -> Propose:
    """The function that ``place`` names: ``module:function`` or ``FILE.py:function``.

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
    function: Any = getattr(holder, name, None)
    if not callable(function):
        raise ValueError(f"{module} has no function {name}")
    return cast(Propose, function)
