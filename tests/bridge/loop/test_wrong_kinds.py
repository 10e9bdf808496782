"""An object of another kind than an argument's is refused by the argument's name, with what was expected."""

import re

import numpy as np
import pytest

import rl_fn
from rl_bridge import (
    NLL,
    AdamW,
    Critic,
    Groups,
    Policy,
    Reference,
    RewardModel,
    Rollout,
    SamplingParams,
    Teacher,
    load_rows,
    preference_loss,
    tiny_model,
)
from rl_bridge.data.census import Census
from rl_bridge.pipelines.training import split
from rl_train.sft import SFTPipeline

GRPO, PPO = rl_fn.recipes.grpo().replace(kl=None), rl_fn.recipes.ppo()
PROMPTS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]
SAMPLING = SamplingParams(n=2, max_new_tokens=3, seed=1)
STRANGE = {
    "text": "tiny",
    "number": 8,
    "None": None,
    "recipe": rl_fn.recipes.grpo,
    "class": AdamW,
    "dictionary": {"n": 2},
    "list": [{"prompt": "1"}],
}
"""Objects that are given in the place of another one; none of them is a model, an objective, a batch or a target."""
RATE = AdamW(1e-3)
MADE = {
    "model of a policy": ("model", lambda model, x: Policy(x, GRPO, RATE)),
    "objective of a policy": ("objective", lambda model, x: Policy(model, x, RATE)),
    "optimizer of a policy": ("optimizer", lambda model, x: Policy(model, GRPO, x)),
    "model of a reference": ("model", lambda model, x: Reference(x)),
    "model of a teacher": ("model", lambda model, x: Teacher(x, model)),
    "student of a teacher": ("student", lambda model, x: Teacher(model, x)),
    "model of a rollout": ("model", lambda model, x: Rollout(x)),
    "model of a critic": ("model", lambda model, x: Critic(x, PPO, RATE)),
    "objective of a critic": ("objective", lambda model, x: Critic(model, x, RATE)),
    "optimizer of a critic": ("optimizer", lambda model, x: Critic(model, PPO, x)),
    "model of a reward model": ("model", lambda model, x: RewardModel(x, preference_loss("bradley_terry"), RATE)),
    "loss of a reward model": ("loss", lambda model, x: RewardModel(model, x, RATE)),
    "optimizer of a reward model": (
        "optimizer",
        lambda model, x: RewardModel(model, preference_loss("bradley_terry"), x),
    ),
}


@pytest.mark.parametrize("strange", STRANGE)
@pytest.mark.parametrize("place", MADE)
def test_what_a_model_is_made_of(model, place, strange):
    name, make = MADE[place]
    with pytest.raises(TypeError, match=rf"^{name} is .*, got {type(STRANGE[strange]).__name__} "):
        make(model, STRANGE[strange])


@pytest.fixture(scope="module")
def rollout(model):
    with Rollout(model) as rollout:
        yield rollout


@pytest.fixture(scope="module")
def groups(rollout):
    return rollout.generate(PROMPTS[:2], SAMPLING).score(lambda completion, row: len(completion))


@pytest.fixture(scope="module")
def policy(model):
    with Policy(model, GRPO, AdamW(1e-3)) as policy:
        yield policy


@pytest.fixture(scope="module")
def critic(model):
    with Critic(model, PPO, AdamW(1e-3)) as critic:
        yield critic


@pytest.fixture(scope="module")
def judge(model):
    with RewardModel(model, preference_loss("bradley_terry"), AdamW(1e-3)) as judge:
        yield judge


CALLED = {
    "generate": ("sampling is", lambda x, rollout, **_: rollout.generate(PROMPTS[:1], x)),
    "converse": ("sampling is", lambda x, rollout, **_: rollout.converse(PROMPTS[:1], x, tools=[len])),
    "sync_weights": ("target is", lambda x, policy, **_: policy.sync_weights(x)),
    "policy.update": ("does not learn from", lambda x, policy, **_: policy.update(x)),
    "policy.score": ("a model scores a batch of groups", lambda x, policy, **_: policy.score(x)),
    "critic.score": ("a model scores a batch of groups", lambda x, critic, **_: critic.score(x)),
    "critic.update": ("a model scores a batch of groups", lambda x, critic, **_: critic.update(x)),
    "judge.update": ("batch is comparisons", lambda x, judge, **_: judge.update(x)),
    "greedy": ("greedy is Groups(…), got ", lambda x, groups, **_: groups.score(len, greedy=x)),
    "with_advantages": ("advantages are of an objective", lambda x, groups, **_: groups.batch().with_advantages(x)),
}


@pytest.mark.parametrize("strange", STRANGE)
@pytest.mark.parametrize("call", CALLED)
def test_what_a_call_takes(call, strange, rollout, groups, policy, critic, judge):
    words, make = CALLED[call]
    objects = {"rollout": rollout, "groups": groups, "policy": policy, "critic": critic, "judge": judge}
    if call == "greedy" and STRANGE[strange] is None:
        assert groups.score(lambda completion, row: 1.0, greedy=None).rewards.tolist() == [[1.0, 1.0]] * 2
    else:
        with pytest.raises(TypeError, match=re.escape(words)):
            make(STRANGE[strange], **objects)


def test_a_batch_of_another_kind_than_the_objective_learns_from(model, groups, policy):
    """Each kind of batch with each kind of objective but its own."""
    rows = load_rows([{"prompt": "1+1=", "chosen": "2", "rejected": "3"}] * 2, model, preference_loss("simpo"))
    pairs = rows.batch(2)
    with pytest.raises(TypeError, match="does not learn from a PairBatch"):
        policy.update(pairs)
    with Policy(model, preference_loss("simpo"), AdamW(1e-3)) as comparing:
        for batch in (groups.batch(), groups.batch().tokens):
            with pytest.raises(TypeError, match="does not learn from a"):
                comparing.update(batch)
        comparing.update(pairs)


@pytest.mark.parametrize("option", ["learning_rate", "warmup", "initial", "final", "beta1", "weight_decay", "total"])
@pytest.mark.parametrize("value", ["1e-3", True, [0.1], 0.5], ids=str)
def test_numbers_of_an_optimiser(option, value):
    options = {"learning_rate": 1e-3, "total": 9, option: value}
    if value == 0.5 and option not in ("warmup", "total"):
        assert getattr(AdamW(**options), option) == value
    else:
        with pytest.raises(TypeError, match=rf"{option} is a .*number, got {re.escape(repr(value))}"):
            AdamW(**options)


def test_numbers_of_numpy_are_numbers(groups, policy):
    assert AdamW(np.float32(1e-3), warmup=np.int64(3), total=np.int64(9)).scale(3, 9) == 1.0
    assert len(load_rows(PROMPTS).take(np.int64(3))) == 3
    assert policy.score(groups.batch().with_advantages(GRPO), updates=np.int64(2)).rescored


@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo"])
def test_a_constant_of_a_loss_that_is_text(name):
    with pytest.raises(TypeError, match=r"(?s)beta.*'x'"):
        preference_loss(name, beta="x")


def test_patterns_to_freeze_are_several(model):
    with pytest.raises(TypeError, match=r"freeze=\('model\.\*',\)"):
        Policy(model, GRPO, RATE, freeze="model.*")


def test_a_new_model_without_rows():
    with pytest.raises(ValueError, match="there are no rows"):
        tiny_model([])


def test_completions_that_are_joined_twice(groups):
    first, second = groups.select([0]), groups.select([1])
    assert len(Groups.joined([first, second]).trajectories) == len(groups.trajectories)
    for parts in ([groups, groups], [first, groups], [second, first, second]):
        with pytest.raises(ValueError, match=r"[24] completions stand in two of the joined groups"):
            Groups.joined(parts)


def test_more_held_out_than_there_are_in_a_loop_and_in_a_command():
    with pytest.raises(ValueError, match=r"at most 7 can be held out$"):
        load_rows(PROMPTS).hold_out(8)
    with pytest.raises(ValueError, match="at most 7 can be held out: give a smaller"):
        split(SFTPipeline(held_out=8), PROMPTS, Census())


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_no_generator_takes_is_named(seed):
    with pytest.raises(ValueError, match=f"seed must be from 0 to .*, got {seed}"):
        SFTPipeline(seed=seed)


def test_an_objective_of_rows_learns_from_no_groups(model, groups):
    with Policy(model, NLL(), AdamW(1e-3)) as imitator, pytest.raises(TypeError, match="imitates rows"):
        imitator.update(groups.batch())


@pytest.mark.parametrize("kind", [list, tuple])
def test_rows_to_imitate_are_a_list_or_a_tuple(model, kind):
    """The numbers are those of the batch that ``load_rows`` makes of them, and of each other kind."""
    rows = load_rows(PROMPTS).take(4)
    with Policy(model, NLL(), AdamW(1e-3)) as first, Policy(model, NLL(), AdamW(1e-3)) as second:
        assert first.update(kind(rows))["nll"] == second.update(rows)["nll"]


def test_rows_that_were_not_taken_are_refused_with_the_way_on(model, rollout):
    rows = load_rows(PROMPTS)
    with Policy(model, NLL(), AdamW(1e-3)) as imitator:
        for call in (
            lambda: rollout.generate(rows, SAMPLING),
            lambda: rollout.converse(rows, SAMPLING, tools=[len]),
            lambda: imitator.update(rows),
        ):
            with pytest.raises(TypeError, match=r"rows\.take\(n\)$"):
                call()


def test_the_way_on_stands_behind_the_objective_s_name_alone(model, groups, policy):
    with pytest.raises(TypeError, match=r"^grpo does not learn from a Groups: groups\.batch\(\) makes a batch, once "):
        policy.update(groups)
    with pytest.raises(TypeError, match=r"^grpo is not measured on a Groups; groups have held_out\(\)$"):
        policy.held_out(groups)
    with Policy(model, preference_loss("simpo"), AdamW(1e-3)) as comparing:
        with pytest.raises(TypeError, match=r"^simpo does not learn from a Groups: "):
            comparing.update(groups)
        with pytest.raises(TypeError, match=r"^simpo is not measured on a Groups$"):
            comparing.held_out(groups)
