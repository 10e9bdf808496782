"""A reward model's gradient is that of Bradley–Terry's and Plackett–Luce's formulas, however the batch is cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

import rl_fn
from rl_bridge.algorithms.comparison_training import held_out_metrics
from rl_bridge.common.random_numbers import generators
from rl_bridge.data.comparisons import stand_in_pair
from rl_bridge.engines.worker import torch_worker
from rl_bridge.models.model_source import PretrainedValueSource, StateSource, ValueSource
from rl_bridge.models.small import tiny_qwen2
from rl_bridge.modules.comparison import ComparisonLoss, RewardModule
from rl_bridge.modules.policy import mean
from rl_bridge.modules.scoring import ScoringConfig
from rl_bridge.modules.trainable import OptimizerConfig
from rl_bridge.modules.value import ValueScorer
from tests.support.comparisons import random_comparisons

MARGIN = torch.linspace(0.0, 1.0, 7)
SCORINGS = [
    ScoringConfig(micro_batch_tokens=10**6, share_prefixes=False),
    ScoringConfig(micro_batch_tokens=1, share_prefixes=False),
    ScoringConfig(micro_batch_tokens=60, packing=True, share_prefixes=False),
    ScoringConfig(micro_batch_tokens=60),
]
CASES = {
    "bradley_terry": (
        ComparisonLoss(name="bradley_terry", constants={"center": 0.1}),
        random_comparisons(7, 2)._replace(numbers={"margin": MARGIN}),
        lambda r: rl_fn.bradley_terry(r[:, 0], r[:, 1], margin=jnp.asarray(MARGIN.numpy()), center=0.1),
    ),
    "plackett_luce": (
        ComparisonLoss(name="plackett_luce", constants={}),
        random_comparisons(7, 4, ragged=True),
        lambda r: rl_fn.plackett_luce(r, jnp.asarray(random_comparisons(7, 4, ragged=True).present.numpy())),
    ),
}


def made(source, kind, *args, **options):
    return torch_worker(lambda: kind(source, *args, **options), None, torch.device("cpu"), generators())


@pytest.fixture(scope="module")
def module(tokenizer):
    source = ValueSource(StateSource(tiny_qwen2(tokenizer, hidden=16, layers=2, heads=2)), seed=1)
    optimizer = OptimizerConfig(learning_rate=1e-3)
    return made(source, RewardModule, optimizer, CASES["bradley_terry"][0], updates=1)


def gradient(module):
    return torch.cat([parameter.grad.flatten() for parameter in module.model.parameters()])


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_the_formula_in_one_pass(module, monkeypatch, name):
    loss, batch, formula = CASES[name]
    module.loss, module.scoring = loss, SCORINGS[0]
    rewards = module.completion_rewards(batch)
    value, of_rewards = jax.value_and_grad(lambda r: formula(r).sum() / 7)(jnp.asarray(rewards.numpy()))
    module.zero_grad()
    module.outputs(batch).backward(torch.tensor(np.asarray(of_rewards)))
    wanted = gradient(module)
    assert wanted.norm() > 1e-3
    cut = module.comparison_parts
    monkeypatch.setattr(module, "comparison_parts", lambda batch: [*cut(batch), stand_in_pair(batch)])
    for scoring in SCORINGS:
        module.scoring = scoring
        module.zero_grad()
        metrics = module.train_step(batch, 7.0)
        torch.testing.assert_close(gradient(module), wanted, rtol=1e-4, atol=1e-6)
        assert mean(metrics["loss"]) == pytest.approx(float(value), rel=1e-5)


def test_the_accuracy_counts_pairs_in_their_order(module):
    loss, batch, _ = CASES["plackett_luce"]
    rewards = module.completion_rewards(batch)
    found = held_out_metrics(loss, batch, rewards, {})
    right = [
        [float(row[i] > row[j]) for j in range(len(row)) for i in range(j)]
        for row in (r[p].tolist() for r, p in zip(rewards, batch.present, strict=True))
    ]
    assert found["held_out_accuracy"] == pytest.approx(np.mean([x for row in right for x in row]))
    assert found["held_out_accuracy_low"] <= found["held_out_accuracy"] <= found["held_out_accuracy_high"]


def lists(seed, count):
    """Half of pairs, three of four of them right; half of lists of six, at chance. Rewards, and which are there."""
    generator = torch.Generator().manual_seed(seed)
    present = torch.arange(6) < torch.where(torch.rand(count, 1, generator=generator) < 0.5, 2, 6)
    rewards = torch.randn(count, 6, generator=generator)
    pairs = rewards[:, 0] < rewards[:, 1]
    turned = ~present[:, 2] & pairs & (torch.rand(count, generator=generator) < 0.5)
    rewards[turned, :2] = rewards[turned, :2].flip(1)
    return rewards.masked_fill(~present, 0.0), present


@pytest.mark.parametrize("count", [12, 40])
def test_the_interval_is_of_the_accuracy_also_where_lists_have_unlike_lengths(count):
    """In expectation (0.75 · 1 + 0.5 · 15) / 16 of all pairs are in their order; the mean over lists is 0.625."""
    loss, truth, within = CASES["plackett_luce"][0], (0.75 + 0.5 * 15) / 16, 0
    batch = random_comparisons(count, 6)
    for seed in range(60):
        rewards, present = lists(seed, count)
        found = held_out_metrics(loss, batch._replace(present=present), rewards, {})
        low, high = found["held_out_accuracy_low"], found["held_out_accuracy_high"]
        assert low <= found["held_out_accuracy"] <= high
        within += low <= truth <= high
    assert within >= 50


def test_a_saved_reward_model_scores_completions_here_and_in_transformers(module, tmp_path):
    batch = random_comparisons(5, 2).completions
    module.save_pretrained(str(tmp_path))
    wanted = module.scores(batch)
    again = made(PretrainedValueSource(str(tmp_path)), ValueScorer)
    torch.testing.assert_close(again.scores(batch), wanted, rtol=0, atol=1e-6)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    inside = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
    with torch.no_grad():
        theirs = model(input_ids=batch.tokens, attention_mask=inside.long()).logits[:, 0]
    torch.testing.assert_close(theirs, wanted, rtol=0, atol=1e-5)
    assert wanted.std() > 1e-3


def test_a_loss_of_policies_is_refused(module):
    with pytest.raises(ValueError, match="dpo trains a policy; a reward model takes bradley_terry or plackett_luce"):
        RewardModule(module._source, module.optimizer_config, ComparisonLoss(name="dpo", constants={}), updates=1)
