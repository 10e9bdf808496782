"""Which trial is hopeless before its end: pairs of equal seed and step against the incumbent; successive halving."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rl_bridge.tracking.intervals import confidence_interval
from rl_bridge.tuning.objectives import Points

Curves = Mapping[int, Points]
"""Seed → step → loss of one trial."""


@dataclass(frozen=True)
class Pruning:
    """How trials are stopped early."""

    kind: Literal["none", "paired", "asha"] = "none"
    least_steps: int = 1
    """No trial is stopped before this step."""
    pairs: int = 4
    """paired: evaluations that both trials have, at least."""
    margin: float = 0.0
    """paired: a trial may be worse by so much."""
    factor: int = 3
    """asha: of this many trials one goes on beyond a rung; the rungs are least_steps · factorⁿ.

    The last step of a run is no rung: nothing is left there that a stop could save.
    """

    def __post_init__(self) -> None:
        """Refuse counts that stop nothing or everything."""
        if self.least_steps < 1 or self.pairs < 2 or self.factor < 2 or self.margin < 0:
            raise ValueError(f"need least_steps ≥ 1, pairs ≥ 2, factor ≥ 2 and margin ≥ 0, got {self}")

    def verdict(
        self, trial: Curves, incumbent: Curves | None, others: Mapping[int, Curves], steps: Mapping[int, int]
    ) -> str | None:
        """Why a trial should stop; None if it may go on.

        ``others``: the curves of the other trials. ``steps``: seed → steps that the trial has made, which are more than
        its curve has when not each step is measured.
        """
        if self.kind == "paired" and incumbent is not None:
            return self._paired(trial, incumbent)
        return self._halved(trial, others, steps) if self.kind == "asha" else None

    def _paired(self, trial: Curves, incumbent: Curves) -> str | None:
        """The trial is worse than the incumbent by more than noise, in the later half of what both have.

        Pairs of one run are not independent, so that the interval is narrower than one over many seeds would be.
        """
        mine, best = [], []
        for seed, points in trial.items():
            common = sorted(step for step in points if step in incumbent.get(seed, {}))
            late = common[len(common) // 2 :] if common and common[-1] + 1 >= self.least_steps else []
            mine += [points[step] for step in late]
            best += [incumbent[seed][step] for step in late]
        if len(mine) < self.pairs:
            return None
        found = confidence_interval(mine, best, resamples=2000)
        if found["low"] <= self.margin:
            return None
        return f"worse than the best trial by {found['mean']:.4g} [{found['low']:.4g}, {found['high']:.4g}]"

    def _halved(self, trial: Curves, others: Mapping[int, Curves], steps: Mapping[int, int]) -> str | None:
        """The trial is not among the best 1/factor of those that have come as far, at the last rung of a seed.

        A rung decides when the seed goes on beyond it. A run that has made its last step does not.
        """
        for seed, points in trial.items():
            rung = self.rung(min(max(points, default=-1) + 1, steps[seed] - 1))
            if rung is None:
                continue
            mine = at_rung(points, rung)
            theirs = [at_rung(curves[seed], rung) for curves in others.values() if reached(curves.get(seed), rung)]
            if mine is None or len(theirs) + 1 < self.factor:
                continue
            better = sum(value is not None and value < mine for value in theirs)
            kept = math.ceil((len(theirs) + 1) / self.factor)
            if better >= kept:
                return f"{better} of {len(theirs)} trials are better after {rung} steps, and {kept} go on"
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
