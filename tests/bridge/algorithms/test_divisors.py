"""What a number of a step is divided by, and which rows and tokens it is of: the same for every way to lay rows out."""

import dataclasses
from typing import Any

import pytest
import torch

import rl_fn
from rl_bridge import NLL, AdamW, Groups, Model, Policy, SamplingParams
from rl_bridge.algorithms.advantages import Advantages
from rl_bridge.algorithms.completions import Sampled
from rl_bridge.data.token_batch import collate
from rl_bridge.data.trajectory import Trajectory, single_turn
from rl_bridge.models.model_source import StateSource

# Prompts and completions of different lengths, also where the prompt is longer than all completions together.
ROWS = [single_turn([2, 3, 4, 5, 6, 7, 8, 9], [4, 1]), single_turn([6], [7, 8, 9, 2, 3, 1]), single_turn([5, 5], [1])]


def test_a_supervised_gradient_is_of_the_mean_over_the_completions_tokens(new_model, tokenizer):
    """SURV-2, MUS L8: neither prompts nor padding nor rows are counted; Adam and the clip would hide the scale."""
    model = new_model()
    with Policy(Model(StateSource(model), tokenizer), NLL(), AdamW(0.1, warmup=0), rehearsed=True) as policy:
        metrics = policy.update(collate(ROWS, 0))

    total, tokens = torch.zeros(()), 0
    for row in ROWS:
        ids, drawn = torch.tensor([row.tokens]), sum(row.loss_mask)
        labels = torch.where(torch.tensor([row.loss_mask]), ids, -100)
        total, tokens = total + model(input_ids=ids, labels=labels).loss * drawn, tokens + drawn
    (total / tokens).backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert metrics["nll"] == pytest.approx(float(total.detach()) / tokens, rel=1e-5)


def conversation(turns: int, given: int, **fields: Any) -> Trajectory:
    """So many turns of as many drawn tokens each, with ``given`` tokens of a tool after each but the last."""
    mask = [False] + ([True] * turns + [False] * given) * (turns - 1) + [True] * turns
    return Trajectory(
        tokens=tuple(range(2, 2 + len(mask))),
        loss_mask=tuple(mask),
        logprobs=(-0.5,) * len(mask),
        weights_versions=tuple(0 if drawn else -1 for drawn in mask),
        finish_reason="stop",
        turns=turns,
        **fields,
    )


def sampled(trajectories, **options) -> Sampled:
    """Two groups of three with rewards by their lengths, as those of a rollout whose greedy completion is the first."""
    drawn = [dataclasses.replace(t, group=i // 3) for i, t in enumerate(trajectories)]
    sampling = SamplingParams(n=3, max_new_tokens=8)
    groups = Groups(trajectories=drawn, sampling=sampling, pad_token=0)
    once = dataclasses.replace(sampling, n=1, temperature=0.0)
    greedy = Groups(trajectories=drawn[::3], sampling=once, pad_token=0)
    return groups.score(lengths, greedy=greedy, **options).scored


def lengths(trajectories: list[Trajectory]) -> list[float]:
    return [float(len(t.tokens)) for t in trajectories]


@pytest.mark.parametrize("recipe", ["gigpo", "grpo", "rloo", "dapo", "reinforce_pp"])
def test_every_row_whose_advantage_is_not_0_is_computed(recipe):
    """SURV-1: also an episode that is shorter than the longest, whose later turns there are not."""
    objective = getattr(rl_fn.recipes, recipe)().replace(kl=None, reward_kl=None)
    trajectories = [conversation(turns, 1, turn_rewards=(0.5,) * turns) for turns in (1, 3, 2, 2, 1, 3)]
    rewards = torch.tensor([[1.0, 2.0, 4.0], [3.0, 3.0, 3.5]])
    whole = Sampled(
        trajectories=trajectories, names=("one",), matrix=rewards[:, None], earned=rewards, rewards=rewards,
        greedy_rewards=None, applies=torch.ones(2, 1, rewards.shape[1], dtype=torch.bool), sampled_groups=2,
    )  # fmt: skip
    batch, computed, counted = Advantages(objective).advantages(collate(trajectories, 0), whole, {})
    signal = (batch.advantages != 0) & batch.mask
    assert torch.equal(computed, computed | signal.any(1)) and signal.any(1).sum() >= 5
    assert torch.equal(counted, batch.mask)


@pytest.mark.parametrize("options", [{}, {"overlong_buffer": 4}, {"overlong_buffer": 8}])
def test_a_completion_that_is_the_greedy_one_has_remax_s_advantage_0(options):
    """SURV-4: the baseline is what the same completion earns, the penalty of long ones with it."""
    rows = [single_turn([3], [4] * length) for length in (2, 6, 8, 8, 3, 1)]
    found = sampled(rows, **options)
    torch.testing.assert_close(found.greedy_rewards, found.rewards[:, 0])
    assert len(set(found.rewards.flatten().tolist())) > 2


@pytest.mark.parametrize("given", [2, 8])
def test_what_a_tool_says_is_nobody_s_length(given):
    """MUS L12: lengths, penalties and divisors are of drawn tokens, however long a tool's answer is."""
    options, short = {"overlong_buffer": 6}, [conversation(turns, 1) for turns in (1, 2, 3, 2, 1, 3)]
    long = [conversation(t.turns, given) for t in short]
    before, after = (sampled(t, **options) for t in (short, long))
    assert before.metrics()["tokens"] == after.metrics()["tokens"] == pytest.approx(28 / 6)
    penalties = [x.rewards - x.earned for x in (before, after)]
    torch.testing.assert_close(*penalties, rtol=0, atol=1e-5)
    assert penalties[0].max() > -0.01 and penalties[0].min() < -0.1
    assert collate(short, 0).mask.sum() == collate(long, 0).mask.sum()
    for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
        masks = [collate(t, 0).mask.numpy() for t in (short, long)]
        one, other = (float(rl_fn.aggregate(mask.astype("float32"), mask, mode=mode)) for mask in masks)
        assert one == pytest.approx(other)
