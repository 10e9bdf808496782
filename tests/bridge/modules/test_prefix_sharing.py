"""A prompt that is computed once for all completions of its group changes no number."""

from dataclasses import replace

import pytest
import torch

import rl_fn
from rl_bridge.data.token_batch import WORTH, collate, micro_batches, prefixes_worth_sharing, units_of
from rl_bridge.data.trajectory import single_turn
from rl_bridge.models.small import tiny_qwen2
from rl_bridge.modules.policy import PolicyModule, mean
from rl_bridge.modules.supervised import SupervisedModule
from rl_bridge.modules.trainable import OptimizerConfig
from rl_bridge.parallel.documents import Documents
from rl_fn import components
from tests.bridge.modules.shared_prompts import APART, make_batch, step
from tests.support.ready import ready

OBJECTIVES = {
    "grpo": rl_fn.recipes.grpo().replace(entropy=components.EntropyBonus(0.1)),
    "gspo": rl_fn.recipes.gspo(),
    "over the batch": rl_fn.recipes.clip_cov(fraction=0.3, cov_low=-9.0, cov_high=9.0),
}


@pytest.fixture(scope="module")
def modules(tokenizer):
    model, optimizer = tiny_qwen2(tokenizer, hidden=16, layers=2, heads=2), OptimizerConfig(learning_rate=1e-3)
    made = {name: ready(PolicyModule, model, optimizer, objective, updates=1) for name, objective in OBJECTIVES.items()}
    return made | {"sft": ready(SupervisedModule, model, optimizer, updates=1)}


@pytest.mark.parametrize("drop", [(), (0, 2, 4, 6, 7, 9)], ids=["whole groups", "rows dropped"])
@pytest.mark.parametrize("name", ["sft", *OBJECTIVES])
def test_loss_metrics_and_gradients_are_those_of_rows_apart(modules, name, drop):
    module, batch = modules[name], make_batch(drop)
    wanted = step(module, APART, batch)
    assert wanted[0].norm() > 1e-3
    for tokens in (1, 25, 60, 10**6):
        gradient, metrics = step(module, replace(APART, micro_batch_tokens=tokens, share_prefixes=True), batch)
        torch.testing.assert_close(gradient, wanted[0], rtol=1e-4, atol=1e-6)
        assert metrics == pytest.approx(wanted[1], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.6, "softcap": 3.0, "packing": True}], ids=str)
def test_scores_and_entropies_are_those_of_rows_apart(modules, options):
    module, batch = modules["grpo"], make_batch()
    module.scoring = replace(APART, **options)
    wanted = module(batch)
    module.scoring = replace(APART, share_prefixes=True, **options)
    for found, value in zip(module(batch), wanted, strict=True):
        torch.testing.assert_close(found, value, rtol=0, atol=1e-6)
    assert bool((wanted[0][batch.mask] < 0).all()) and not wanted[0][~batch.mask].any()


def test_a_prompt_is_computed_once_and_the_last_tokens_not_at_all(modules, monkeypatch):
    read = []
    monkeypatch.setattr(
        Documents, "take", lambda self, x, take=Documents.take: read.append(self.tokens) or take(self, x)
    )
    module = modules["grpo"]
    # The shape of 64 completions of 24 tokens to 8 prompts of 40: 4096 tokens apart, 1856 together.
    rows = [
        single_turn(range(40), [group + 1, *range(row, row + 23)], group=group)
        for group in range(8)
        for row in range(8)
    ]
    batch = collate(rows, 0)._replace(tokens=torch.randint(0, 15, (64, 64)))
    batch.tokens[:, :40] = batch.tokens[::8, :40].repeat_interleave(8, 0)
    module.scoring = replace(APART, share_prefixes=True)
    module.token_logprobs(batch)
    shared = batch.prefixes_worth_sharing()
    assert bool((shared >= 39).all()) and batch.tokens.numel() == 4096
    units = units_of(batch.row_tokens(), batch.groups.tolist(), shared.tolist())
    # A prompt's last token predicts another one in every row, and a row's last token none.
    assert sum(unit.tokens for unit in units) == 1856 + 64 - 8
    assert set(read) == {1856 - 8}


def test_micro_batches_count_a_prefix_once_and_keep_groups_together():
    batch = make_batch()
    shared = batch.prefixes_worth_sharing()
    lengths, groups = batch.row_tokens(), batch.groups.tolist()
    assert sorted(set(shared.tolist())) == [0, 5, 7, 8]
    for limit in (1, 20, 34, 60, 1000):
        parts = micro_batches(batch, limit, share_prefixes=True)
        assert torch.equal(torch.cat([part.places for part in parts]).sort().values, torch.arange(len(lengths)))
        for part in parts:
            # As the forward pass decides: of a group's rows in this part alone.
            found = part.batch.prefixes_worth_sharing().tolist()
            units = units_of(part.batch.row_tokens(), part.batch.groups.tolist(), found)
            padded = part.batch.tokens.numel()
            assert len(part.places) == 1 or min(padded, sum(unit.tokens for unit in units)) <= limit
    whole = {unit.tokens: unit.rows.tolist() for unit in units_of(lengths, groups, shared.tolist())}
    parts = micro_batches(batch, max(whole), share_prefixes=True)
    for rows in whole.values():
        assert any(set(rows) <= set(part.places.tolist()) for part in parts)


def test_what_is_not_worth_it_is_not_shared():
    # Of three tokens in common two are computed once: of rows of 16 an eighth.
    for longest, shared in ((16, 2), (17, 0)):
        rows = [single_turn([3, 4, 5], [6] * (longest - 3), group=0), single_turn([3, 4, 5], [7], group=0)]
        batch = collate(rows, 0)
        found = batch.prefixes_worth_sharing()
        assert found.tolist() == [shared, shared] and WORTH == 1 / 8


def test_a_token_of_two_rows_that_is_scored_differently_is_not_shared():
    rows = [single_turn([3, 4, 5, 6], [7, 8, 9], group=0) for _ in range(2)]
    batch = collate(rows, 0)
    fields = (batch.tokens, batch.lengths, batch.groups, batch.mask)
    assert prefixes_worth_sharing(*fields).tolist() == [6, 6]
    batch.mask[1, 5] = False
    assert prefixes_worth_sharing(*fields).tolist() == [4, 4]
    allowed = torch.full((2, 7, 2), -1)
    allowed[0, 4, 0] = 7
    assert prefixes_worth_sharing(*fields, allowed).tolist() == [3, 3]


def with_allowed_tokens(module, batch, temperature, kept=4):
    """The batch as a sampler of the ``kept`` likeliest tokens would have drawn it, and its own log-probabilities."""
    logits = module.model(input_ids=batch.tokens).logits[:, :-1].detach() / temperature
    sets = logits.topk(kept).indices
    drawn = sets[..., 0].masked_fill(~batch.mask[:, 1:], 0)
    of_set = logits.gather(-1, sets).log_softmax(-1)[..., 0]
    allowed = sets.sort(-1).values.masked_fill(~batch.mask[:, 1:, None], -1)
    pad = torch.nn.functional.pad
    return (pad(allowed, (0, 0, 1, 0), value=-1), pad(drawn, (1, 0)), pad(of_set, (1, 0)).masked_fill(~batch.mask, 0.0))


@pytest.mark.parametrize("rows", ["padded", "packed", "shared"])
def test_a_truncated_distribution_is_scored_over_its_own_tokens(modules, rows):
    module, batch = modules["grpo"], make_batch()
    module.scoring = replace(APART, temperature=0.7, packing=rows == "packed", share_prefixes=rows == "shared")
    # One drawn token a row, the first that counts, so that no other token's distribution changes with it.
    batch = batch._replace(mask=batch.mask & (batch.mask.cumsum(1) == 1))
    allowed, drawn, sampled = with_allowed_tokens(module, batch, 0.7)
    batch = batch._replace(allowed_tokens=allowed, tokens=torch.where(batch.mask, drawn, batch.tokens))
    found = module.token_logprobs(batch)
    torch.testing.assert_close(found, sampled, rtol=0, atol=2e-6)
    whole = module.token_logprobs(batch._replace(allowed_tokens=None))
    assert bool((found[batch.mask] > whole[batch.mask] + 1e-3).all())
    # Before the first update the ratio is 1: to the bit against the trainer's own scores, to rounding the sampler's.
    nothing = torch.zeros_like(found)
    for old, tolerance in ((found, 0.0), (sampled, 3e-6)):
        module.zero_grad()
        metrics = module.train_step(batch._replace(old_logprobs=old, ref_logprobs=nothing), 7.0)
        assert mean(metrics["ratio_mean"]) == pytest.approx(1.0, rel=0, abs=tolerance)
