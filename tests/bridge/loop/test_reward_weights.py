"""Weights of several rewards count where an objective reads each reward by itself, in loops and on the command line."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import rl_bridge
import rl_fn
from rl_bridge.algorithms.advantages import with_reward_weights
from rl_bridge.algorithms.policy_setup import ScalarOptions
from rl_bridge.data.trajectory import single_turn
from rl_bridge.pipelines.objective_options import objective_options
from rl_fn import components
from rl_train.policy_configs import quickstart

RIGHT, STYLE = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0]], [[0.2, 0.9, 0.3, 0.1], [0.5, 0.1, 0.0, 0.4]]
LENGTHS = [1, 4, 2, 3] * 2
GDPO = rl_fn.recipes.gdpo()


def groups_of(weights=(), *, scalar=None, buffer=None):
    """Two groups of four completions, each with both rewards; number 1 of a group has all 4 tokens."""
    drawn = [
        replace(
            single_turn(
                [5],
                [6] * length,
                logprobs=[-0.5] * length,
                group=number // 4,
                messages=({"role": "user", "content": "x"}, {"role": "assistant", "content": str(number)}),
            ),
            row={"prompt": "x"},
        )
        for number, length in enumerate(LENGTHS)
    ]
    sampling = rl_bridge.SamplingParams(n=4, max_new_tokens=4)
    groups = rl_bridge.Groups(trajectories=drawn, sampling=sampling, pad_token=0)

    def right(completion, row):
        return RIGHT[int(completion) // 4][int(completion) % 4]

    def style(completion, row):
        return STYLE[int(completion) // 4][int(completion) % 4]

    return groups.score([right, style], weights, scalar=scalar, overlong_buffer=buffer)


def by_hand(weights, *more):
    """S = Σ w r̂ of both rewards and ``more``, whitened over the batch."""
    rewards = torch.tensor([RIGHT, STYLE, *more])
    centred = rewards - rewards.mean(-1, keepdim=True)
    each = centred / (centred.square().sum(-1, keepdim=True) / 3).sqrt().clamp(min=1e-9)
    total = (torch.tensor(weights).view(-1, 1, 1) * each).sum(0)
    return ((total - total.mean()) / total.std()).flatten()


def advantages_of(groups, objective=GDPO):
    batch = groups.batch().with_advantages(objective)
    assert batch.objective == objective, "the policy has this one"
    return torch.stack([row[mask][0] for row, mask in zip(batch.tokens.advantages, batch.tokens.mask, strict=True)])


@pytest.mark.parametrize("weights", [(1.0, 0.1), (1.0, 0.0), (0.0, 2.0), (1.0, -0.5), (1.0, 1.0), ()], ids=str)
@pytest.mark.parametrize("place", ["weights", "scalar", "objective", "both"])
def test_weights_count_behind_the_normalisation_wherever_they_stand(weights, place):
    """A reward of weight 0 has no part in the advantages."""
    scalar = ScalarOptions(weights=weights or None) if place == "scalar" else None
    groups = groups_of(weights if place in ("weights", "both") else (), scalar=scalar)
    objective = rl_fn.recipes.gdpo(weights=weights or None) if place in ("objective", "both") else GDPO
    found = advantages_of(groups, objective)
    torch.testing.assert_close(found, by_hand(weights or (1.0, 1.0)), rtol=1e-3, atol=1e-3)


def test_an_overlong_penalty_is_one_more_reward_of_weight_one():
    penalty = [[0.0, -1.0, 0.0, -0.5]] * 2
    found = advantages_of(groups_of((1.0, 0.1), buffer=2))
    torch.testing.assert_close(found, by_hand((1.0, 0.1, 1.0), penalty), rtol=1e-3, atol=1e-3)
    small = rl_fn.recipes.gdpo(weights=(1.0, 0.1, 0.2))
    for weights in ((1.0, 0.1), ()):
        found = advantages_of(groups_of(weights, buffer=2), small)
        torch.testing.assert_close(found, by_hand((1.0, 0.1, 0.2), penalty), rtol=1e-3, atol=1e-3)


@dataclass(frozen=True)
class Unweighted(components.Advantage):
    """The sum of all rewards, each as it is."""

    rewards_shape = "*batch R G"
    takes_valid = True
    equation = "Σ r"

    def per_token_advantages(self, rollouts):
        return rollouts.rewards.sum(-2)[..., None] * rollouts.mask.astype("float32")


def test_weights_that_would_have_no_effect_are_refused():
    with pytest.raises(ValueError, match=r"gdpo has the weights \(1\.0, 2\.0\), and the rewards have \(1\.0, 0\.1\)"):
        advantages_of(groups_of((1.0, 0.1)), rl_fn.recipes.gdpo(weights=(1.0, 2.0)))
    own = GDPO.replace(advantage=Unweighted())
    with pytest.raises(ValueError, match=r"no weights: the rewards' \(1\.0, 0\.1\) would have no effect"):
        advantages_of(groups_of((1.0, 0.1)), own)
    expected = torch.tensor([RIGHT, STYLE]).sum(0).flatten()
    torch.testing.assert_close(advantages_of(groups_of(), own), expected)
    one_number = ScalarOptions(method="tchebycheff", ideal=(1.0, 1.0))
    with pytest.raises(ValueError, match="tchebycheff makes one number of all: take weighted_sum"):
        advantages_of(groups_of(scalar=one_number))
    grpo = rl_fn.recipes.grpo().replace(kl=None)
    assert advantages_of(groups_of((1.0, 0.1)), grpo).any(), "an objective of one number has it with the weights"


def test_the_command_weighs_and_refuses_in_the_same_way():
    start = replace(quickstart(), objective=objective_options("gdpo"), reward=("exact", "short=exact"))

    def weights(**changes):
        return replace(start, **changes).objective_and_control()[0].advantage.weights

    policy = start.policy
    assert weights() is None and weights(reward_weights=(1.0, 1.0)) is None
    assert weights(reward_weights=(1.0, 0.1)) == (1.0, 0.1)
    assert weights(policy=replace(policy, scalar=ScalarOptions(weights=(0.0, 2.0)))) == (0.0, 2.0)
    buffered = replace(policy, overlong_buffer=1)
    assert weights(reward_weights=(1.0, 0.1), policy=buffered) == (1.0, 0.1, 1.0)
    own = objective_options("gdpo", weights=(1.0, 2.0))
    assert weights(objective=own) == (1.0, 2.0) == weights(objective=own, reward_weights=(1.0, 2.0))
    with pytest.raises(
        ValueError, match=r"give them once, with the objective .*--objective\.weights.*--reward-weights"
    ):
        weights(objective=own, reward_weights=(1.0, 0.1))
    with pytest.raises(ValueError, match=r"--policy\.scalar\.method weighted_sum"):
        weights(policy=replace(policy, scalar=ScalarOptions(method="tchebycheff", ideal=(1.0, 1.0))))


MAXRL = rl_fn.recipes.maxrl()


def of_one_prompt(rewards):
    """A completion of each reward, of one prompt."""

    def reward(completion, row):
        return rewards[int(completion)]

    drawn = [
        replace(
            single_turn([5], [6], logprobs=[-0.5], messages=({"role": "assistant", "content": str(number)},)),
            row={"prompt": "x", "_where": "rows.jsonl, row 7"},
        )
        for number in range(len(rewards))
    ]
    sampling = rl_bridge.SamplingParams(n=len(rewards), max_new_tokens=4)
    return rl_bridge.Groups(trajectories=drawn, sampling=sampling, pad_token=0).score(reward)


@pytest.mark.parametrize("rewards", [(1.0, -1.0, -1.0, -1.0), (0.0, -1.0, 2.0), (-1e-3, 1.0)], ids=str)
def test_maxrl_refuses_negative_rewards_with_their_row(rewards):
    """(1, −1, −1, −1) has the advantages (−3, 1, 1, 1): what failed would be learned."""
    lowest = next(reward for reward in rewards if reward < 0)
    with pytest.raises(ValueError, match=rf"maxrl .*rows\.jsonl, row 7 has the reward {lowest:g} .*recipes\.rloo"):
        advantages_of(of_one_prompt(rewards), MAXRL)
    assert advantages_of(of_one_prompt(rewards), rl_fn.recipes.rloo()).any(), "another objective takes them"


def test_maxrl_takes_rewards_that_are_not_negative():
    found = advantages_of(of_one_prompt((1.0, 0.0, 0.0, 0.0)), MAXRL)
    torch.testing.assert_close(found, torch.tensor([3.0, -1.0, -1.0, -1.0]))


def test_maxrl_refuses_an_overlong_penalty_in_the_loop_and_in_the_command():
    message = r"maxrl divides by the mean reward .*overlong_buffer \(--policy\.overlong-buffer\)"
    with pytest.raises(ValueError, match=message):
        advantages_of(groups_of(buffer=2), MAXRL)
    start = replace(quickstart(), objective=objective_options("maxrl"))
    assert start.objective_and_control()[0].name == "maxrl"
    with pytest.raises(ValueError, match=message):
        replace(start, policy=replace(start.policy, overlong_buffer=1)).objective_and_control()


def test_maxrl_refuses_tchebycheff_whose_numbers_are_negative_in_the_loop_and_in_the_command():
    """The command made all models, and then named the number of a completion whose rewards were all right."""
    one_number, message = ScalarOptions(method="tchebycheff", ideal=(1.0, 1.0)), "maxrl divides.*take weighted_sum"
    with pytest.raises(ValueError, match=message):
        advantages_of(groups_of(scalar=one_number), MAXRL)
    start = replace(quickstart(), objective=objective_options("maxrl"), reward=("exact", "short=exact"))
    with pytest.raises(ValueError, match=message):
        replace(start, policy=replace(start.policy, scalar=one_number)).objective_and_control()


NOTHING = r"every reward has weight 0, and \w+ has nothing to train on: got weights \(0\.0, -?0\.0\)"
ZERO, CHEBYSHEV = (0.0, -0.0), {"method": "tchebycheff", "ideal": (1.0, 1.0)}
IN_THE_LOOP = {
    "weights": lambda objective: (groups_of(ZERO), objective),
    "an array": lambda objective: (groups_of(torch.zeros(2)), objective),
    "scalar": lambda objective: (groups_of(scalar=ScalarOptions(weights=ZERO)), objective),
    "objective": lambda objective: (groups_of(), rl_fn.recipes.gdpo(weights=ZERO)),
}
IN_THE_COMMAND = {
    "weights": lambda start: replace(start, reward_weights=ZERO),
    "scalar": lambda start: replace(start, policy=replace(start.policy, scalar=ScalarOptions(weights=ZERO))),
    "objective": lambda start: replace(start, objective=objective_options("gdpo", weights=ZERO)),
}


@pytest.mark.parametrize("name", ["grpo", "gdpo", "rloo"])
def test_rewards_that_all_have_weight_0_train_nothing(name):
    """By every way that weights take."""
    for way in IN_THE_LOOP.values():
        groups, objective = way(getattr(rl_fn.recipes, name)())
        with pytest.raises(ValueError, match=NOTHING):
            groups.batch().with_advantages(objective)
    start = replace(quickstart(), objective=objective_options(name), reward=("exact", "short=exact"))
    for way in IN_THE_COMMAND.values():
        with pytest.raises(ValueError, match=NOTHING):
            way(start).objective_and_control()


def test_rewards_of_weight_0_are_measured_and_stand_beside_what_counts():
    """A penalty, tchebycheff's sum, and a teacher are to train on; held-out rows are measured alone."""
    assert groups_of(ZERO).metrics()["reward"] == 0
    grpo = rl_fn.recipes.grpo()
    assert advantages_of(groups_of(ZERO, buffer=2), grpo).any()
    for scalar, weights in ((ScalarOptions(**CHEBYSHEV), ZERO), (ScalarOptions(**CHEBYSHEV, weights=ZERO), ())):
        assert advantages_of(groups_of(weights, scalar=scalar), grpo).any()
    teacher = rl_fn.recipes.on_policy_distillation()
    assert with_reward_weights(teacher, ZERO, penalised=False) == teacher
    toward_another = rl_fn.recipes.grpo().replace(kl=None, reward_kl=rl_fn.components.KL("k1", coef=1.0))
    assert with_reward_weights(toward_another, ZERO, penalised=False) == toward_another
    policy = replace(quickstart().policy, overlong_buffer=1)
    assert replace(quickstart(), reward_weights=(0.0,), policy=policy).objective_and_control()[0].name == "dapo"


@pytest.mark.parametrize("array", [np.array, torch.tensor, list], ids=["numpy", "torch", "list"])
def test_the_numbers_of_several_rewards_may_be_an_array(array):
    scalar = ScalarOptions(method="tchebycheff", ideal=array([1.0, 2.0]), weights=array([0.5, 0.25]))
    assert scalar == ScalarOptions(method="tchebycheff", ideal=(1.0, 2.0), weights=(0.5, 0.25))


@pytest.mark.parametrize("weights", [(0.0, 1.0), (1.0, 0.0), (0.0, -1.0)])
def test_a_reward_of_weight_0_beside_another_is_a_metric(weights):
    groups = groups_of(weights)
    counting = RIGHT if weights[0] else STYLE
    assert groups.rewards == pytest.approx(torch.tensor(counting) * (weights[0] or weights[1]))
    assert ScalarOptions(weights=weights).weights == weights
    assert ScalarOptions(method="tchebycheff", weights=(0.0, 0.0), ideal=(1.0, 1.0)).weights == (0.0, 0.0)
