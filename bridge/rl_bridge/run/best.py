"""The best step of a run, whose checkpoint stays.

It stands alone because it knows numbers and no files.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal


class Best:
    """The best step of a stage, by a metric of its record: that of the last stage which has the metric.

    ``record``: the number of records up to the best one, which is the number of its checkpoint. A checkpoint holds the
    models of one stage, so that a later stage begins without a best value.
    """

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        """``state``: of a resumed run."""
        begins = {"metric": None, "mode": "max", "stage": None, "value": None, "record": None, "lost": None}
        self._state: dict[str, Any] = {**begins, **(state or {})}
        self._watched: tuple[str | None, str] = self._state["metric"], self._state["mode"]

    @property
    def record(self) -> int | None:
        """The number of the best checkpoint; None before the metric was recorded."""
        return self._of_watched("record")

    @property
    def value(self) -> float | None:
        """The best value so far."""
        return self._of_watched("value")

    @property
    def stage(self) -> str | None:
        """The stage of the best step."""
        return self._of_watched("stage")

    @property
    def lost(self) -> str | None:
        """Why the best step so far counts no more; None if it does, or there was none."""
        return self._of_watched("lost")

    def lose(self, reason: str) -> None:
        """Its checkpoint is gone, or its value is of another evaluation: the best of the steps that follow counts."""
        self._state |= {"value": None, "record": None, "lost": reason}

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return dict(self._state)

    def watch(self, metric: str, mode: Literal["max", "min"]) -> None:
        """Compare this metric from now on. Another metric than before begins without a best value.

        The best one by the metric before stays until there is another: a resumed run of several stages watches the
        metric of each of them again, before it comes to its own.
        """
        if mode not in ("max", "min"):
            raise ValueError(f"mode is 'max' or 'min', got {mode!r}")
        self._watched = metric, mode

    def see(self, record: Mapping[str, Any], number: int) -> None:
        """Compare a record, the one that makes their count ``number``. The first of equal values stays the best."""
        (metric, mode), stage = self._watched, record.get("stage")
        value = None if metric is None else record.get(metric)
        if value is None or not math.isfinite(value):
            return
        best = self.value if self.stage in (None, stage) else None
        if best is None or (value > best if mode == "max" else value < best):
            of_step = {"stage": stage, "value": float(value), "record": number, "lost": None}
            self._state = {"metric": metric, "mode": mode, **of_step}

    def is_new(self, number: int) -> bool:
        """Whether the newest record is the best, so that its step needs a checkpoint."""
        return self.record == number

    def pinned(self) -> tuple[int, ...]:
        """Numbers of the checkpoints that stay."""
        return () if self._state["record"] is None else (self._state["record"],)

    def _of_watched(self, name: str) -> Any:
        return self._state[name] if (self._state["metric"], self._state["mode"]) == self._watched else None
