"""The reward that an environment gave, as one of a run's rewards."""

from collections.abc import Iterator, Sequence

from rl_bridge.data.trajectory import Trajectory
from rl_bridge.rewards.errors import RewardError


class EnvironmentReward:
    """What the environment gave over all turns of a trajectory."""

    def __init__(self, name: str = "environment") -> None:
        self.name = name

    def score(self, trajectories: Sequence[Trajectory]) -> Iterator[dict[str, float]]:
        """The values, in order.

        Raises:
            RewardError: an environment that gave no reward in a whole batch.
        """
        for trajectory in trajectories:
            given = trajectory.rewards.get("environment")
            if given is None and trajectory.request_id:  # without one it is a trial that no environment has seen
                where = trajectory.row.get("_where", "a row")
                raise RewardError(
                    f"reward environment on {where}: the environment gave none; its steps say reward=…, or another "
                    "reward is named"
                )
            yield {self.name: 0.0 if given is None else given}

    def close(self) -> None:
        """Nothing is held."""
