"""Random search."""

from collections.abc import Mapping

import numpy as np

from rl_bridge.tuning.samplers.protocol import Result
from rl_bridge.tuning.space import Assignment, Space, Value


class RandomSampler:
    """A trial depends on the seed and its number alone."""

    def __init__(self, space: Space, seed: int, goals: int = 1) -> None:
        self._space, self._seed = space, seed

    def ask(self, number: int) -> Assignment:
        """Uniform, or uniform in the logarithm."""
        return self._space.draw(np.random.default_rng([self._seed, number]))

    def tell(self, number: int, assignment: Mapping[str, Value], result: Result) -> None:
        """Nothing is learned."""
