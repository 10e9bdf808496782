"""Optuna's samplers: TPE, a Gaussian process, CMA-ES."""

import warnings
from collections.abc import Mapping
from typing import Any

from rl_bridge.tuning.samplers.protocol import Result, library
from rl_bridge.tuning.space import Assignment, Choice, Parameter, Space, Value

_STATES = {"complete": "COMPLETE", "pruned": "PRUNED", "failed": "FAIL"}


class _OptunaSampler:
    """A study in memory. ``tree``: the sampler knows conditions, so that only what applies is asked for."""

    tree = False
    constrained = True
    """Whether it learns from broken constraints; else such a trial is a failure."""
    STARTUP = 10
    """Random trials before the sampler learns: Optuna's own number."""

    def __init__(self, space: Space, seed: int, goals: int = 1, startup: int | None = None) -> None:
        self._optuna = optuna = library("optuna")
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._space = space
        self._asked: dict[int, tuple[Any, Assignment]] = {}
        with warnings.catch_warnings():
            # Classes and options that Optuna may change.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = self.sampler(optuna.samplers, seed, self.STARTUP if startup is None else startup)
        self._study = optuna.create_study(sampler=sampler, directions=["minimize"] * goals)

    def sampler(self, samplers: Any, seed: int, startup: int) -> Any:
        """What proposes, after ``startup`` trials at random."""
        raise NotImplementedError

    def ask(self, number: int) -> Assignment:
        """Optuna's proposal, each number with six digits."""
        trial = self._study.ask()
        values: Assignment = {}
        for parameter in self._space:
            if not self.tree or self._space.applies(parameter, values):
                values[parameter.name] = _suggested(trial, parameter)
        self._asked[number] = trial, self._space.active(values)
        return dict(self._asked[number][1])

    def _state(self, result: Result) -> str:
        """The name of a result's state in Optuna."""
        known = result.status != "complete" or self.constrained or result.feasible
        return _STATES[result.status] if known else "FAIL"

    def tell(self, number: int, assignment: Mapping[str, Value], result: Result) -> None:
        """Failures, pruned trials and constraints are told as such."""
        state = self._state(result)
        losses = result.losses if state == "COMPLETE" else None
        states = self._optuna.trial.TrialState
        trial, proposed = self._asked.pop(number, (None, None))
        if trial is None or proposed != assignment:
            if trial is not None:
                self._study.tell(trial, state=states.FAIL)
            self._study.add_trial(self._foreign(assignment, result))
            return
        for index, violation in enumerate(result.violations if self.constrained else ()):
            trial.set_constraint(str(index), violation)
        if result.status == "pruned" and result.losses is not None and len(self._study.directions) == 1:
            trial.report(result.losses[0], step=0)
        self._study.tell(trial, None if losses is None else list(losses), state=states[state])

    def _foreign(self, assignment: Mapping[str, Value], result: Result) -> Any:
        """A trial that this sampler did not propose."""
        values = assignment if self.tree else self._space.whole(assignment)
        domains = {p.name: _distribution(self._optuna.distributions, p) for p in self._space if p.name in values}
        complete = self._state(result) == "COMPLETE" and result.feasible and result.losses is not None
        return self._optuna.trial.create_trial(
            params=dict(values),
            distributions=domains,
            values=list(result.losses) if complete and result.losses is not None else None,
            state=self._optuna.trial.TrialState["COMPLETE" if complete else "FAIL"],
        )


class TPE(_OptunaSampler):
    """Tree-structured Parzen estimator."""

    tree = True

    def sampler(self, samplers: Any, seed: int, startup: int) -> Any:
        """Optuna's default, with a seed."""
        return samplers.TPESampler(seed=seed, n_startup_trials=startup)


class GP(_OptunaSampler):
    """A Gaussian process with expected improvement (of the hypervolume, for several goals)."""

    def sampler(self, samplers: Any, seed: int, startup: int) -> Any:
        """The losses are noisy."""
        return samplers.GPSampler(seed=seed, deterministic_objective=False, n_startup_trials=startup)


class CMAES(_OptunaSampler):
    """CMA-ES over the numbers; choices are drawn at random, as Optuna does."""

    constrained = False
    STARTUP = 1

    def sampler(self, samplers: Any, seed: int, startup: int) -> Any:
        """Nothing is said of the choices that are drawn at random."""
        independent = samplers.RandomSampler(seed=seed)
        return samplers.CmaEsSampler(
            seed=seed, n_startup_trials=startup, independent_sampler=independent, warn_independent_sampling=False
        )


def _suggested(trial: Any, parameter: Parameter) -> Value:
    name, domain = parameter.name, parameter.domain
    if isinstance(domain, Choice):
        return trial.suggest_categorical(name, domain.values)
    if domain.whole:
        return trial.suggest_int(name, int(domain.low), int(domain.high), log=domain.log)
    return domain.rounded(trial.suggest_float(name, domain.low, domain.high, log=domain.log))


def _distribution(distributions: Any, parameter: Parameter) -> Any:
    domain = parameter.domain
    if isinstance(domain, Choice):
        return distributions.CategoricalDistribution(domain.values)
    if domain.whole:
        return distributions.IntDistribution(int(domain.low), int(domain.high), log=domain.log)
    return distributions.FloatDistribution(domain.low, domain.high, log=domain.log)
