"""The run folders of a study, read for its goals."""

import json
from pathlib import Path
from typing import Any

from rl_bridge.tracking.records import METRICS, read_records
from rl_bridge.tuning.objectives import Points, history, value_of
from rl_bridge.tuning.scheduler import Plan
from rl_bridge.tuning.state import Key


class RunRecords:
    """``runs``: the folder of all run folders."""

    def __init__(self, runs: Path, plan: Plan) -> None:
        self._runs, self._plan = runs, plan
        self._read: dict[Key, tuple[int, list[dict[str, Any]]]] = {}

    def finished(self, key: Key) -> bool:
        """A run writes its summary last, whole or not at all."""
        return (self._runs / key.name / "summary.json").exists()

    def values(self, key: Key) -> dict[str, float]:
        """Goal → value.

        Raises:
            ValueError: a goal or a constraint has no value, or none that is finite.
        """
        summary = json.loads((self._runs / key.name / "summary.json").read_text("utf-8"))
        goals = [*self._plan.goals, *(constraint.goal for constraint in self._plan.constraints)]
        return {goal.name: value_of(goal, self.records(key), summary) for goal in goals}

    def curve(self, key: Key) -> Points:
        """Step → loss of the first goal."""
        goal = self._plan.goals[0]
        return {step: goal.loss(value) for step, value in history(self.records(key), goal.metric).items()}

    def steps(self, key: Key) -> int:
        """Steps made so far, of the stage that has the first goal."""
        records, metric = self.records(key), self._plan.goals[0].metric
        stage = next((record["stage"] for record in reversed(records) if metric in record), None)
        return max((record["step"] + 1 for record in records if record["stage"] == stage), default=0)

    def records(self, key: Key) -> list[dict[str, Any]]:
        """Of the run's steps so far. A line that is being written is left for the next call."""
        file = self._runs / key.name / METRICS
        if not file.exists():
            return []
        size = file.stat().st_size
        if self._read.get(key, (-1, []))[0] != size:
            self._read[key] = size, read_records(file, torn=True)
        return self._read[key][1]
