"""What is compared with each other: the completions of one prompt, and no others."""

from dataclasses import replace

import pytest
import torch

from rl_bridge import Groups
from rl_bridge.algorithms.completions import rewarded
from rl_bridge.data.trajectory import SamplingParams, single_turn
from rl_bridge.rewards import load


def reward(completion, row):
    return 0.0


def of_groups(*numbers):
    """A trajectory of each number, whose reward is its place."""
    return [
        single_turn([2], [1], rewards={"reward": float(place)}, group=number) for place, number in enumerate(numbers)
    ]


@pytest.mark.parametrize(("numbers", "n"), [((0, 0, 1, 1), 2), ((7, 7, 7), 3), ((2, 1, 0), 1), ((), 4)])
def test_completions_of_one_number_are_a_group(numbers, n):
    sampled = rewarded(of_groups(*numbers), load(reward), n, max_new_tokens=9)
    assert torch.equal(sampled.rewards, torch.arange(len(numbers)).float().view(-1, n))


MIXED = {
    "two prompts in a group": ((0, 0, 1, 1), 4, 0, 2),
    "a prompt in two groups": ((0, 0, 0, 0), 2, 0, 4),
    "across a boundary": ((0, 0, 0, 1), 2, 0, 3),
    "prompt by prompt no more": ((0, 1, 0, 1), 2, 0, 1),
    "the last one": ((0, 0, 1, 1, 2, 3), 2, 2, 1),
    "one too few": ((0, 0, 0, 1, 1), 3, 1, 2),
}


@pytest.mark.parametrize("case", MIXED)
def test_no_caller_can_compare_the_completions_of_several_prompts(case):
    """A ledger of groups of 4 was trained on in groups of 8: two prompts in one, without a word."""
    numbers, n, group, count = MIXED[case]
    message = f"a group has n={n} completions of one prompt, and group {group} has {count}: "
    with pytest.raises(ValueError, match=message):
        rewarded(of_groups(*numbers), load(reward), n, max_new_tokens=9)
    sampling = SamplingParams(n=n, max_new_tokens=9)
    groups = Groups(trajectories=of_groups(*numbers), sampling=sampling, pad_token=0)
    with pytest.raises(ValueError, match=message):
        groups.score(reward)


def test_groups_that_were_chosen_are_numbered_anew():
    whole = rewarded(of_groups(0, 0, 1, 1, 2, 2), load(reward), 2, max_new_tokens=9)
    part = whole.rows(torch.tensor([2, 0]))
    again = rewarded(part.trajectories, load(reward), 2, max_new_tokens=9)
    assert torch.equal(again.rewards, part.rewards) and [t.group for t in part.trajectories] == [0, 0, 1, 1]
    with pytest.raises(ValueError, match="group 2 has 1"):
        rewarded([*part.trajectories, replace(part.trajectories[0], group=2)], load(reward), 2, max_new_tokens=9)
