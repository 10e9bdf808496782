"""The reward that an environment gave, as one of a run's rewards."""

from collections.abc import Iterator, Sequence

from rl_bridge.data.trajectory import Trajectory
from rl_bridge.rewards.errors import RewardError


class EnvironmentReward:
    """What the environment gave over all turns of a trajectory; 0 where it has not come so far.

    An environment may give its reward at the end alone: a conversation that fails, or whose turns or tokens run out
    before, has none.
    """

    apart = False
    """Whether an environment gives rewards is seen in a whole call."""

    def __init__(self, name: str = "environment") -> None:
        self.name = name
        self._gives = False

    def score(self, trajectories: Sequence[Trajectory]) -> Iterator[dict[str, float]]:
        """The values, in order.

        Raises:
            RewardError: an environment that gave no reward in a whole batch, and none before or to a conversation that
                it ended itself.
        """
        # Without a request's id a trajectory is a trial that no environment has seen.
        without = [t for t in trajectories if t.request_id and "environment" not in t.rewards]
        given = any(t.turn_rewards or t.rewards.get("environment") for t in trajectories)
        self._gives |= given
        if without and not given and (not self._gives or any(t.finish_reason == "stop" for t in without)):
            where = without[0].row.get("_where", "a row")
            raise RewardError(
                f"reward environment on {where}: the environment gave none; its steps say reward=…, or another "
                "reward is named"
            )
        for trajectory in trajectories:
            yield {self.name: trajectory.rewards.get("environment", 0.0)}

    def close(self) -> None:
        """Nothing is held."""
