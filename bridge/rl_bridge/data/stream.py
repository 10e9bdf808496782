"""An endless stream of rows: shuffled anew each epoch, its place in the data part of a checkpoint."""

import random
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

Row = TypeVar("Row")


class RowStream(Generic[Row]):
    """Every row once an epoch, in an order that depends on the seed and the epoch alone."""

    def __init__(self, rows: Sequence[Row], seed: int) -> None:
        if not rows:
            raise ValueError("there are no rows to train on")
        self._rows = rows
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._order = self._shuffled()

    def take(self, count: int) -> list[Row]:
        """The next ``count`` rows; an epoch's end in the middle of them is no boundary."""
        taken: list[Row] = []
        while len(taken) < count:
            stop = min(len(self._order), self._position + count - len(taken))
            taken += [self._rows[i] for i in self._order[self._position : stop]]
            self._position = stop
            if stop == len(self._order):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._shuffled()
        return taken

    def checkpoint_state(self) -> dict[str, Any]:
        """The place in the data."""
        return {"epoch": self._epoch, "position": self._position, "rows": len(self._rows), "seed": self._seed}

    def load_checkpoint_state(self, state: dict[str, Any]) -> None:
        """Go on at a saved place; other data than was saved raises."""
        if (state["rows"], state["seed"]) != (len(self._rows), self._seed):
            raise ValueError(
                f"the checkpoint was made on {state['rows']} rows with seed {state['seed']}, "
                f"this run has {len(self._rows)} rows and seed {self._seed}"
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._shuffled()

    def _shuffled(self) -> list[int]:
        order = list(range(len(self._rows)))
        random.Random(f"{self._seed}/{self._epoch}").shuffle(order)
        return order
