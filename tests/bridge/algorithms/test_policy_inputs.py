"""What an objective is fed: each input is that of its definition, and of the weights before the update."""

import dataclasses
import itertools
from collections import defaultdict
from contextlib import ExitStack
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch

import rl_fn
from rl_bridge import AdamW, Critic, Model, Policy, Reference, Rollout, Teacher
from rl_bridge.algorithms.advantages import Advantages, steps_of
from rl_bridge.algorithms.completions import Sampled, reward_matrix, rewarded
from rl_bridge.algorithms.policy_setup import PolicyConfig, ScalarOptions
from rl_bridge.data.rows import RowStream
from rl_bridge.data.token_batch import collate
from rl_bridge.data.trajectory import SamplingParams, Trajectory, single_turn
from rl_bridge.engines import NeedParallel
from rl_bridge.functional import from_jax, trace
from rl_bridge.loop import values
from rl_bridge.models.model_source import StateSource, ValueSource
from rl_bridge.models.small import tiny_qwen2
from rl_bridge.modules.scoring import ScoringConfig
from rl_bridge.rewards import load
from rl_fn import components
from rl_train.policy import Models, draw
from rl_train.policy_inputs import PolicyInputs
from rl_train.policy_options import PolicyPipeline
from tests.support.tracing import module_of

ROWS = [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(6)]
SCORING = ScoringConfig(temperature=0.7)
FAST = AdamW(0.05, warmup=0, total=8)
COUNTS = {"steps": 2, "prompts_per_step": 3, "updates_per_step": 2}


def digits(trajectories):
    return [sum(c in "02468" for c in t.completion) - 0.3 * len(t.completion) for t in trajectories]


@pytest.fixture
def world(tokenizer, monkeypatch):
    """The recipe's objects over one model, and a teacher and a reference with weights of their own."""
    model, other = (tiny_qwen2(tokenizer, hidden=16, layers=1, heads=2, seed=seed) for seed in (1, 2))
    source, beside = Model(StateSource(model), tokenizer), Model(StateSource(other), tokenizer)
    # A head of zeros has no values to tell apart.
    monkeypatch.setattr(values, "ValueSource", partial(ValueSource, seed=3))
    config = PolicyConfig(**COUNTS, sampling=SamplingParams(n=4, max_new_tokens=4, temperature=0.7))
    with ExitStack() as opened:

        def build(objective, **changes):
            rollout = opened.enter_context(Rollout(source))
            policy = opened.enter_context(Policy(source, objective, FAST, scoring=SCORING, rehearsed=True))
            models = {}
            if objective.value is not None:
                models["critic"] = opened.enter_context(Critic(source, objective, FAST))
            if "teacher_logprobs" in objective.required_rollout_fields:
                models["teacher"] = opened.enter_context(Teacher(beside, source, scoring=SCORING))
            if "ref_logprobs" in objective.required_rollout_fields:
                models["reference"] = opened.enter_context(Reference(beside, scoring=SCORING))
            options = PolicyPipeline(policy=dataclasses.replace(config, **changes), seed=5)
            return Models(policy, **models), rollout, options

        yield model, other, build


def logprobs_of(model, batch, temperature=0.7):
    """Row by row and unpadded, in plain torch; 0 where masked."""
    found = torch.zeros(batch.mask.shape)
    for i, length in enumerate(batch.lengths.tolist()):
        ids = batch.tokens[i : i + 1, :length]
        with torch.no_grad():
            logp = (model(input_ids=ids).logits[0, :-1] / temperature).log_softmax(-1)
        found[i, 1:length] = logp.gather(-1, ids[0, 1:, None])[:, 0]
    return found.masked_fill(~batch.mask, 0.0)


def fed(build, objective, step=0, coefficients=None, **changes):
    """The models, rollout and groups of a step, its batch before and with advantages, and the step's update."""
    models, rollout, options = build(objective, **changes)
    config, inputs = options.policy, PolicyInputs.of(options, rollout.model, ROWS, ROWS[:1], digits)
    models.policy.sync_weights(rollout)
    groups = draw(options, rollout, inputs, objective, None, step)
    scored = models.inputs_of_advantages(groups.batch(), objective, rescored=config.recompute_old_logprobs)
    batch = scored.with_advantages(objective, correct_reward=config.correct_reward, coefficients=coefficients)

    def update():
        return {name: value for part in models.update(batch, config, trains=True) for name, value in part.items()}

    return models, rollout, groups.scored, scored.tokens, batch, update


def first_of_rows(batch):
    """[N]: the first advantage of each row."""
    return torch.stack([row[mask][0] for row, mask in zip(batch.advantages, batch.mask, strict=True)])


def test_the_greedy_baseline_is_the_reward_of_the_most_likely_completion(world):
    _, _, build = world
    _, rollout, sampled, _, batch, _ = fed(build, rl_fn.recipes.remax())
    once = SamplingParams(max_new_tokens=4, temperature=0.0)
    greedy = digits(rollout.engine.generate([row["prompt"] for row in RowStream(ROWS, 5).take(3)], once))
    assert sampled.greedy_rewards.tolist() == pytest.approx(greedy) and len(set(greedy)) >= 1
    wanted = sampled.rewards - torch.tensor(greedy)[:, None]
    torch.testing.assert_close(first_of_rows(batch.tokens), wanted.flatten())


def test_values_are_of_before_the_update_and_returns_regress_on_them(world):
    _, _, build = world
    objective = rl_fn.recipes.ppo(lam=0.9, whiten=False)
    objective = objective.replace(value=components.ValueLoss(clip=0.1))
    models, _, sampled, scored, fed_batch, update = fed(build, objective)
    critic, batch = models.critic.engine, fed_batch.tokens
    before = critic.values(NeedParallel(scored))
    assert torch.equal(scored.old_values, before) and before[scored.mask].abs().min() > 0
    metrics = update()
    after = critic.values(NeedParallel(scored))
    assert not torch.equal(after, before) and metrics["critic_grad_norm"] > 0 and metrics["value_loss"] > 0
    # GAE written out, backwards, over the tokens that count.
    for i, mask in enumerate(batch.mask):
        values, tokens = before[i, mask].tolist(), int(mask.sum())
        advantages, later = [0.0] * tokens, 0.0
        for t in reversed(range(tokens)):
            reward = float(sampled.rewards.flatten()[i]) if t == tokens - 1 else 0.0
            following = values[t + 1] if t + 1 < tokens else 0.0
            later = reward + following - values[t] + 0.9 * later
            advantages[t] = later
        np.testing.assert_allclose(batch.advantages[i, mask], advantages, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(batch.returns[i, mask], np.add(advantages, values), rtol=1e-4, atol=1e-5)


def test_the_teacher_s_log_probabilities_are_the_teacher_s(world):
    model, teacher, build = world
    _, _, _, scored, fed_batch, _ = fed(build, rl_fn.recipes.on_policy_distillation())
    batch = fed_batch.tokens
    torch.testing.assert_close(scored.teacher_logprobs, logprobs_of(teacher, scored), rtol=0, atol=1e-5)
    torch.testing.assert_close(scored.old_logprobs, logprobs_of(model, scored), rtol=0, atol=1e-5)
    wanted = logprobs_of(teacher, scored) - logprobs_of(model, scored)
    torch.testing.assert_close(batch.advantages, wanted, rtol=0, atol=2e-5)
    assert batch.advantages.abs().max() > 0.1


def test_a_penalty_in_the_reward_is_of_the_old_policy_to_the_reference(world):
    model, other, build = world
    objective = rl_fn.recipes.rloo().replace(reward_kl=components.KL("k1", 0.5))
    _, _, sampled, scored, batch, _ = fed(build, objective)
    kl = (logprobs_of(model, scored) - logprobs_of(other, scored)).sum(1).view(3, 4)
    for coef, coefficients in ((0.5, {}), (2.0, {"reward_kl": 2.0})):
        if coefficients:
            _, _, sampled, scored, batch, _ = fed(build, objective, coefficients=coefficients)
        rewards = sampled.rewards - coef * kl
        wanted = (rewards - (rewards.sum(1, keepdim=True) - rewards) / 3).flatten()
        torch.testing.assert_close(first_of_rows(batch.tokens), wanted, rtol=1e-3, atol=1e-3)


def test_noise_and_correct_tokens_are_of_the_whole_batch(world):
    _, _, build = world
    first, again, later = (fed(build, rl_fn.recipes.clip_cov(), step=step)[4].tokens for step in (0, 0, 1))
    assert first.noise.shape == first.mask.shape and first.noise.min() >= 0 and first.noise.max() < 1
    assert torch.equal(first.noise, again.noise) and not torch.equal(first.noise[:, :4], later.noise[:, :4])
    _, _, sampled, _, batch, _ = fed(build, rl_fn.recipes.vapo(), correct_reward=0.5)
    earned = sampled.earned.flatten() >= 0.5
    assert torch.equal(batch.tokens.correct, batch.tokens.mask & earned[:, None]) and 0 < int(earned.sum()) < 12


def turns(tokens, mask, **fields):
    return Trajectory(
        tokens=tuple(tokens),
        loss_mask=tuple(bool(m) for m in mask),
        logprobs=(0.0,) * len(tokens),
        weights_versions=tuple(0 if m else -1 for m in mask),
        finish_reason="stop",
        **fields,
    )


ERRORS = {name: getattr(rl_fn.recipes, name) for name in rl_fn.recipes.__all__} | {
    "of the user": lambda: rl_fn.recipes.grpo().replace(
        advantage=components.CustomAdvantage(lambda rewards, valid: rewards - 0.1 * rewards.shape[-1])
    )
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_failed_environment_s_trajectory_has_no_part_in_the_update(name):
    """Whatever it earned: not by a gradient, not by its group's mean, not by a denominator."""
    objective = ERRORS[name](**({"k": 2} if name == "passk" else {}))
    inputs, generator, failed = Advantages(objective), torch.Generator().manual_seed(3), 2
    trajectories = [
        turns([2, 5, 6, 7, 1][: 3 + row % 3], [0, 1, 1, 1, 1][: 3 + row % 3], group=row // 4) for row in range(8)
    ]
    trajectories[failed] = dataclasses.replace(trajectories[failed], finish_reason="error")
    batch = collate(trajectories, 0)
    drawn = {
        field: torch.where(batch.mask, torch.randn(batch.mask.shape, generator=generator) - 2.0, 0.0)
        for field in ("old_logprobs", "ref_logprobs", "teacher_logprobs", "old_values")
    }
    batch = batch._replace(**drawn, correct=batch.mask, noise=torch.rand(batch.mask.shape, generator=generator))
    names = ("one", "two") if name == "gdpo" else ("one",)
    earned = torch.rand(2, len(names), 4, generator=generator)

    def found(reward):
        matrix = earned.clone()
        matrix[0, :, failed] = reward
        one = matrix.mean(1)
        whole = Sampled(
            trajectories=trajectories, names=names, matrix=matrix, earned=one, rewards=one,
            greedy_rewards=torch.tensor([0.1, 0.2]), applies=matrix.isfinite(), sampled_groups=2,
        )  # fmt: skip
        return inputs.advantages(batch, whole, {})

    (after, computed, counted), others = found(0.3), found(50.0)
    assert not computed[failed] and not counted[failed].any()
    rest = torch.arange(8) != failed
    assert torch.equal(counted[rest], batch.mask[rest]) and computed[rest].any()
    denominator = from_jax(objective.denominator)
    segments = batch.segment_ids if after.segment_ids is None else after.segment_ids
    whole, without = (
        float(denominator(x, None if segments is None else segments[rows]))
        for x, rows in ((counted, slice(None)), (counted[rest], rest))
    )
    assert whole == without
    assert not after.advantages[failed].any() and after.advantages[rest].any()
    assert torch.equal(after.advantages, others[0].advantages) and torch.equal(counted, others[2])
    assert after.returns is None or torch.equal(after.returns[rest], others[0].returns[rest])


def test_turns_are_steps_with_their_states_and_rewards():
    episodes = [
        turns([2, 5, 6, 9, 7, 1], [0, 1, 1, 0, 1, 1], turns=2, turn_rewards=(0.5, 0.25), state_ids=(3, 4)),
        turns([2, 8, 1, 0, 0, 0], [0, 1, 1, 0, 0, 0], turns=1, turn_rewards=(2.0,), state_ids=(3,)),
    ]
    mask = torch.tensor([episode.loss_mask for episode in episodes])
    steps = steps_of(episodes, mask, torch.tensor([[0.75 + 1.0, 2.0 + 10.0]]), 1.0)
    assert steps.rewards.tolist() == [[[0.5, 1.25], [12.0, 0.0]]]
    assert steps.mask[0, 0].int().tolist() == [[0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1]]
    assert not steps.mask[0, 1, 1].any() and torch.equal(steps.mask.any(2)[0], mask)
    assert steps.state_ids[0, 0, 0] == steps.state_ids[0, 1, 0] != steps.state_ids[0, 0, 1]
    assert steps.turns[0].tolist() == [0, 1, 1, 1, 2, 2]
    # An environment's reward that is none of the run's is in no step.
    assert steps_of(episodes, mask, torch.tensor([[1.0, 10.0]])).rewards.tolist() == [[[0.0, 1.0], [10.0, 0.0]]]
    # Without names a state is what stands before the turn.
    bare = [dataclasses.replace(episode, state_ids=(), turn_rewards=()) for episode in episodes]
    unnamed = steps_of(bare, mask, torch.tensor([[1.0, 10.0]]))
    assert unnamed.state_ids[0, 0, 0] == unnamed.state_ids[0, 1, 0] != unnamed.state_ids[0, 0, 1]
    assert unnamed.rewards.tolist() == [[[0.0, 1.0], [10.0, 0.0]]]


SOURCES = {
    "alone": ["environment"],
    "named": ["score=environment"],
    "beside another": ["score=environment", lambda completion, row: 3.0],
    "behind another": [lambda completion, row: 3.0, "environment"],
    "not of the run": [lambda completion, row: 3.0],
}


# A reward alone has a weight that counts.
@pytest.mark.parametrize(
    ("sources", "weight"),
    [
        (name, weight)
        for name in SOURCES
        for weight in (1.0, 0.5, 0.0, -2.0)
        if weight or name not in ("alone", "named")
    ],
)
@pytest.mark.parametrize("said", ["weights", "scalar"])
def test_steps_add_up_to_the_episode_s_reward_with_the_environment_s_weight(sources, weight, said):
    """A turn's part was recognised by the name "environment" alone, and had no weight."""
    of_turns = [(0.5, 0.25), (2.0, -1.0), (0.0, 4.0), (1.0, 1.0)]
    episodes = [
        turns(
            [2, 5, 6, 9, 7, 1],
            [0, 1, 1, 0, 1, 1],
            turns=2,
            turn_rewards=own,
            rewards={"environment": sum(own)},
            group=place // 2,
        )
        for place, own in enumerate(of_turns)
    ]
    factors = [weight if "environment" in str(source) else 1.0 for source in SOURCES[sources]]
    rewards = load(SOURCES[sources], weights=factors if said == "weights" else [7.0] * len(factors))
    scalar = ScalarOptions(weights=tuple(factors)) if said == "scalar" else None
    sampled = rewarded(rewards.score(episodes), rewards, 2, max_new_tokens=9, scalar=scalar)
    mask = torch.tensor([episode.loss_mask for episode in episodes])
    steps = steps_of(sampled.trajectories, mask, sampled.rewards, sampled.turn_weight).rewards
    torch.testing.assert_close(steps.sum(2), sampled.rewards)
    part = 0.0 if sources == "not of the run" else weight
    assert steps[..., 0].flatten().tolist() == [part * own[0] for own in of_turns]


def test_steps_of_no_sum_are_refused():
    episode = turns([2, 5, 1], [0, 1, 1], turns=1, turn_rewards=(0.5,), rewards={"environment": 0.5})
    scalar = ScalarOptions(method="tchebycheff", weights=(1.0, 1.0), ideal=(1.0, 4.0))
    mask = torch.tensor([episode.loss_mask])
    for sources, refused in ((SOURCES["beside another"], True), ([SOURCES["not of the run"][0], "exact"], False)):
        rewards = load(sources)
        row = dataclasses.replace(episode, row={"answer": "1"})
        sampled = rewarded(rewards.score([row]), rewards, 1, max_new_tokens=9, scalar=scalar)
        if refused:
            with pytest.raises(ValueError, match=r"tchebycheff makes no sum of the rewards.*weighted_sum"):
                steps_of(sampled.trajectories, mask, sampled.rewards, sampled.turn_weight)
        else:
            steps = steps_of(sampled.trajectories, mask, sampled.rewards, sampled.turn_weight)
            assert torch.equal(steps.rewards.sum(2), sampled.rewards)


def test_several_rewards_become_one():
    rewards = torch.tensor([[[1.0, 0.0], [0.5, 2.0]]])  # one prompt, two rewards, two completions
    assert ScalarOptions().combine(rewards, (1.0, 0.5)).tolist() == [[1.25, 1.0]]
    assert ScalarOptions(weights=(0.0, 1.0)).combine(rewards, (1.0, 0.5)).tolist() == [[0.5, 2.0]]
    tchebycheff = ScalarOptions(method="tchebycheff", weights=(1.0, 1.0), ideal=(1.0, 2.0), rho=0.0)
    assert tchebycheff.combine(rewards, (1.0, 1.0)).tolist() == [[-1.5, -1.0]]
    with pytest.raises(ValueError, match="weights has 1 numbers for 2 rewards"):
        ScalarOptions(weights=(1.0,)).combine(rewards, (1.0, 1.0))
    with pytest.raises(ValueError, match="ideal goes with method tchebycheff"):
        ScalarOptions(method="tchebycheff")


def test_a_coefficient_changes_the_gradient_and_traces_nothing_anew(world, monkeypatch):
    _, _, build = world
    objective = rl_fn.recipes.dapo().replace(entropy=components.EntropyBonus(0.0))
    models, _, _, _, fed_batch, _ = fed(build, objective)
    batch, module, traced, real = fed_batch.tokens, module_of(models.policy.engine), [], trace.trace
    monkeypatch.setattr(trace, "trace", lambda *arguments: traced.append(1) or real(*arguments))
    gradients = []
    for coef in (0.0, 0.1, 0.2):
        module.zero_grad()
        module.train_step(batch, float(batch.mask.sum()), {"entropy": coef})
        gradients.append(torch.cat([p.grad.flatten() for p in module.model.parameters()]))
    assert len(traced) == 1
    bonus = gradients[1] - gradients[0]
    assert bonus.norm() > 1e-5
    torch.testing.assert_close(gradients[2] - gradients[0], 2 * bonus, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 0.2), (0.3, 0.7), (1.0, 1.0, 1.0), (0.5, 0.3, 0.2)], ids=str)
def test_completions_of_one_sum_earn_one_number(weights):
    """Rewards in tenths whose weighted sums are equal numbers have no signal, whatever they are made of."""
    by_sum = defaultdict(list)
    for tenths in itertools.product(range(11), repeat=len(weights)):
        parts = (Fraction(number, 10) * Fraction(str(w)) for number, w in zip(tenths, weights, strict=True))
        by_sum[sum(parts)].append([number / 10 for number in tenths])
    names = [str(number) for number in range(len(weights))]
    for total, rows in by_sum.items():
        group = [single_turn([2], [1], rewards=dict(zip(names, row, strict=True))) for row in rows]
        earned = ScalarOptions().combine(reward_matrix(group, names, len(group)), weights)
        assert earned.dtype == torch.float32 and set(earned.flatten().tolist()) == {float(np.float32(float(total)))}


@pytest.mark.parametrize("buffer", [0, 2, 3, 7, 10])
def test_a_penalty_is_added_before_the_sum_is_rounded(buffer):
    """0.7 less a half is 0.2: completions of one total have no signal, whether it was earned or left by a penalty."""

    def one(completion, row):
        return 0.0

    by_total = defaultdict(list)
    for tenths, over in itertools.product(range(-10, 11), range(buffer + 2)):
        earned = single_turn([2], [1] * (20 - buffer + over), rewards={"reward": tenths / 10})
        penalty = Fraction(min(over, buffer), buffer) if buffer else Fraction(over > 0)
        by_total[Fraction(tenths, 10) - penalty].append(earned)
    for total, group in by_total.items():
        limits = {"max_new_tokens": 20, "overlong_buffer": buffer}
        sampled = rewarded(group, load([one]), len(group), **limits)
        assert sampled.rewards.dtype == sampled.matrix.dtype == torch.float32
        np.testing.assert_allclose(sampled.rewards, float(total), rtol=0, atol=1e-7)
        assert len(set(sampled.rewards.flatten().tolist())) == 1
