"""An Objective's steps on one small batch, by hand, and each combination of pieces that is refused beside its like."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rl_fn
from rl_fn import components as p
from rl_fn.objectives.batch import detached, sanitised
from rl_fn.objectives.objective import Objective

MASK = jnp.array([[True, True, False], [True, False, False]])
NEW = jnp.array([[-1.0, -2.0, jnp.nan], [-3.0, jnp.inf, 0.0]])
A = jnp.array([[2.0, -1.0, jnp.nan], [0.5, 9.0, 9.0]])
BATCH: Any = rl_fn.Batch(NEW, NEW - 0.5, A, MASK, NEW - 0.25, NEW - 1.0, -NEW, values=A * 2, returns=A * 3)
TOKENS = p.Aggregation("token-sum")


def reinforce(**pieces: Any) -> Objective:
    return Objective("it", p.RawReward(), p.Reinforce(), TOKENS).replace(**pieces)


def double(of: rl_fn.Batch) -> Any:
    return jnp.full_like(of.logprobs, 2.0)


# −A log π on the counted tokens: 2, −2 and 1.5.
LOSS = 1.5


def test_a_loss_and_its_terms():
    assert reinforce()(BATCH)[0] == LOSS
    assert reinforce(kl=p.KL("k1", 0.5))(BATCH)[0] == LOSS + 0.5 * 3
    assert reinforce(entropy=p.EntropyBonus(0.5))(BATCH)[0] == LOSS - 0.5 * 6
    assert reinforce(correction=double)(BATCH)[0] == 2 * LOSS
    assert reinforce(correction=lambda of: 0.0 * double(of))(BATCH)[0] == 0.0
    assert reinforce(entropy_aggregation=TOKENS)(BATCH)[0] == LOSS
    assert reinforce()(BATCH, denominator=4)[0] == LOSS / 4
    assert reinforce(aggregation=p.Aggregation("token-mean"))(BATCH)[0] == LOSS / 3


def test_metrics_are_those_of_what_the_batch_has():
    always = {"ratio_mean", "approx_kl", "policy_loss"}
    bare = BATCH._replace(rollout_logprobs=None, ref_logprobs=None, entropies=None)
    assert reinforce()(bare)[1].keys() == always
    assert reinforce()(BATCH)[1].keys() == always | {"kl", "entropy", "mismatch_k3"}
    assert reinforce(loss=p.PPOClip())(bare)[1].keys() == always | {"clip_fraction"}
    metrics = reinforce(correction=double, kl=p.KL("k1", 0.5), loss=p.PPOClip())(BATCH)[1]
    expected = {
        "correction_weight": 2.0,
        "kl": 1.0,
        "entropy": 2.0,
        "ratio_mean": np.exp(0.5),
        "approx_kl": np.exp(0.5) - 1.5,
        "mismatch_k3": np.exp(-0.25) - 0.75,
        "clip_fraction": 2 / 3,
        "policy_loss": 2 * (-2 * 1.2 + 1 * np.exp(0.5) - 0.5 * 1.2),
    }
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    # Without a KL term the metric is k3.
    np.testing.assert_allclose(reinforce()(BATCH)[1]["kl"], np.exp(-1.0), rtol=1e-5)


def test_gradients_reach_the_policy_and_the_entropies_alone():
    objective = reinforce(
        kl=p.KL("k1", 0.5), entropy=p.EntropyBonus(0.25), correction=lambda b: jnp.exp(0.0 * b.advantages)
    )
    clean = sanitised(BATCH)
    fields = ("logprobs", "entropies", "old_logprobs", "advantages", "ref_logprobs", "rollout_logprobs")

    def total(x, metric=None):
        loss, metrics = objective(clean._replace(**x))
        return loss if metric is None else metrics[metric]

    at = {name: getattr(clean, name) for name in fields}
    gradient = jax.grad(total)(at)
    np.testing.assert_allclose(gradient["logprobs"], np.where(MASK, 0.5 - np.nan_to_num(A), 0.0), rtol=1e-6)
    np.testing.assert_allclose(gradient["entropies"], np.where(MASK, -0.25, 0.0), rtol=1e-6)
    assert not any(gradient[name].any() for name in fields[2:])
    for metric in ("policy_loss", "kl", "ratio_mean", "entropy"):
        assert not any(x.any() for x in jax.grad(total)(at, metric).values())


def test_what_an_objective_reads():
    assert reinforce().required_batch_fields == () and reinforce().required_rollout_fields == ("rewards",)
    assert reinforce(kl=p.KL("k1", 0.5)).required_batch_fields == ("ref_logprobs",)
    assert reinforce(entropy=p.EntropyBonus(0.5)).required_batch_fields == ("entropies",)
    assert reinforce(correction=lambda b: b.mask).required_batch_fields == ("rollout_logprobs",)
    assert reinforce(correction=p.M2POMask()).required_batch_fields == ()
    assert reinforce(loss=p.PositiveExample()).required_batch_fields == ("correct",)
    assert reinforce(advantage=p.GAE()).required_rollout_fields == ("rewards", "values")
    assert reinforce(advantage=p.ReMaxAdvantage()).required_rollout_fields == ("rewards", "greedy_rewards")
    kl = p.KL("k1", 0.5)
    assert reinforce(reward_kl=kl).required_rollout_fields == ("rewards", "old_logprobs", "ref_logprobs")


@pytest.mark.parametrize("field", ["ref_logprobs", "entropies", "rollout_logprobs"])
def test_what_a_batch_lacks_is_named(field):
    pieces = {
        "ref_logprobs": {"kl": p.KL("k1", 0.5)},
        "entropies": {"entropy": p.EntropyBonus(0.5)},
        "rollout_logprobs": {"correction": lambda b: b.mask * 1.0},
    }
    lacking = BATCH._replace(**{field: None})
    with pytest.raises(ValueError, match=f"needs batch.{field}; it is None"):
        reinforce(**pieces[field])(lacking)
    assert reinforce()(lacking)[0] == LOSS
    reinforce(**pieces[field]).check(BATCH)


REWARDS, OLD, REF = jnp.array([4.0, 2.0]), jnp.zeros((2, 3)), jnp.full((2, 3), -1.0)


def test_a_penalty_in_the_reward():
    kl = reinforce(reward_kl=p.KL("k1", 0.5))
    both: Any = {"old_logprobs": OLD, "ref_logprobs": REF}
    read = rl_fn.Rollouts(REWARDS, MASK, **both)
    np.testing.assert_array_equal(kl.advantages(read).advantages, [[3.0, 3.0, 0.0], [1.5, 0.0, 0.0]])
    np.testing.assert_array_equal(reinforce().advantages(read).advantages, [[4.0, 4.0, 0.0], [2.0, 0.0, 0.0]])
    np.testing.assert_array_equal(kl.token_rewards(read), [[-0.5, 3.5, 0.0], [1.5, 0.0, 0.0]])
    for lacking in ("old_logprobs", "ref_logprobs"):
        with pytest.raises(ValueError, match=rf"Rollouts\.{lacking}; it is None"):
            kl.advantages(read._replace(**{lacking: None}))
        with pytest.raises(ValueError, match="give old_logprobs and ref_logprobs"):
            kl.token_rewards(read._replace(**{lacking: None}))
    # REINFORCE++ takes it off each token, before the returns.
    whitened = kl.replace(advantage=p.ReinforcePPAdvantage())
    got = whitened.advantages(read).advantages
    plain = whitened.replace(reward_kl=None)
    expected = plain.advantages(rl_fn.Rollouts(REWARDS, MASK, token_rewards=kl.token_rewards(read)))
    np.testing.assert_allclose(got, expected.advantages, rtol=1e-6)
    assert not np.allclose(got, plain.advantages(read).advantages)


def test_a_critic_and_its_loss():
    critic = reinforce(advantage=p.GAE(whiten=False), value=p.ValueLoss())
    loss, metrics = critic.value_parts(BATCH)
    # (V − R)² = A² on the counted tokens, by the objective's aggregation; metrics are means.
    assert loss.value() == 4.0 + 1.0 + 0.25
    assert {name: float(x.value()) for name, x in metrics.items()} == {
        "values": 2 * LOSS / 3,
        "returns": 3 * LOSS / 3,
        "value_loss": 5.25 / 3,
    }
    moved = jax.grad(lambda v: critic.value_parts(BATCH._replace(values=v))[0].value())(BATCH.values)
    np.testing.assert_array_equal(moved, np.where(MASK, -2 * np.nan_to_num(A), 0.0))
    fixed = jax.grad(lambda v: critic.value_parts(BATCH._replace(returns=v))[0].value())(BATCH.returns)
    assert not fixed.any()
    assert not jax.grad(lambda v: critic.value_parts(BATCH._replace(values=v))[1]["values"].value())(BATCH.values).any()
    with pytest.raises(ValueError, match=r"no critic's loss: give value=ValueLoss"):
        reinforce().value_parts(BATCH)
    with pytest.raises(ValueError, match=r"needs batch.returns; it is None"):
        critic.value_parts(BATCH._replace(returns=None))
    with pytest.raises(ValueError, match=r"needs Rollouts\.values"):
        critic.advantages(rl_fn.Rollouts(REWARDS, MASK))
    read = rl_fn.Rollouts(None, MASK, token_rewards=OLD + 1.0, values=OLD)
    np.testing.assert_allclose(critic.advantages(read).returns, [[1.95, 1.0, 0.0], [1.0, 0.0, 0.0]], rtol=1e-6)


def test_denominators_are_counted_over_the_mask():
    assert reinforce(aggregation=p.Aggregation("token-mean")).denominator(MASK) == 3.0
    packed = jnp.array([[0, 1, 1]], jnp.int32)
    sequences = reinforce(aggregation=p.Aggregation("seq-mean-token-sum"))
    assert sequences.denominator(MASK[:1], packed) == 2.0 and sequences.denominator(MASK[:1]) == 1.0


def test_what_is_not_strict_is_not_refused():
    terms: Any = {"kl": p.KL("k1", 0.1), "reward_kl": p.KL("k1", 0.1)}
    assert Objective("it", p.RawReward(), p.Reinforce(), TOKENS, **terms, strict=False).kl == p.KL("k1", 0.1)
    with pytest.raises(ValueError, match="penalises it twice"):
        Objective("it", p.RawReward(), p.Reinforce(), TOKENS, **terms)


KL, TIS, GSPO = p.KL("k1", 0.1), p.TIS(), p.GSPO()
ANSWERS = p.Aggregation("seq-mean-token-mean")
# Refused with the reason, and what is like it and is not.
REFUSED = [
    ({"loss": GSPO, "aggregation": p.Aggregation("token-mean")}, "weight wrongly", {"aggregation": ANSWERS}),
    ({"loss": GSPO, "aggregation": ANSWERS, "advantage": p.GAE()}, "the whole completion", {"loss": p.GSPOToken()}),
    (
        {"loss": GSPO, "aggregation": ANSWERS, "advantage": p.ReinforcePPAdvantage(), "reward_kl": KL},
        "the whole completion",
        {"reward_kl": None},
    ),
    (
        {"loss": GSPO, "aggregation": ANSWERS, "advantage": p.ReinforcePPAdvantage(0.9)},
        "the whole completion",
        {"advantage": p.ReinforcePPAdvantage(1.0)},
    ),
    ({"loss": p.DPPO(), "correction": TIS}, "count it twice", {"correction": p.M2POMask()}),
    ({"loss": p.DPPO(), "correction": TIS}, "count it twice", {"loss": p.DPPO(behaviour="old")}),
    ({"kl": KL, "reward_kl": KL}, "penalises it twice", {"kl": None}),
    ({"kl": KL, "reward_kl": KL}, "penalises it twice", {"reward_kl": None}),
    ({"advantage": p.GDPOAdvantage(), "reward_kl": KL}, "cannot hold", {"reward_kl": None}),
    ({"advantage": p.GDPOAdvantage(), "reward_kl": KL}, "cannot hold", {"advantage": p.ReinforcePPBaselineAdvantage()}),
    ({"advantage": p.RawReward(), "value": p.ValueLoss()}, "trains a critic", {"advantage": p.GAE()}),
    ({"advantage": p.RawReward(), "value": p.ValueLoss()}, "trains a critic", {"value": None}),
]
NOTHING: dict[str, Any] = {"name": "it", "advantage": p.RawReward(), "loss": p.Reinforce(), "aggregation": TOKENS}
NOTHING |= {"kl": None, "correction": None, "reward_kl": None, "value": None}


@pytest.mark.parametrize(("pieces", "reason", "instead"), REFUSED)
def test_refused_beside_its_like(pieces, reason, instead):
    with pytest.raises(ValueError, match=reason):
        Objective(**{**NOTHING, **pieces})
    Objective(**{**NOTHING, **pieces, **instead})


def test_plain_functions_are_refused_nothing():
    Objective(**{**NOTHING, "loss": len, "advantage": len, "correction": len, "reward_kl": KL})
    Objective(**{**NOTHING, "loss": len, "advantage": p.GAE(), "correction": TIS, "kl": KL})


def test_sanitised_and_detached():
    clean = sanitised(BATCH._replace(correct=jnp.ones((2, 3), bool)))
    np.testing.assert_array_equal(clean.correct, MASK)
    np.testing.assert_array_equal(clean.logprobs, [[-1.0, -2.0, 0.0], [-3.0, 0.0, 0.0]])

    def through(x):
        stopped = detached(clean._replace(logprobs=x, values=x), except_for=("values",))
        return jnp.sum(stopped.logprobs + 2.0 * jnp.asarray(stopped.values))

    np.testing.assert_array_equal(jax.grad(through)(clean.logprobs), np.full((2, 3), 2.0))


def test_dynamic_sampling_takes_no_token_in():
    rollouts = rl_fn.Rollouts(jnp.array([[1.0, 0.0], [1.0, 1.0]]), jnp.array([[[True, False]] * 2] * 2))
    chosen = rl_fn.recipes.dapo().selection(rollouts, jnp.ones((2, 2, 2)))
    assert chosen.mask.tolist() == [[[True, False]] * 2, [[False, False]] * 2]
    assert chosen.rows.tolist() == [[True, True], [False, False]]
