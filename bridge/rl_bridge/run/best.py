"""The best step of a run, whose checkpoint stays.

It stands alone because it knows numbers and no files.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal


class Best:
    """The best step of a run, by a metric of its record.

    ``record``: the number of records up to the best one, which is the number of its checkpoint.
    """

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        """``state``: of a resumed run."""
        begins = {"metric": None, "mode": "max", "value": None, "record": None, "lost": None}
        self._state: dict[str, Any] = {**begins, **(state or {})}

    @property
    def record(self) -> int | None:
        """The number of the best checkpoint; None before the metric was recorded."""
        return self._state["record"]

    @property
    def value(self) -> float | None:
        """The best value so far."""
        return self._state["value"]

    @property
    def lost(self) -> str | None:
        """Why the best checkpoint is no more; None if it is there, or there was none."""
        return self._state["lost"]

    def lose(self, reason: str) -> None:
        """Its checkpoint is damaged or gone: the best of the steps that follow takes its place."""
        self._state |= {"value": None, "record": None, "lost": reason}

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return dict(self._state)

    def watch(self, metric: str, mode: Literal["max", "min"]) -> None:
        """Compare this metric from now on. Another metric than before begins without a best value."""
        if mode not in ("max", "min"):
            raise ValueError(f"mode is 'max' or 'min', got {mode!r}")
        if (metric, mode) != (self._state["metric"], self._state["mode"]):
            self._state = {"metric": metric, "mode": mode, "value": None, "record": None, "lost": None}

    def see(self, record: Mapping[str, Any], number: int) -> None:
        """Compare a record, the one that makes their count ``number``. The first of equal values stays the best."""
        value, best = record.get(self._state["metric"]), self._state["value"]
        if value is None or not math.isfinite(value):
            return
        if best is None or (value > best if self._state["mode"] == "max" else value < best):
            self._state |= {"value": float(value), "record": number, "lost": None}

    def is_new(self, number: int) -> bool:
        """Whether the newest record is the best, so that its step needs a checkpoint."""
        return self._state["record"] == number

    def pinned(self) -> tuple[int, ...]:
        """Numbers of the checkpoints that stay."""
        return () if self.record is None else (self.record,)
