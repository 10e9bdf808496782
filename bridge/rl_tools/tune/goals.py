"""Goals and constraints of a study, their values in a run's record, and the trials that are stopped early."""

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from rl_bridge.common.statistics import LEAST, student
from rl_bridge.common.terminal import given

REDUCTIONS = ("last", "best", "mean", "sum", "max", "min")
WHOLE_RUN = ("tokens", "seconds")
"""Goals that a run has at its end alone."""
Points = dict[int, float]
"""Step → value."""


@dataclass(frozen=True)
class Goal:
    """A number of a run. ``seconds`` and ``tokens`` (trained tokens) are those of the whole run.

    Another name is a metric of the run's record or, if no record has it, an entry of summary.json (``gain.low``).
    """

    metric: str
    maximize: bool
    reduction: str = "last"

    def __post_init__(self) -> None:
        """Refuse an empty name and an unknown reduction."""
        if not self.metric:
            raise ValueError("a goal has the name of a metric, as held_out or kl:mean, got none")
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"{self.metric}: after the colon stands one of {', '.join(REDUCTIONS)}")

    @property
    def name(self) -> str:
        """The goal in the words of the command line."""
        return self.metric if self.reduction == "last" else f"{self.metric}:{self.reduction}"

    def loss(self, value: float) -> float:
        """The value to minimise: ``value``, or its negative for a goal that is maximised."""
        return -value if self.maximize else value

    def reduced(self, values: Sequence[float]) -> float:
        """One number of the values of all steps."""
        if self.reduction == "last":
            return values[-1]
        if self.reduction == "best":
            return max(values) if self.maximize else min(values)
        return float({"mean": np.mean, "sum": np.sum, "max": np.max, "min": np.min}[self.reduction](values))


def parse_goal(text: str, *, maximize: bool) -> Goal:
    """``held_out`` or ``held_out:best``.

    >>> parse_goal("held_out:best", maximize=True).reduction
    'best'
    """
    metric, _, reduction = text.partition(":")
    return Goal(metric, maximize, reduction or "last")


@dataclass(frozen=True)
class Constraint:
    """``goal ≤ bound`` or ``goal ≥ bound``, of a trial's mean over its seeds."""

    goal: Goal
    bound: float

    def __post_init__(self) -> None:
        """Refuse a bound that every trial keeps, or none. ``best`` gets its direction: max of ≥, min of ≤.

        Values are kept by the names of their goals: two directions of one name would be one value.
        """
        if self.goal.reduction == "best":
            object.__setattr__(self, "goal", replace(self.goal, reduction="max" if self.goal.maximize else "min"))
        if not math.isfinite(self.bound):
            raise ValueError(f"the bound is a finite number, got {self.bound}")

    @property
    def text(self) -> str:
        """The constraint in the words of the command line."""
        return f"{self.goal.name}{'>=' if self.goal.maximize else '<='}{self.bound:g}"

    def violation(self, value: float) -> float:
        """How far the bound is broken; ≤ 0 where it holds."""
        return self.bound - value if self.goal.maximize else value - self.bound


def parse_constraint(text: str) -> Constraint:
    """``kl<=0.1``, ``tokens<=1e6``, ``entropy:min>=0.2``.

    >>> parse_constraint("kl:max <= 0.1").text, parse_constraint("kl:best <= 0.1").text
    ('kl:max<=0.1', 'kl:min<=0.1')
    """
    match = re.fullmatch(r"\s*([^<>=\s]+)\s*(<=|>=)\s*(\S+)\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is no constraint: 'kl<=0.1', 'entropy:min>=0.2'")
    metric, sign, bound = match.groups()
    try:
        return Constraint(parse_goal(metric, maximize=sign == ">="), float(bound))
    except ValueError as error:
        raise ValueError(f"constraint {text!r}: {error}") from None


class MissingGoal(ValueError):
    """A run has come to its end and has no such metric."""


def history(records: Sequence[Mapping[str, Any]], metric: str) -> Points:
    """Step → value, of the last stage that has the metric."""
    measured = [record for record in records if isinstance(record.get(metric), int | float)]
    return {record["step"]: float(record[metric]) for record in measured if record["stage"] == measured[-1]["stage"]}


def value_of(goal: Goal, records: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> float:
    """The goal's value in a run that has ended.

    Raises:
        MissingGoal: neither records nor summary have it; the message has the nearest names.
        ValueError: it is not finite.
    """
    if goal.metric == "tokens":
        values = [float(sum(record.get("trained_tokens", 0) for record in records))]
    elif goal.metric == "seconds":
        values = [float(summary["seconds"])]
    else:
        values = list(history(records, goal.metric).values()) or _of_summary(goal.metric, summary)
    if not values:
        metrics = sorted({name for record in records for name, value in record.items() if isinstance(value, float)})
        near = difflib.get_close_matches(goal.metric, [*metrics, *summary, "tokens", "seconds"], n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else "."
        raise MissingGoal(f"no record and no summary has {goal.metric}{hint} Records have {', '.join(metrics)}")
    value = goal.reduced(values)
    if not math.isfinite(value):
        raise ValueError(f"{goal.name} is {value}")
    return value


def _of_summary(metric: str, summary: Mapping[str, Any]) -> list[float]:
    value: Any = summary
    for part in metric.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return [float(value)] if isinstance(value, int | float) else []


def front(rows: Sequence[Sequence[float]], maximize: Sequence[bool]) -> list[bool]:
    """Which of the rows, a value a goal, no other row dominates."""
    import jax.numpy as jnp

    from rl_fn import pareto_mask

    return np.asarray(pareto_mask(jnp.asarray(np.asarray(rows)), maximize=tuple(maximize))).tolist() if rows else []


def volume(rows: Sequence[Sequence[float]], reference: Sequence[float], maximize: Sequence[bool]) -> float:
    """Volume of the space of goals that the rows dominate, down to a reference."""
    from rl_fn import hypervolume

    return hypervolume(np.asarray(rows, np.float64).reshape(len(rows), len(reference)), reference, maximize=maximize)


Curves = Mapping[int, Points]
"""Seed → step → loss of one trial."""
WRONG = 0.05
"""paired: the most equal trials that are stopped, over all looks and whichever trial is the best."""


@dataclass(frozen=True)
class Pruning:
    """How trials are stopped early: by pairs of equal seed and step against the incumbent, or by successive halving."""

    kind: Literal["none", "paired", "asha"] = "none"
    least_steps: int = 1
    """No trial is stopped before this step."""
    pairs: int = 4
    """paired: evaluations of each seed that both trials have, at least."""
    margin: float = 0.0
    """paired: a trial may be worse by so much."""
    factor: int = 3
    """asha: of this many trials one goes on beyond a rung; the rungs are least_steps · factorⁿ.

    The last step of a run is no rung: nothing is left there that a stop could save.
    """

    def __post_init__(self) -> None:
        """Refuse counts that stop nothing or everything."""
        if self.least_steps < 1 or self.pairs < 2 or self.factor < 2 or not 0 <= self.margin < math.inf:
            raise ValueError(
                "need least_steps ≥ 1, pairs ≥ 2, factor ≥ 2 and a finite margin ≥ 0, got "
                f"{given(self, 'least_steps', 'pairs', 'factor', 'margin')}"
            )

    def verdict(
        self, trial: Curves, incumbent: Curves | None, others: Mapping[int, Curves], steps: Mapping[int, int]
    ) -> str | None:
        """Why a trial should stop; None if it may go on.

        ``others``: the curves of the other trials. ``steps``: seed → steps that the trial has made. They are more than
        the points of its curve where not each step is measured.
        """
        if self.kind == "paired" and incumbent is not None:
            return self._paired(trial, incumbent, others)
        return self._halved(trial, others, steps) if self.kind == "asha" else None

    def _paired(self, trial: Curves, incumbent: Curves, others: Mapping[int, Curves]) -> str | None:
        """The trial is worse than the incumbent by more than chance, in the later half of what both have.

        Each seed is one number, the mean of its differences: successive values of a run are not independent. The
        looks are at fixed counts of evaluations, each twice the one before, and share ``WRONG`` as 1/2, 1/4, …. The
        incumbent is the best of several trials and may be so by chance: each share is divided by the number of trials
        that could be the incumbent. Both are sums of probabilities: they bound the equal trials that are stopped.
        """
        seeds = [seed for seed in incumbent if seed in trial]
        if len(seeds) < max(LEAST, len(incumbent)):
            return None
        common = [sorted(trial[seed].keys() & incumbent[seed].keys()) for seed in seeds]
        rivals = max(1, sum(curves.keys() >= incumbent.keys() for curves in others.values()))
        for look, count in enumerate(self._looks(common)):
            late = [steps[count // 2 : count] for steps in common]
            differences = np.array(
                [
                    np.mean([trial[seed][step] - incumbent[seed][step] for step in steps])
                    for seed, steps in zip(seeds, late, strict=True)
                ]
            )
            # One end of an interval that has this probability on both sides.
            mean, low, high = student(differences, level=1 - WRONG * 0.5**look / rivals)
            if low > self.margin:
                return f"worse than the best trial by {mean:.4g} [{low:.4g}, {high:.4g}] over {len(seeds)} seeds"
        return None

    def _looks(self, common: list[list[int]]) -> Iterator[int]:
        """Counts of evaluations that every seed has: the least that may decide, and each twice the one before."""
        shared, count = min(map(len, common)), self.pairs
        while count <= shared and min(steps[count - 1] for steps in common) + 1 < self.least_steps:
            count += 1
        while count <= shared:
            yield count
            count *= 2

    def _halved(self, trial: Curves, others: Mapping[int, Curves], steps: Mapping[int, int]) -> str | None:
        """The trial is not among the best 1/factor of those that have come as far, at the last rung of a seed.

        A rung decides when the seed goes on beyond it. A run that has made its last step does not.
        """
        for seed, points in trial.items():
            rung = self.rung(min(max(points, default=-1) + 1, steps[seed] - 1))
            if rung is None:
                continue
            loss = at_rung(points, rung)
            rivals = [at_rung(curves[seed], rung) for curves in others.values() if reached(curves.get(seed), rung)]
            if loss is None or len(rivals) + 1 < self.factor:
                continue
            better = sum(rival is not None and rival < loss for rival in rivals)
            survivors = math.ceil((len(rivals) + 1) / self.factor)
            if better >= survivors:
                return f"{better} of {len(rivals)} trials are better after {rung} steps, and {survivors} go on"
        return None

    def rung(self, steps: int) -> int | None:
        """The last rung that so many steps have reached."""
        if steps < self.least_steps:
            return None
        rung = self.least_steps
        while rung * self.factor <= steps:
            rung *= self.factor
        return rung


def at_rung(points: Points, rung: int) -> float | None:
    """The last value within the first ``rung`` steps."""
    before = [step for step in points if step < rung]
    return points[max(before)] if before else None


def reached(points: Points | None, rung: int) -> bool:
    """Whether there is a value of this rung or a later one, so that the earlier ones are final."""
    return points is not None and max(points, default=-1) + 1 >= rung
