"""Samplers of other libraries: Optuna, scikit-optimize, Hyperopt, bayesian-optimization."""

import math
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from rl_tools.tune.samplers import RandomSampler, Result, library, penalised
from rl_tools.tune.space import Assignment, Choice, Parameter, Space, Value

# Optuna's samplers: TPE, a Gaussian process, CMA-ES.

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


# scikit-optimize: a Gaussian process over the whole space.


class SkoptSampler:
    """The library knows neither failures nor constraints: such trials get the worst loss that was seen.

    A trial that runs has the best loss that was seen in place of its own, so that no other is proposed beside it.
    """

    STARTUP = 10
    """Random trials before the model."""

    def __init__(self, space: Space, seed: int, goals: int = 1, startup: int | None = None) -> None:
        self._startup = self.STARTUP if startup is None else startup
        self._space, self._seed, self._skopt = space, seed, library("skopt")
        kinds = library("skopt.space")
        self._dimensions = [_dimension(kinds, parameter) for parameter in space]
        self._told: list[tuple[Assignment, Result]] = []
        self._open: dict[int, Assignment] = {}

    def ask(self, number: int) -> Assignment:
        """A proposal from a new optimiser that has been told everything: the same calls give the same proposals."""
        optimizer = self._skopt.Optimizer(
            self._dimensions,
            base_estimator="GP",
            n_initial_points=self._startup,
            acq_func="EI",
            random_state=(self._seed * 100_003 + number) % 2**32,
        )
        rows = penalised(self._told)
        if rows:
            lie = min(loss for _, loss in rows)
            rows += [(assignment, lie) for assignment in self._open.values()]
            optimizer.tell([self._point(assignment) for assignment, _ in rows], [loss for _, loss in rows])
        values = dict(zip((p.name for p in self._space), optimizer.ask(), strict=True))
        whole = {p.name: _skopt_value(p, values[p.name]) for p in self._space}
        self._open[number] = self._space.active(whole)
        return dict(self._open[number])

    def tell(self, number: int, assignment: Mapping[str, Value], result: Result) -> None:
        """Remembered for the next proposal."""
        self._open.pop(number, None)
        self._told.append((dict(assignment), result))

    def _point(self, assignment: Mapping[str, Value]) -> list[Any]:
        whole = self._space.whole(assignment)
        return [whole[parameter.name] for parameter in self._space]


def _dimension(kinds: Any, parameter: Parameter) -> Any:
    domain = parameter.domain
    if isinstance(domain, Choice):
        return kinds.Categorical(list(domain.values), name=parameter.name)
    prior = "log-uniform" if domain.log else "uniform"
    if domain.whole:
        return kinds.Integer(int(domain.low), int(domain.high), prior=prior, name=parameter.name)
    return kinds.Real(domain.low, domain.high, prior=prior, name=parameter.name)


def _skopt_value(parameter: Parameter, value: Any) -> Value:
    return str(value) if isinstance(parameter.domain, Choice) else parameter.domain.rounded(float(value))


# Hyperopt's TPE.


class HyperoptSampler:
    """Failures are told as such.

    The library knows no constraints: a trial that breaks one is a failure, too.
    """

    STARTUP = 20
    """Random trials before the model: Hyperopt's own number."""

    def __init__(self, space: Space, seed: int, goals: int = 1, startup: int | None = None) -> None:
        self._startup = self.STARTUP if startup is None else startup
        self._space, self._seed = space, seed
        self._hyperopt = hyperopt = library("hyperopt")
        self._trials = hyperopt.Trials()
        self._domain = hyperopt.Domain(_nothing, {p.name: _expression(hyperopt.hp, p) for p in space})

    def ask(self, number: int) -> Assignment:
        """A proposal of TPE; the first ones are random."""
        seed = (self._seed * 100_003 + number) % 2**31
        (document,) = self._hyperopt.tpe.suggest(
            [number], self._domain, self._trials, seed, n_startup_jobs=self._startup
        )
        found = document["misc"]["vals"]
        whole = {p.name: _hyperopt_value(p, found[p.name][0]) for p in self._space}
        return self._space.active(whole)

    def tell(self, number: int, assignment: Mapping[str, Value], result: Result) -> None:
        """Written into Hyperopt's list of trials."""
        whole = self._space.whole(assignment)
        values = {p.name: [_inner(p, whole[p.name])] for p in self._space}
        places = {p.name: [number] for p in self._space}
        command = ("domain_attachment", "FMinIter_Domain")
        misc: dict[str, Any] = {"tid": number, "cmd": command, "workdir": None, "idxs": places, "vals": values}
        outcome: dict[str, Any] = {"status": self._hyperopt.STATUS_FAIL}
        if result.usable and result.losses is not None:
            outcome = {"status": self._hyperopt.STATUS_OK, "loss": result.losses[0]}
        (made,) = self._trials.new_trial_docs([number], [None], [outcome], [misc])
        made["state"] = self._hyperopt.JOB_STATE_DONE
        self._trials.insert_trial_docs([made])
        self._trials.refresh()


def _nothing(values: Mapping[str, Any]) -> float:
    """Hyperopt wants a function; the study's trials take its place."""
    raise AssertionError("the study's trials are evaluated elsewhere")


def _expression(hp: Any, parameter: Parameter) -> Any:
    domain = parameter.domain
    if isinstance(domain, Choice):
        return hp.choice(parameter.name, list(domain.values))
    if domain.log:
        return hp.loguniform(parameter.name, math.log(domain.low), math.log(domain.high))
    return hp.uniform(parameter.name, domain.low, domain.high)


def _hyperopt_value(parameter: Parameter, found: Any) -> Value:
    domain = parameter.domain
    return domain.values[int(found)] if isinstance(domain, Choice) else domain.rounded(float(found))


def _inner(parameter: Parameter, value: Value) -> Any:
    """As Hyperopt has the value: the number of a choice."""
    domain = parameter.domain
    return domain.values.index(str(value)) if isinstance(domain, Choice) else np.float64(value)


# bayesian-optimization: a Gaussian process over the unit cube.


class BayesSampler:
    """The library maximises, and knows neither logarithms, failures nor constraints of a study.

    A parameter is its share of the domain from 0 to 1. Failed and infeasible trials get the worst loss that was seen,
    and trials that run the best one.
    """

    STARTUP = 5
    """Random trials before the model."""

    def __init__(self, space: Space, seed: int, goals: int = 1, startup: int | None = None) -> None:
        self._startup = self.STARTUP if startup is None else startup
        self._space, self._seed, self._library = space, seed, library("bayes_opt")
        self._random = RandomSampler(space, seed)
        self._told: list[tuple[Assignment, Result]] = []
        self._open: dict[int, Assignment] = {}

    def ask(self, number: int) -> Assignment:
        """A proposal from a new optimiser that has been told everything: the same calls give the same proposals."""
        rows = penalised(self._told)
        if len(rows) < self._startup:
            self._open[number] = self._random.ask(number)
            return dict(self._open[number])
        best = min(loss for _, loss in rows)
        rows += [(assignment, best) for assignment in self._open.values()]
        optimizer = self._library.BayesianOptimization(
            f=None,
            pbounds={parameter.name: (0.0, 1.0) for parameter in self._space},
            random_state=(self._seed * 100_003 + number) % 2**32,
            verbose=0,
            allow_duplicate_points=True,
        )
        for assignment, loss in rows:
            whole = self._space.whole(assignment)
            optimizer.register({p.name: p.domain.position(whole[p.name]) for p in self._space}, -loss)
        shares = optimizer.suggest()
        whole = {p.name: p.domain.at(min(max(float(shares[p.name]), 0.0), 1.0)) for p in self._space}
        self._open[number] = self._space.active(whole)
        return dict(self._open[number])

    def tell(self, number: int, assignment: Mapping[str, Value], result: Result) -> None:
        """Remembered for the next proposal."""
        self._open.pop(number, None)
        self._told.append((dict(assignment), result))
