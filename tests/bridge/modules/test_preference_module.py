"""Every preference loss trains a policy: its gradient is the formula's, however the batch is cut."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import rl_fn
from rl_bridge.algorithms.comparison_training import BatchStatistics, accumulate, evaluate_preference
from rl_bridge.data.comparisons import collate_comparisons, stand_in_pair
from rl_bridge.data.trajectory import single_turn
from rl_bridge.models.small import tiny_qwen2
from rl_bridge.modules import comparison
from rl_bridge.modules.comparison import PREFERENCE_LOSSES, ComparisonLoss, PreferenceModule
from rl_bridge.modules.policy import mean
from rl_bridge.modules.scoring import ScoringConfig
from rl_bridge.modules.trainable import OptimizerConfig
from tests.support.comparisons import random_comparisons
from tests.support.direct_engine import Direct
from tests.support.ready import ready

ROWS = 7
SIDES = {"pairs": 2, "triples": 3, "singles": 1}
# Losses that twice the tokens of the same likelihood do not change.
IN_TOKENS = ("orpo", "simpo", "dpo_norm", "ipo per token")
STATISTICS = {"kl": 0.3, "delta": -0.2}
ONE_PASS = ScoringConfig(micro_batch_tokens=10**6, share_prefixes=False)
CUTS = [
    ScoringConfig(micro_batch_tokens=1, share_prefixes=False),
    ScoringConfig(micro_batch_tokens=60, packing=True, share_prefixes=False),
    ScoringConfig(micro_batch_tokens=60),
]
CASES = {name: ComparisonLoss(name=name, constants={}) for name in PREFERENCE_LOSSES} | {
    "ipo per token": ComparisonLoss(name="ipo", constants={"beta": 0.4}, average=True),
    "dpo with wpo": ComparisonLoss(name="dpo", constants={"label_smoothing": 0.1}, wpo=True),
    "forward f_dpo": ComparisonLoss(name="f_dpo", constants={"divergence": "forward_kl"}),
}


@pytest.fixture(scope="module")
def module(tokenizer):
    model = tiny_qwen2(tokenizer, hidden=16, layers=2, heads=2)
    return ready(
        PreferenceModule, model, OptimizerConfig(learning_rate=1e-3), CASES["dpo"], updates=1, scoring=ONE_PASS
    )


def gradient(module):
    return torch.cat([parameter.grad.flatten() for parameter in module.model.parameters()])


def step(module, loss, batch, scoring=ONE_PASS):
    module.loss, module.scoring = loss, scoring
    module.zero_grad()
    metrics = accumulate(Direct(module), loss, batch, {name: STATISTICS[name] for name in loss.statistics})
    return gradient(module), metrics


def formula(loss, batch, logprobs):
    """Σ losses / rows by rl_fn alone, its arguments written out; ``logprobs`` is [N, K]."""
    reference, lengths = (jnp.asarray(x.numpy(), jnp.float32) for x in (batch.ref_logprobs, batch.counted()))
    per_token = loss.average or loss.name in ("orpo", "simpo")
    values, reference = (x / lengths if per_token else x for x in (logprobs, reference))
    columns, ref = list(values.T), list(reference.T)
    arguments = {
        "orpo": columns,
        "simpo": columns,
        "cpo": columns,
        "tpo": columns,
        "kto": [*columns, *ref, jnp.asarray(batch.desirable.numpy()), STATISTICS["kl"]],
        "rpo": [*columns, *ref, lengths[:, 0]],
        "dpo_norm": [*columns, *ref, *lengths.T],
    }.get(loss.name, [*columns, *ref])
    constants = {**loss.constants} | ({"delta": STATISTICS["delta"]} if loss.name == "bco" else {})
    losses = getattr(rl_fn, loss.name)(*arguments, **constants)
    if loss.wpo:
        losses = losses * jax.lax.stop_gradient(jnp.exp((logprobs / lengths).sum(1)))
    return jnp.sum(losses) / len(losses)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_the_formula_in_one_pass(module, name):
    loss = CASES[name]
    batch = random_comparisons(ROWS, SIDES[loss.form])
    logprobs = module.completion_logprobs(batch)
    value, of_logprobs = jax.value_and_grad(lambda x: formula(loss, batch, x))(jnp.asarray(logprobs.numpy()))
    module.scoring = ONE_PASS
    module.zero_grad()
    module.outputs(batch).backward(torch.tensor(np.asarray(of_logprobs)))
    wanted = gradient(module)
    assert wanted.norm() > 1e-5
    for scoring in (ONE_PASS, *CUTS):
        found, metrics = step(module, loss, batch, scoring)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6 * max(1.0, float(wanted.abs().max())))
        assert metrics["loss"] == pytest.approx(float(value), rel=1e-5)


def test_every_loss_of_the_family_is_one_that_trains_or_is_known_to_train_nothing():
    family = set(rl_fn.preference_losses.__all__)
    known = {*PREFERENCE_LOSSES, *comparison.REWARD_LOSSES, *comparison.WATCHED}
    assert known == family and {loss.name for loss in CASES.values()} == set(PREFERENCE_LOSSES)
    files = [getattr(rl_fn.preference_losses, name).__module__ for name in family]
    assert all(file.startswith("rl_fn.preference_losses.") for file in files)


@pytest.mark.parametrize("name", ["dpo", "kto", "ipo per token", "dpo_norm"])
def test_a_policy_equal_to_its_reference_has_reward_zero(module, name):
    loss = CASES[name]
    batch = random_comparisons(ROWS, SIDES[loss.form])
    module.scoring = ONE_PASS  # as the step below: equal cuts give equal bits
    batch = batch._replace(ref_logprobs=module.completion_logprobs(batch))
    _, metrics = step(module, loss, batch)
    at_zero = {"dpo": np.log(2), "dpo_norm": np.log(2), "ipo per token": (0.5 / 0.4) ** 2}
    assert metrics["chosen_reward"] == metrics["rejected_reward"] == 0.0
    if name in at_zero:
        assert metrics["loss"] == pytest.approx(at_zero[name], rel=1e-6) and metrics["accuracy"] == 0.0


@pytest.mark.parametrize("name", CASES)
def test_rewards_that_are_shown_are_per_token_where_the_loss_is(name):
    """SURV-12: twice the tokens, each as likely as before, change the rewards if they change the loss, and not else."""
    loss, generator = CASES[name], torch.Generator().manual_seed(1)
    shape = ROWS, SIDES[loss.form]
    lengths = torch.randint(1, 6, shape, generator=generator)
    outputs, reference = (-lengths * torch.rand(shape, generator=generator) for _ in range(2))
    shown, losses = [], []
    for times in (1, 2):
        rows = [[single_turn([2], [3] * n) for n in row] for row in (times * lengths).tolist()]
        batch = collate_comparisons(rows, 0, desirable=[row % 2 == 0 for row in range(ROWS)])
        batch = batch._replace(ref_logprobs=times * reference)
        losses.append(loss(batch, times * outputs, {k: STATISTICS[k] for k in loss.statistics}))
        watched = loss.watch(batch, times * outputs)
        del watched["accuracy"]
        shown.append([torch.where(counted, value, 0.0) for value, counted in watched.values()])
    factor = 1.0 if torch.allclose(*losses, rtol=1e-4) else 2.0
    assert factor == (1.0 if name in IN_TOKENS else 2.0)
    for found, wanted in zip(*reversed(shown), strict=True):
        torch.testing.assert_close(found, factor * wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["dpo", "tpo", "kto"])
def test_a_stand_in_adds_nothing(module, monkeypatch, name):
    loss = CASES[name]
    batch = random_comparisons(ROWS, SIDES[loss.form])
    wanted, metrics = step(module, loss, batch)
    cut = module.comparison_parts
    monkeypatch.setattr(module, "comparison_parts", lambda batch: [*cut(batch), stand_in_pair(batch)])
    found, same = step(module, loss, batch)
    assert torch.equal(found, wanted) and same == metrics


def test_a_column_of_the_data_takes_the_place_of_a_constant(module):
    loss, batch = CASES["sppo"], random_comparisons(ROWS)
    other = step(module, loss, batch)[1]["loss"]
    rates = torch.linspace(0.5, 1.0, ROWS)
    found = step(module, loss, batch._replace(numbers={"chosen_win_rate": rates}))[1]["loss"]
    c, r = (module.completion_logprobs(batch) - batch.ref_logprobs).T
    wanted = ((c - (rates - 0.5) / 1e-3) ** 2 + (r + 0.5 / 1e-3) ** 2).mean()
    assert found == pytest.approx(float(wanted), rel=1e-5) and found != other


def test_metrics_of_parts_add_up_and_rewards_are_the_log_ratios(module):
    batch = random_comparisons(ROWS)
    logprobs = module.completion_logprobs(batch)
    totals = CASES["dpo"].metrics(batch, logprobs, torch.zeros(ROWS))
    reward = 0.1 * (logprobs - batch.ref_logprobs)
    assert mean(totals["chosen_reward"]) == pytest.approx(float(reward[:, 0].mean()), rel=1e-5)
    assert mean(totals["margin"]) == pytest.approx(float((reward[:, 0] - reward[:, 1]).mean()), rel=1e-4)
    assert mean(totals["accuracy"]) == pytest.approx(float((reward[:, 0] > reward[:, 1]).float().mean()))


# An infinite margin has an infinite loss with a finite gradient.
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["dpo", "aot"])
def test_a_loss_that_is_not_finite_changes_no_weight(module, name, value):
    batch = random_comparisons(ROWS)
    batch.ref_logprobs[2, 0] = value
    before = [parameter.detach().clone() for parameter in module.model.parameters()]
    loss = step(module, CASES[name], batch)[1]["loss"]
    assert not math.isfinite(loss)
    assert module.optimizer_step()["skipped"] == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, module.model.parameters(), strict=True))


@pytest.mark.parametrize("good, bad", [(0.0, 0.0), (0, 0), (0.0, 1.0), (2.0, 0.0)])
def test_kto_learns_from_one_kind_of_responses_at_least(good, bad):
    """Both weights of 0 trained nothing, and exported the model that it began with."""
    constants = {"desirable_weight": good, "undesirable_weight": bad}
    if good or bad:
        assert ComparisonLoss(name="kto", constants=constants).constants == constants
    else:
        with pytest.raises(ValueError, match="kto has nothing to learn: desirable_weight and undesirable_weight are 0"):
            ComparisonLoss(name="kto", constants=constants)


def test_what_cannot_be_is_refused(module):
    with pytest.raises(ValueError, match="no loss of comparisons 'ppo'"):
        ComparisonLoss(name="ppo", constants={})
    with pytest.raises(ValueError, match="hinge does not take gamma"):
        ComparisonLoss(name="hinge", constants={"gamma": 1.0})
    with pytest.raises(ValueError, match="rpo divides by the lengths itself"):
        ComparisonLoss(name="rpo", constants={}, average=True)
    with pytest.raises(ValueError, match=r"dpo needs batch\.ref_logprobs"):
        step(module, CASES["dpo"], random_comparisons(ROWS)._replace(ref_logprobs=None))
    module.loss = CASES["aot"]
    with pytest.raises(ValueError, match="aot needs all comparisons at once"):
        module.train_step(random_comparisons(ROWS), 7.0)


@pytest.mark.parametrize("desirable", [True, False])
def test_a_mean_over_nothing_is_not_recorded(module, desirable):
    """A reward of 0 would look like one that was measured."""
    loss, batch = CASES["kto"], random_comparisons(ROWS, SIDES["pairs"])
    batch = batch._replace(desirable=torch.full_like(batch.desirable, desirable))
    absent, present = ("rejected_reward", "chosen_reward") if desirable else ("chosen_reward", "rejected_reward")
    _, metrics = step(module, loss, batch)
    measured = evaluate_preference(Direct(module), loss, batch)
    assert absent not in metrics and {"loss", "accuracy", present} <= metrics.keys()
    assert f"held_out_{absent}" not in measured and {"held_out_loss", f"held_out_{present}"} <= measured.keys()


@pytest.mark.parametrize("average", [True, False, None])
def test_kl_and_log_ratios_of_kto_have_one_unit(module, average):
    """Where each token's log-ratio is 0.2, so is z per token, however long the completions: all labels weigh 1/2."""
    loss = ComparisonLoss(name="kto", constants={"beta": 0.1}, average=average)
    batch, ratio = random_comparisons(ROWS, SIDES["pairs"]), 0.2
    engine = Direct(module)
    module.loss, module.scoring = loss, ONE_PASS
    scores = engine.completion_logprobs(batch).detach()
    batch = batch._replace(ref_logprobs=scores - ratio * batch.counted())
    expected = ratio * (1.0 if average else float(batch.counted()[:, 1].mean(dtype=torch.float32)))
    numbers = BatchStatistics(loss).of(engine, batch)
    assert numbers["kl"] == pytest.approx(expected, rel=1e-3)
    measured = evaluate_preference(engine, loss, batch)
    learned = batch.side(0)
    per_row = ratio * (torch.ones(ROWS) if average else learned.counted()[:, 0].float())
    sign = torch.where(batch.desirable, 1.0, -1.0)
    losses = 1.0 - torch.sigmoid(sign * 0.1 * (per_row - expected))
    assert measured["held_out_loss"] == pytest.approx(float(losses.mean()), rel=1e-3)


def test_the_moving_shift_stays_where_a_batch_has_one_side_alone():
    statistics = BatchStatistics(CASES["bco"])
    statistics.update({"chosen_reward": 2.0})
    assert statistics.delta == 0.0
    statistics.update({"chosen_reward": 2.0, "rejected_reward": 1.0})
    assert statistics.delta == pytest.approx(0.1 * 1.5)
