"""Hyperopt's TPE."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from rl_bridge.tuning.samplers.protocol import Result, library
from rl_bridge.tuning.space import Assignment, Choice, Parameter, Space, Value


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
        whole = {p.name: _value(p, found[p.name][0]) for p in self._space}
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


def _value(parameter: Parameter, found: Any) -> Value:
    domain = parameter.domain
    return domain.values[int(found)] if isinstance(domain, Choice) else domain.rounded(float(found))


def _inner(parameter: Parameter, value: Value) -> Any:
    """As Hyperopt has the value: the number of a choice."""
    domain = parameter.domain
    return domain.values.index(str(value)) if isinstance(domain, Choice) else np.float64(value)
