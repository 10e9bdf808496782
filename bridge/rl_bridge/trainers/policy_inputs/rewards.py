"""Named rewards of completions, group by group, and the penalty of long ones."""

from collections.abc import Sequence
from itertools import groupby

import torch

import rl_fn
from rl_bridge.data.trajectory import Trajectory
from rl_bridge.functional import from_jax

_overlong_penalty = from_jax(rl_fn.overlong_penalty)


def reward_matrix(trajectories: Sequence[Trajectory], names: Sequence[str], responses: int) -> torch.Tensor:
    """[P, R, n]: the rewards of P groups of n trajectories, group by group."""
    flat = torch.tensor([[trajectory.rewards[name] for name in names] for trajectory in trajectories])
    return flat.view(-1, responses, len(names)).transpose(1, 2)


def overlong(trajectories: Sequence[Trajectory], responses: int, *, max_length: int, buffer: int) -> torch.Tensor:
    """[P, n] in [−1, 0]: DAPO's penalty of completions longer than ``max_length − buffer`` tokens.

    ``max_length`` is of one turn: of a conversation its longest turn counts, and no text between turns.
    """
    lengths = torch.tensor([longest_turn(trajectory.loss_mask) for trajectory in trajectories], dtype=torch.int32)
    return _overlong_penalty(lengths.view(-1, responses), max_length=max_length, buffer=buffer)


def longest_turn(loss_mask: Sequence[bool]) -> int:
    """Tokens of the longest turn: of those that the policy drew without a break.

    >>> longest_turn([False, True, True, False, True])
    2
    """
    return max((len(list(run)) for drawn, run in groupby(loss_mask) if drawn), default=0)
