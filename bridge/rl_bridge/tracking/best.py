"""Which step of a run was the best, by a metric of its record."""

import math
from collections.abc import Mapping
from typing import Any, Literal


class Best:
    """``record``: how many records there were when the best one was written, which numbers its checkpoint."""

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        """``state``: of a resumed run."""
        self._state: dict[str, Any] = {"metric": None, "mode": "max", "value": None, "record": None, **(state or {})}

    @property
    def record(self) -> int | None:
        """The number of the best checkpoint; None before the metric was recorded."""
        return self._state["record"]

    @property
    def value(self) -> float | None:
        """The best value so far."""
        return self._state["value"]

    def state(self) -> dict[str, Any]:
        """What a checkpoint remembers."""
        return dict(self._state)

    def watch(self, metric: str, mode: Literal["max", "min"]) -> None:
        """Look at a metric from now on. Another one than before begins without a best value."""
        if mode not in ("max", "min"):
            raise ValueError(f"mode is 'max' or 'min', got {mode!r}")
        if (metric, mode) != (self._state["metric"], self._state["mode"]):
            self._state = {"metric": metric, "mode": mode, "value": None, "record": None}

    def see(self, record: Mapping[str, Any], number: int) -> None:
        """Compare a record, the one that makes their count ``number``. The first of equal values stays the best."""
        value, best = record.get(self._state["metric"]), self._state["value"]
        if value is None or not math.isfinite(value):
            return
        if best is None or (value > best if self._state["mode"] == "max" else value < best):
            self._state |= {"value": float(value), "record": number}

    def is_new(self, number: int) -> bool:
        """Whether the newest record is the best, so that its step needs a checkpoint."""
        return self._state["record"] == number

    def pinned(self) -> tuple[int, ...]:
        """Numbers of the checkpoints that stay."""
        return () if self.record is None else (self.record,)
