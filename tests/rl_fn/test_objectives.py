"""Objectives in detail, for six recipes; the laws of all are in test_recipes.py, of components in
test_compatibility.py."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rl_fn
from tests.oracle.lookup import ORACLE
from tests.rl_fn.laws import quick_jit
from tests.rl_fn.registry import Draw

EVERYTHING = {
    "kl": rl_fn.components.KL("k3", 0.1),
    "entropy": rl_fn.components.EntropyBonus(0.01),
    "correction": rl_fn.components.TIS(2.0),
}
OBJECTIVES = {
    name: getattr(rl_fn.recipes, name)().replace(**EVERYTHING)
    for name in ("reinforce", "ppo", "grpo", "dapo", "dr_grpo", "rloo")
}
OBJECTIVES["dr_grpo-max_completion_length"] = rl_fn.recipes.dr_grpo(max_completion_length=16).replace(**EVERYTHING)
OBJECTIVES["dapo-masked"] = rl_fn.recipes.dapo().replace(
    **EVERYTHING | {"correction": rl_fn.components.IcePop(0.3, 4.0)}
)
# One of each loss, aggregation and correction: ppo and rloo differ from these in their advantages alone.
DISTINCT = ["reinforce", "grpo", "dr_grpo-max_completion_length", "dapo", "dapo-masked"]
SHAPE = (8, 5)


class Outcome(NamedTuple):
    loss: jax.Array
    metrics: dict[str, jax.Array]
    gradient: jax.Array
    parts: tuple[rl_fn.Ratio, dict[str, rl_fn.Ratio]]


@functools.partial(quick_jit, static_argnums=0)
def _run(objective: rl_fn.Objective, batch: rl_fn.Batch, count: jax.Array | None = None) -> Outcome:
    def loss(x):
        changed = batch._replace(logprobs=x)
        value, metrics = objective(changed, denominator=count)
        return value, (metrics, objective.parts(changed))

    (value, (metrics, parts)), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(batch.logprobs))
    return Outcome(value, metrics, gradient, parts)


def _batch(seed: int = 0, shape: tuple[int, int] = SHAPE) -> rl_fn.Batch:
    d = Draw(seed)
    logprobs = d.logprobs(*shape)
    near = [logprobs + d.normal(*shape, scale=0.3) for _ in range(3)]
    return rl_fn.Batch(logprobs, near[0], d.normal(*shape), d.mask(*shape), near[1], near[2], d.positive(*shape))


def _sliced(batch: rl_fn.Batch, rows) -> rl_fn.Batch:
    return rl_fn.Batch(*(x if x is None else x[rows] for x in batch))


@pytest.mark.parametrize("name", DISTINCT)
def test_micro_batches_add_up_to_the_whole(name):
    """Loss, metrics and gradient."""
    objective, batch = OBJECTIVES[name], _batch(1)
    count = objective.denominator(batch.mask)
    whole = _run(objective, batch, count)
    cuts = [_run(objective, _sliced(batch, slice(i, i + 2)), count) for i in (0, 2, 4, 6)]
    np.testing.assert_allclose(sum((cut.parts[0] for cut in cuts), start=0).value(), whole.loss, rtol=1e-5)
    for metric, value in whole.metrics.items():
        added = sum((cut.parts[1][metric] for cut in cuts), start=0)
        np.testing.assert_allclose(added.value(), value, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(sum(float(cut.loss) for cut in cuts), whole.loss, rtol=1e-5)
    np.testing.assert_allclose(np.concatenate([cut.gradient for cut in cuts]), whole.gradient, rtol=1e-5, atol=1e-8)
    assert np.asarray(whole.gradient).any()


@pytest.mark.long
@pytest.mark.parametrize("name", ["grpo", "dr_grpo-max_completion_length", "dapo"])
def test_a_packed_batch_is_the_padded_one(name):
    objective, batch = OBJECTIVES[name], _batch(2, (3, 4))
    ids = np.repeat(np.arange(3, dtype=np.int32), 4)[None]
    packed = rl_fn.Batch(*(x if x is None else x.reshape(1, -1) for x in batch[:7]), segment_ids=ids)
    one, other = _run(objective, batch, None), _run(objective, packed, None)
    for a, b in zip(
        jax.tree.leaves((one.loss, one.metrics)), jax.tree.leaves((other.loss, other.metrics)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(other.gradient, one.gradient.reshape(1, -1), rtol=1e-5, atol=1e-8)
    assert float(objective.denominator(batch.mask)) == float(objective.denominator(packed.mask, ids))


@pytest.mark.parametrize("name", DISTINCT)
def test_junk_at_masked_positions_is_harmless(name):
    objective, batch = OBJECTIVES[name], _batch(3)
    junk = np.random.default_rng(0).choice(np.array([np.nan, np.inf, -np.inf], np.float32), size=SHAPE)
    dirty = rl_fn.Batch(*(x if x is None or x is batch.mask else np.where(batch.mask, x, junk) for x in batch))
    outcomes = [_run(objective, b, None) for b in (batch, dirty)]
    for a, b in zip(*map(jax.tree.leaves, outcomes), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.asarray(outcomes[1].gradient)[~batch.mask].any()


def test_jit_takes_the_objective_as_function_and_as_static_argument():
    objective, batch = OBJECTIVES["dapo"], _batch(4)
    eager = objective(batch)[0]
    np.testing.assert_allclose(jax.jit(objective)(batch)[0], eager, rtol=1e-6)
    np.testing.assert_allclose(_run(objective, batch).loss, eager, rtol=1e-6)


def test_objectives_compare_by_value_and_pieces_by_class():
    assert rl_fn.recipes.grpo() == rl_fn.recipes.grpo() != rl_fn.recipes.grpo(clip_high=0.3)
    assert hash(rl_fn.recipes.grpo()) == hash(rl_fn.recipes.grpo())
    of_groups, of_batch = rl_fn.components.RLOOAdvantage(), rl_fn.components.OPOAdvantage()
    assert of_groups != of_batch
    a, b = (rl_fn.recipes.rloo().replace(advantage=advantage) for advantage in (of_groups, of_batch))
    assert a != b
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.loss = rl_fn.components.PPOClip()


def test_the_dapo_loss_is_its_equation():
    batch = _batch(5)
    per_token = ORACLE["ppo_clip"](*batch[:4], clip_low=0.2, clip_high=0.28)
    loss, metrics = _run(rl_fn.recipes.dapo(), batch)[:2]
    np.testing.assert_allclose(loss, ORACLE["aggregate"](per_token, batch.mask, "token-mean"), rtol=1e-5)
    cut = ORACLE["clipped_tokens"](*batch[:4], clip_low=0.2, clip_high=0.28)
    np.testing.assert_allclose(metrics["clip_fraction"], cut.sum() / batch.mask.sum(), rtol=1e-6)


def test_the_grpo_loss_with_everything_is_its_equation():
    b = _batch(6)
    objective = rl_fn.recipes.grpo().replace(**EVERYTHING | {"kl": rl_fn.components.KL("k3", 0.04)})
    weights = ORACLE["truncated_importance_weights"](b.old_logprobs - b.rollout_logprobs, b.mask, cap=2.0)
    per_token = (
        weights * ORACLE["ppo_clip"](*b[:4]) + 0.04 * ORACLE["kl_k3"](b.logprobs, b.ref_logprobs) - 0.01 * b.entropies
    )
    loss, metrics = _run(objective, b)[:2]
    np.testing.assert_allclose(loss, ORACLE["aggregate"](per_token, b.mask, "seq-mean-token-mean"), rtol=1e-5)
    mean = {
        "kl": ORACLE["kl_k3"](b.logprobs, b.ref_logprobs),
        "entropy": b.entropies,
        "ratio_mean": np.exp(b.logprobs - b.old_logprobs),
        "approx_kl": ORACLE["kl_k3"](b.old_logprobs, b.logprobs),
        "mismatch_k3": ORACLE["kl_k3"](b.rollout_logprobs, b.old_logprobs),
        "correction_weight": weights,
    }
    for metric, x in mean.items():
        np.testing.assert_allclose(
            metrics[metric], ORACLE["aggregate"](x, b.mask, "token-mean"), rtol=2e-5, err_msg=metric
        )


def test_metrics_carry_no_gradient():
    batch = _batch(7)

    def ratio_mean(x):
        return OBJECTIVES["grpo"](batch._replace(logprobs=x))[1]["ratio_mean"]

    assert not quick_jit(jax.grad(ratio_mean))(jnp.asarray(batch.logprobs)).any()


@pytest.mark.parametrize(
    ("term", "missing"), [("kl", "ref_logprobs"), ("entropy", "entropies"), ("correction", "rollout_logprobs")]
)
def test_a_missing_input_is_named(term, missing):
    batch = rl_fn.Batch(*_batch()[:4])
    with pytest.raises(ValueError, match=missing):
        rl_fn.recipes.dapo().replace(**{term: EVERYTHING[term]})(batch)


def test_group_advantages_are_spread_over_tokens():
    d = Draw(8)
    rewards, mask = d.normal(2, 4), d.mask(2, 4, 6)
    got = rl_fn.recipes.grpo().advantages(rl_fn.Rollouts(rewards, mask)).advantages
    np.testing.assert_allclose(
        got, np.where(mask, ORACLE["grpo_advantages"](rewards)[..., None], 0.0), rtol=1e-5, atol=1e-6
    )
    got = rl_fn.recipes.rloo().advantages(rl_fn.Rollouts(rewards, mask)).advantages
    np.testing.assert_allclose(
        got, np.where(mask, ORACLE["rloo_advantages"](rewards)[..., None], 0.0), rtol=1e-5, atol=1e-6
    )
    assert rl_fn.recipes.grpo().advantages(rl_fn.Rollouts(rewards, mask)).returns is None


def test_ppo_takes_a_critic():
    d = Draw(9)
    rewards, values, mask = d.normal(), d.normal(), d.mask()
    read = rl_fn.Rollouts(None, mask, token_rewards=rewards, values=values)
    plain = rl_fn.recipes.ppo(whiten=False, lam=0.9).advantages(read)
    advantages, returns = ORACLE["gae"](rewards, values, mask, lam=0.9)
    np.testing.assert_allclose(plain.advantages, advantages, rtol=1e-4, atol=1e-5)
    whitened = rl_fn.recipes.ppo(lam=0.9).advantages(read)
    np.testing.assert_allclose(whitened.advantages, ORACLE["whiten"](advantages, mask), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(whitened.returns, returns, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"needs Rollouts\.values"):
        rl_fn.recipes.ppo().advantages(rl_fn.Rollouts(None, mask, token_rewards=rewards))


def test_any_function_of_a_batch_can_be_the_loss():
    def cispo(b):
        ratio = jax.lax.stop_gradient(jnp.minimum(jnp.exp(b.logprobs - b.old_logprobs), 1.2))
        return -ratio * b.advantages * b.logprobs

    objective = rl_fn.recipes.dapo().replace(loss=cispo)
    loss, metrics = jax.jit(objective)(_batch())
    assert np.isfinite(loss) and "clip_fraction" not in metrics
    assert "cispo" in objective.explain()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs", "k1+", "k3+"])
def test_kl_estimators_by_name(estimator):
    batch = _batch(10)
    metrics = _run(rl_fn.recipes.dapo().replace(kl=rl_fn.components.KL(estimator, 0.5)), batch).metrics
    x = ORACLE[f"kl_{estimator.rstrip('+')}"](batch.logprobs, batch.ref_logprobs)
    np.testing.assert_allclose(metrics["kl"], ORACLE["aggregate"](x, batch.mask, "token-mean"), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_explanations_hold_the_constants(name):
    text = OBJECTIVES[name].explain()
    assert text.startswith(OBJECTIVES[name].name)
    assert all(part in text for part in ("0.1·kl", "0.01·H", "w ="))


@pytest.mark.parametrize(
    "bad",
    [
        lambda: rl_fn.components.Aggregation("mean"),
        lambda: rl_fn.components.Aggregation("token-mean", 16.0),
        lambda: rl_fn.components.Aggregation("seq-mean-token-sum-norm"),
        lambda: rl_fn.components.PPOClip(clip_low=-0.1),
        lambda: rl_fn.components.PPOClip(dual_clip=0.5),
        lambda: rl_fn.components.KL("k4", 0.1),
        lambda: rl_fn.components.KL("k3", -0.1),
        lambda: rl_fn.components.GAE(lam=1.5),
        lambda: rl_fn.components.EntropyBonus(-1.0),
        lambda: rl_fn.components.TIS(cap=0.0),
        lambda: rl_fn.components.TIS(level="word"),
        lambda: rl_fn.components.IcePop(low=2.0, high=1.0),
        lambda: rl_fn.components.GRPOAdvantage("world"),
        lambda: rl_fn.recipes.dr_grpo(max_completion_length=0),
    ],
)
def test_bad_constants_are_refused(bad):
    with pytest.raises(ValueError, match=r"must|need|goes"):
        bad()
