"""Rewards: a user's function, a judge or a model asked about trajectories, each value checked.

A light package: the process of a reward with a time limit loads no torch for it.
"""

from rl_bridge.rewards.function import Reward, RewardError, load_reward
from rl_bridge.rewards.rewards import Rewards, with_rows
from rl_bridge.rewards.sources import RewardOptions, exact_match, load, score

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
