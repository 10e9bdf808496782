"""Rows packed one behind another are scored and trained on as rows padded to one length."""

from dataclasses import replace

import pytest
import torch

import rl_fn
from rl_bridge.data.token_batch import stand_in
from rl_bridge.models.small import tiny_qwen2
from rl_bridge.modules.policy import PolicyModule, mean
from rl_bridge.modules.scoring import ScoringConfig
from rl_bridge.modules.supervised import SupervisedModule
from rl_bridge.modules.trainable import OptimizerConfig
from rl_fn import components
from tests.support.ready import ready
from tests.support.trajectories import random_batch

OBJECTIVES = {
    "grpo": rl_fn.recipes.grpo(),
    "gspo": rl_fn.recipes.gspo(),
    "entropy": rl_fn.recipes.dapo().replace(entropy=components.EntropyBonus(0.1), correction=components.TIS(1.1)),
    "over the batch": rl_fn.recipes.clip_cov(fraction=0.3, cov_low=-9.0, cov_high=9.0),
}
PADDED = ScoringConfig(micro_batch_tokens=10**6)
CUTS = [1, 30, 10**6]


def make_batch(rows=9):
    """Scored by some other model; a hole in the mask of the longest row."""
    batch, g = random_batch(rows, seed=5), torch.Generator().manual_seed(5)
    longest = int(batch.lengths.argmax())
    batch.mask[longest, int(batch.lengths[longest]) - 3] = False
    noise = (-2.7 + 0.3 * torch.randn((3, *batch.mask.shape), generator=g)).masked_fill(~batch.mask, 0.0)
    names = ("rollout_logprobs", "old_logprobs", "ref_logprobs")
    advantages = torch.randn(rows, 1, generator=g) * batch.mask
    return batch._replace(advantages=advantages, **dict(zip(names, noise, strict=True)))


@pytest.fixture(scope="module")
def modules(tokenizer):
    made = {}

    def module(name):
        if name not in made:
            model, optimizer = tiny_qwen2(tokenizer, hidden=16, layers=2, heads=2), OptimizerConfig(learning_rate=1e-3)
            made[name] = (
                ready(SupervisedModule, model, optimizer, updates=1)
                if name == "sft"
                else ready(PolicyModule, model, optimizer, OBJECTIVES[name], updates=1)
            )
        return made[name]

    return module


def step(module, scoring, batch, denominator=7.0):
    module.scoring = scoring
    module.zero_grad()
    metrics = module.train_step(batch, denominator)
    return torch.cat([p.grad.flatten() for p in module.model.parameters()]), {k: mean(v) for k, v in metrics.items()}


def assert_close(got, wanted):
    assert wanted[0].norm() > 1e-3
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-4, atol=1e-6)
    assert got[1] == pytest.approx(wanted[1], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", ["sft", *OBJECTIVES])
def test_packed_rows_train_as_padded_rows_do(modules, name):
    module, batch = modules(name), make_batch()
    wanted = step(module, PADDED, batch)
    for tokens in CUTS:
        assert_close(step(module, ScoringConfig(micro_batch_tokens=tokens, packing=True), batch), wanted)


@pytest.mark.parametrize("tokens", CUTS)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.6, "softcap": 3.0}], ids=str)
def test_packed_rows_are_scored_as_padded_rows_are(modules, tokens, options):
    module, batch = modules("grpo"), make_batch()
    module.scoring = replace(PADDED, **options)
    wanted = module.token_logprobs(batch)
    module.scoring = replace(PADDED, micro_batch_tokens=tokens, packing=True, **options)
    torch.testing.assert_close(module.token_logprobs(batch), wanted, rtol=0, atol=1e-6)
    assert bool((wanted[batch.mask] < 0).all()) and not wanted[~batch.mask].any()


def test_a_packed_row_does_not_see_its_neighbours(modules):
    module, batch = modules("grpo"), make_batch()
    module.scoring = replace(PADDED, packing=True)
    wanted = module.token_logprobs(batch)
    for row in (0, 4, 8):
        other = batch._replace(tokens=batch.tokens.clone())
        other.tokens[row] = (other.tokens[row] + 5) % 15
        found = module.token_logprobs(other)
        same = [torch.equal(found[i], wanted[i]) for i in range(9)]
        assert same == [i != row for i in range(9)]


def test_packing_counts_no_padding(modules):
    module, batch = modules("grpo"), make_batch()
    used, whole = int(batch.lengths.sum()), batch.tokens.numel()
    assert used < whole
    for packing in (False, True):
        module.scoring = ScoringConfig(micro_batch_tokens=used, packing=packing)
        assert (len(module.micro_batches(batch)) == 1) == packing


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("name", ["sft", *OBJECTIVES])
def test_a_stand_in_and_a_batch_without_rows_add_nothing(modules, monkeypatch, name, packing):
    module, batch = modules(name), make_batch()
    scoring = ScoringConfig(micro_batch_tokens=40, packing=packing)
    wanted = step(module, scoring, batch)
    nothing = batch.rows(slice(0, 0))
    gradient, metrics = step(module, scoring, nothing)
    assert not gradient.any() and metrics.keys() == wanted[1].keys() and not any(metrics.values())
    assert module.token_logprobs(nothing).shape == (0, batch.tokens.shape[1])
    scores, cut = module.token_logprobs(batch), module.micro_batches
    monkeypatch.setattr(module, "micro_batches", lambda batch: [*cut(batch), stand_in(batch), stand_in(batch)])
    assert_close(step(module, scoring, batch), wanted)
    assert torch.equal(module.token_logprobs(batch), scores)
