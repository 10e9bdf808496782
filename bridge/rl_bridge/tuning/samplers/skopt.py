"""scikit-optimize: a Gaussian process over the whole space."""

from collections.abc import Mapping
from typing import Any

from rl_bridge.tuning.samplers.protocol import Result, library, penalised
from rl_bridge.tuning.space import Assignment, Choice, Parameter, Space, Value


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
        whole = {p.name: _value(p, values[p.name]) for p in self._space}
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


def _value(parameter: Parameter, value: Any) -> Value:
    return str(value) if isinstance(parameter.domain, Choice) else parameter.domain.rounded(float(value))
