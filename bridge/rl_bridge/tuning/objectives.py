"""What a study is about: goals, constraints, and their values in a run's record."""

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

REDUCTIONS = ("last", "best", "mean", "sum", "max", "min")
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
        """Refuse an unknown reduction."""
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"{self.metric}: after the colon stands one of {', '.join(REDUCTIONS)}")

    @property
    def name(self) -> str:
        """As it was written."""
        return self.metric if self.reduction == "last" else f"{self.metric}:{self.reduction}"

    def loss(self, value: float) -> float:
        """The value, or its negative: what is minimised."""
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

    @property
    def text(self) -> str:
        """As it was written."""
        return f"{self.goal.name}{'>=' if self.goal.maximize else '<='}{self.bound:g}"

    def violation(self, value: float) -> float:
        """How far the bound is broken; ≤ 0 where it holds."""
        return self.bound - value if self.goal.maximize else value - self.bound


def parse_constraint(text: str) -> Constraint:
    """``kl<=0.1``, ``tokens<=1e6``, ``entropy:min>=0.2``.

    >>> parse_constraint("kl:max <= 0.1").text
    'kl:max<=0.1'
    """
    found = re.fullmatch(r"\s*([^<>=\s]+)\s*(<=|>=)\s*(\S+)\s*", text)
    if found is None:
        raise ValueError(f"{text!r} is no constraint: 'kl<=0.1', 'entropy:min>=0.2'")
    metric, sign, bound = found.groups()
    try:
        return Constraint(parse_goal(metric, maximize=sign == ">="), float(bound))
    except ValueError as error:
        raise ValueError(f"constraint {text!r}: {error}") from None


class MissingGoal(ValueError):
    """A run has come to its end and has no such metric."""


def history(records: Sequence[Mapping[str, Any]], metric: str) -> Points:
    """Step → value, of the last stage that has the metric."""
    having = [r for r in records if isinstance(r.get(metric), int | float)]
    return {r["step"]: float(r[metric]) for r in having if r["stage"] == having[-1]["stage"]}


def value_of(goal: Goal, records: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> float:
    """The goal's value in a run that has ended.

    Raises:
        MissingGoal: neither records nor summary have it; the message has the nearest names.
        ValueError: it is not finite.
    """
    if goal.metric == "tokens":
        values = [float(sum(r.get("trained_tokens", 0) for r in records))]
    elif goal.metric == "seconds":
        values = [float(summary["seconds"])]
    else:
        values = list(history(records, goal.metric).values()) or _of_summary(goal.metric, summary)
    if not values:
        known = sorted({name for r in records for name, value in r.items() if isinstance(value, float)})
        near = difflib.get_close_matches(goal.metric, [*known, *summary, "tokens", "seconds"], n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else "."
        raise MissingGoal(f"no record and no summary has {goal.metric}{hint} Records have {', '.join(known)}")
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
    """How much of the space of goals the rows dominate, down to a reference."""
    from rl_fn import hypervolume

    return hypervolume(np.asarray(rows, np.float64).reshape(len(rows), len(reference)), reference, maximize=maximize)
