"""bayesian-optimization: a Gaussian process over the unit cube."""

from collections.abc import Mapping

from rl_bridge.tuning.samplers.protocol import Result, library, penalised
from rl_bridge.tuning.samplers.random import RandomSampler
from rl_bridge.tuning.space import Assignment, Space, Value


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
