"""A loop whose groups run ahead of training, taken up with other settings than its checkpoint was made with."""

from collections import Counter
from dataclasses import replace

import pytest

import rl_fn
from rl_bridge import AdamW, Ahead, Policy, Rollout, Rows, Run, SamplingParams

GRPO = rl_fn.recipes.grpo().replace(kl=None)
PROMPTS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]
SAMPLING = SamplingParams(n=4, max_new_tokens=6, seed=1)
OPTIONS = {"prompts": 2, "max_staleness": 3, "deterministic": False, "partial": True}
STEPS = 6


def reward(completion, row):
    return completion.count("1") - len(completion)


def loop(model, folder, *, until=STEPS, sampling=SAMPLING, resume=False, anyway=False, **options):
    """The groups of each step up to ``until``."""
    rollout, policy, drawn = Rollout(model), Policy(model, GRPO, AdamW(1e-2)), []
    ahead = Ahead(rollout, policy, Rows(PROMPTS), reward, sampling, steps=STEPS, **OPTIONS | options)
    again = {"resume": resume, "resume_anyway": anyway}
    with rollout, policy, ahead, Run("ahead", [policy, ahead], output=folder, checkpoint_every=1, **again) as run:
        for _ in run.steps(until):
            groups = ahead.groups()
            batch = policy.score(groups.batch()).with_advantages(GRPO)
            run.log(policy.update(batch), groups)
            drawn.append(groups)
    return drawn


CHANGES = {
    "n up": ({"sampling": replace(SAMPLING, n=8)}, "sampling.n was 4 and is 8"),
    "n down": ({"sampling": replace(SAMPLING, n=2)}, "sampling.n was 4 and is 2"),
    "fewer tokens": ({"sampling": replace(SAMPLING, max_new_tokens=3)}, "sampling.max_new_tokens was 6 and is 3"),
    "more prompts": ({"prompts": 3}, "prompts_per_step was 2 and is 3"),
    "a smaller bound": ({"max_staleness": 1}, "max_staleness was 3 and is 1"),
}


@pytest.mark.long
@pytest.mark.parametrize("change", CHANGES)
def test_groups_ahead_of_a_checkpoint_are_drawn_again_with_the_new_settings(model, tmp_path, capsys, change):
    """Prompts were compared with each other: the groups of the checkpoint were cut anew, without a word."""
    options, line = CHANGES[change]
    before = loop(model, tmp_path, until=3)
    with pytest.raises(ValueError, match="was made with other options"):
        loop(model, tmp_path, resume=True, **options)
    capsys.readouterr()
    after = loop(model, tmp_path, anyway=True, **options)
    assert f"prompts that were ahead of step 3 are drawn again: {line}\n" in capsys.readouterr().out
    assert len(after) == STEPS - 3
    sampling, count = options.get("sampling", SAMPLING), options.get("prompts", 2)
    for groups in after:
        assert groups.rewards.shape == (count, sampling.n)
        for place in range(count):
            group = groups.trajectories[place * sampling.n : (place + 1) * sampling.n]
            assert len({t.row["prompt"] for t in group}) == 1 and {t.group for t in group} == {place}
        assert all(len(t.sampled_tokens) <= sampling.max_new_tokens for t in groups.trajectories)
        assert groups.sampled.ahead["staleness_max"] <= options.get("max_staleness", 3)
    rows = Counter(t.row["prompt"] for g in [*before, *after] for t in g.trajectories[:: g.rewards.shape[1]])
    times = [rows[row["prompt"]] for row in PROMPTS]
    assert max(times) - min(times) <= 1


PAYS = """
from rl_bridge.environments import Step

class Pays:
    def reset(self, row):
        return [{"role": "user", "content": row["prompt"]}]

    def step(self, messages):
        return Step(messages=[{"role": "user", "content": "1+"}], reward=AMOUNT)
"""


@pytest.mark.long
def test_another_environment_is_refused_and_resumed_anyway_holds_its_conversations_again(model, tmp_path, capsys):
    file, options = tmp_path / "pays.py", {"environment": f"{tmp_path / 'pays.py'}:Pays", "max_turns": 2}
    paid = {}
    for amount in (1.0, 2.0):
        file.write_text(PAYS.replace("AMOUNT", str(amount)))
        if amount == 2.0:
            with pytest.raises(ValueError, match="environment"):
                loop(model, tmp_path, resume=True, **options)
        capsys.readouterr()
        groups = loop(model, tmp_path, until=3 if amount == 1.0 else STEPS, anyway=amount == 2.0, **options)
        paid[amount] = {reward for step in groups for t in step.trajectories for reward in t.turn_rewards if reward}
    assert "prompts that were ahead of step 3 are drawn again: environment was Pays:" in capsys.readouterr().out
    assert paid == {1.0: {1.0}, 2.0: {2.0}}


@pytest.mark.parametrize(
    "option", ["tokens_beside (--asynchronous.tokens-beside N)", "(--asynchronous.no-deterministic)"]
)
def test_partial_rollouts_alone_name_what_they_need(model, option):
    rollout, policy = Rollout(model), Policy(model, GRPO, AdamW(1e-2))
    with rollout, policy, pytest.raises(ValueError) as refused:
        Ahead(rollout, policy, Rows(PROMPTS), reward, SAMPLING, prompts=2, steps=1, partial=True)
    assert option in str(refused.value)


def test_a_penalty_that_the_advantage_does_not_take_is_refused_before_anything_is_drawn(model):
    rollout, policy = Rollout(model), Policy(model, rl_fn.recipes.maxrl(), AdamW(1e-2))
    with rollout, policy, pytest.raises(ValueError, match=r"maxrl divides by the mean reward.*overlong_buffer"):
        Ahead(rollout, policy, Rows(PROMPTS), reward, SAMPLING, prompts=2, steps=1, overlong_buffer=1)
