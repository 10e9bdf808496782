"""Rewards: a user's function, a judge or a model asked about trajectories, each value checked.

A light package: the process of a reward with a time limit loads no torch for it.
"""

from rl_bridge.rewards.errors import RewardError
from rl_bridge.rewards.loading import load_reward
from rl_bridge.rewards.protocols import Reward
from rl_bridge.rewards.rewards import Rewards, with_rows
from rl_bridge.rewards.sources import RewardOptions, load, score
from rl_bridge.rewards.verifiable import exact_match

__all__ = [
    "Reward",
    "RewardError",
    "RewardOptions",
    "Rewards",
    "exact_match",
    "load",
    "load_reward",
    "score",
    "with_rows",
]
