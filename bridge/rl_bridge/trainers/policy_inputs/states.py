"""Steps of episodes (GiGPO): each turn's tokens, reward and the state that the turn began in."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from rl_bridge.data.trajectory import Trajectory


class Steps(NamedTuple):
    """P groups of n episodes of up to S turns; behind an episode's last turn no token counts."""

    rewards: torch.Tensor
    """[P, n, S]: of each turn; what the whole episode earned is on its last."""
    mask: torch.Tensor
    """[P, n, S, L]: the tokens of each turn."""
    state_ids: torch.Tensor
    """[P, n, S] int32: equal where two turns began in the same state."""
    turns: torch.Tensor
    """[N, L] int64: the turn that a token belongs to, from 1; 0 before the first."""


def steps_of(trajectories: Sequence[Trajectory], mask: torch.Tensor, rewards: torch.Tensor) -> Steps:
    """The turns of trajectories: what the policy drew without a break.

    A turn began in the state that the environment named (``state_ids`` of a trajectory), or else in the tokens before
    it. ``mask`` is [N, L], ``rewards`` [P, n] of whole episodes. Rewards of turns (``turn_rewards``) are added,
    unless the environment's reward is one of the run's: then each turn has its own part of it.
    """
    drawn = mask.int()
    begins = torch.diff(drawn, dim=1, prepend=torch.zeros_like(drawn[:, :1])) == 1
    turns = begins.cumsum(1)
    count = turns.amax(1)
    last = max(1, int(count.max()))
    of_turn = torch.stack([mask & (turns == turn + 1) for turn in range(last)], 1)
    per_turn, states = torch.zeros(len(mask), last), torch.zeros(len(mask), last, dtype=torch.int32)
    numbers: dict[tuple, int] = {}
    for row, trajectory in enumerate(trajectories):
        for turn, start in enumerate(begins[row].nonzero()[:, 0].tolist()):
            state = trajectory.state_ids[turn] if trajectory.state_ids else -1
            key = ("named", trajectory.group, state) if state >= 0 else trajectory.tokens[:start]
            states[row, turn] = numbers.setdefault(key, len(numbers))
            per_turn[row, turn] = trajectory.turn_rewards[turn] if trajectory.turn_rewards else 0.0
        # The environment's reward of the episode, where it is one of the run's, is the sum of its turns'.
        counted = sum(trajectory.turn_rewards) if "environment" in trajectory.rewards else 0.0
        per_turn[row, max(0, int(count[row]) - 1)] += rewards.flatten()[row] - counted
    shape = (*rewards.shape, last)
    return Steps(per_turn.view(shape), of_turn.view(*shape, mask.shape[1]), states.view(shape), turns)
