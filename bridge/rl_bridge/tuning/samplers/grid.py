"""Every combination, once."""

import itertools
from collections.abc import Mapping

import numpy as np

from rl_bridge.tuning.samplers.protocol import Result
from rl_bridge.tuning.space import Assignment, Space, Value


class GridSampler:
    """All choices, and ``points`` values at equal distances of each range, in an order that the seed shuffles.

    A grid that is not run to its end has then been tried evenly.
    """

    def __init__(self, space: Space, seed: int, points: int = 3) -> None:
        names = [parameter.name for parameter in space]
        values = [parameter.domain.points(points) for parameter in space]
        every = [space.active(dict(zip(names, row, strict=True))) for row in itertools.product(*values)]
        # Combinations that differ only in what does not apply are one.
        distinct = list({tuple(sorted(row.items())): row for row in every}.values())
        order = np.random.default_rng(seed).permutation(len(distinct))
        self._grid = [distinct[i] for i in order]

    def __len__(self) -> int:
        return len(self._grid)

    def ask(self, number: int) -> Assignment | None:
        """The combination with this number."""
        return dict(self._grid[number]) if number < len(self._grid) else None

    def tell(self, number: int, assignment: Mapping[str, Value], result: Result) -> None:
        """Nothing is learned."""
