"""Dialects without the libraries: what is known to differ, in numbers worked out by hand; tests/peers has the rest."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_fn import dialects
from rl_fn.objectives.batch import Batch, Rollouts

LIBRARIES = (dialects.trl, dialects.verl, dialects.openrlhf, dialects.tunix, dialects.nemo_rl)
MASK = np.array([[True, True, True, False], [True, True, True, True], [False, False, False, False]])
# Settings whose objective has every kind of piece: KL, entropy, corrections, gates, aggregations apart.
RICH = [
    (dialects.trl, {"loss_type": "grpo", "beta": 0.1, "entropy_coef": 0.1, "top_entropy_quantile": 0.5}),
    (dialects.trl, {"loss_type": "vespo", "use_vllm": True, "vllm_importance_sampling_mode": "token_mask"}),
    (dialects.trl, {"use_vllm": True, "off_policy_mask_threshold": 0.1, "importance_sampling_level": "sequence"}),
    (dialects.verl, {"actor": {"policy_loss": {"loss_mode": "geo_mean"}, "use_kl_loss": True, "entropy_coeff": 0.1}}),
    (dialects.verl, {"actor.policy_loss.loss_mode": "dppo_kl", "actor.loss_agg_mode": "seq-mean-token-sum-norm"}),
    (
        dialects.openrlhf,
        {"algo.advantage.is_correction_level": "seq", "algo.advantage.is_correction_gating": "tv"}
        | {
            "algo.advantage.is_correction_threshold": [0.3],
            "algo.kl.use_loss": True,
            "algo.kl.unbiased_gradient": True,
        },
    ),
    (dialects.tunix, {"loss_algo": "gspo-token", "sampler_is": "token", "kl_clamp_value": 0.5}),
    (
        dialects.nemo_rl,
        {"loss_fn.use_importance_sampling_correction": True}
        | {"loss_fn.truncated_importance_sampling_type": "seq-mask-tis"}
        | {"loss_fn.truncated_importance_sampling_ratio": 2.0, "loss_fn.truncated_importance_sampling_ratio_min": 0.5},
    ),
]


def batch(fill: float = 0.0, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    new = np.where(MASK, -rng.gamma(2.0, 0.5, MASK.shape) - 0.05, fill)
    old, rollout, ref = (np.where(MASK, np.minimum(new + rng.normal(0, 0.3, MASK.shape), -0.01), fill) for _ in "abc")
    advantages = np.where(MASK, rng.normal(size=MASK.shape), fill)
    entropies = np.where(MASK, rng.gamma(2.0, 0.5, MASK.shape), fill)
    arrays = (new, old, advantages, rollout, ref, entropies)
    new, old, advantages, rollout, ref, entropies = (jnp.asarray(x, jnp.float32) for x in arrays)
    return Batch(new, old, advantages, jnp.asarray(MASK), rollout, ref, entropies)


@functools.partial(jax.jit, static_argnums=0)
def loss_and_gradient(objective, b: Batch):
    return jax.value_and_grad(lambda x: objective(b._replace(logprobs=x))[0])(b.logprobs)


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_unknown_option_is_named_with_the_known_ones(library):
    with pytest.raises(ValueError, match=r"no such option clip_rangee; the known ones: .*(epsilon|clip)"):
        library({"clip_rangee": 0.2})


@pytest.mark.parametrize(
    ("library", "option", "value"),
    [
        (dialects.trl, "loss_type", "ppo"),
        (dialects.verl, "actor.policy_loss.loss_mode", "grpo"),
        (dialects.openrlhf, "algo.kl.estimator", "k4"),
        (dialects.tunix, "loss_agg_mode", "token_mean"),
        (dialects.nemo_rl, "loss_fn.truncated_importance_sampling_type", "mis"),
    ],
)
def test_an_unknown_value_is_named_with_the_known_ones(library, option, value):
    with pytest.raises(ValueError, match=f"must be one of .*got '{value}'"):
        library({option: value})


@pytest.mark.parametrize(("library", "options"), RICH)
def test_what_is_masked_reaches_neither_value_nor_gradient(library, options):
    objective = library(options)
    clean, dirty = loss_and_gradient(objective, batch()), loss_and_gradient(objective, batch(fill=float("nan")))
    assert np.isfinite(clean[0]) and np.any(clean[1] != 0)
    np.testing.assert_array_equal(dirty[0], clean[0])
    np.testing.assert_array_equal(dirty[1], clean[1])


def test_an_objective_is_a_static_argument_of_jit():
    one, two = dialects.verl({}), dialects.verl({"actor.clip_ratio_c": 4.0})
    assert hash(one) == hash(dialects.verl({})) and one == dialects.verl({}) and one != two
    run = jax.jit(lambda objective, b: objective(b)[0], static_argnums=0)
    np.testing.assert_allclose(run(one, batch()), one(batch())[0], rtol=1e-6)


def one_reward(library, options, rewards):
    rewards = jnp.asarray(rewards, jnp.float32)
    return np.asarray(library(options).advantages(Rollouts(rewards, jnp.ones((*rewards.shape, 1), bool))).advantages)[
        ..., 0
    ]


def test_a_group_of_one():
    grpo = {"algorithm.adv_estimator": "grpo"}
    assert one_reward(dialects.trl, {}, [[0.7]]) == 0
    assert one_reward(dialects.nemo_rl, {}, [[0.7]]) == 0
    np.testing.assert_allclose(one_reward(dialects.verl, grpo, [[0.7]]), 0.7, rtol=1e-5)
    with pytest.raises(ValueError, match="n_samples_per_prompt"):
        options = {"algo.advantage.estimator": "group_norm", "algo.kl.init_coef": 0.0}
        one_reward(dialects.openrlhf, options, [[0.7]])
    with pytest.raises(ValueError, match="num_generations"):
        one_reward(dialects.tunix, {}, [[0.7]])


def test_the_eps_of_the_standard_deviation():
    """Rewards ±1e-3 have the unbiased standard deviation √2·1e-3."""
    small, std = [[1e-3, -1e-3]], np.sqrt(2.0) * 1e-3
    group_norm = {"algo.advantage.estimator": "group_norm", "algo.kl.init_coef": 0.0}
    of = {
        1e-4: one_reward(dialects.trl, {}, small),
        1e-6: one_reward(dialects.verl, {"algorithm.adv_estimator": "grpo"}, small),
        1e-9: one_reward(dialects.openrlhf, group_norm, small),
    }
    for eps, advantages in of.items():
        np.testing.assert_allclose(advantages, [[1e-3 / (std + eps), -1e-3 / (std + eps)]], rtol=1e-6)


def test_nemo_rl_leaves_the_answer_out_of_mean_and_std():
    rewards = np.array([0.1, 0.9, 0.4, 0.4])
    others = [np.delete(rewards, i) for i in range(4)]
    expected = [(r - o.mean()) / (o.std(ddof=1) + 1e-6) for r, o in zip(rewards, others, strict=True)]
    np.testing.assert_allclose(one_reward(dialects.nemo_rl, {}, rewards), expected, rtol=1e-5)


def test_cispo_caps_the_ratio_itself_in_trl_and_its_offset_in_verl():
    three = jnp.full((1, 1), jnp.log(3.0))
    b = Batch(three - 4.0, jnp.zeros((1, 1)) - 4.0, jnp.ones((1, 1)), jnp.ones((1, 1), bool))
    minus_log = 4.0 - np.log(3.0)
    trl = dialects.trl({"loss_type": "cispo", "epsilon_high": 0.5})(b)[0]
    verl = dialects.verl({"actor.policy_loss.loss_mode": "cispo", "actor.clip_ratio_high": 0.5})(b)[0]
    np.testing.assert_allclose([trl, verl], [0.5 * minus_log, 1.5 * minus_log], rtol=1e-6)


def test_a_fully_masked_row_counts_in_trl_and_not_in_verl():
    b = batch()._replace(old_logprobs=batch().logprobs)
    sums = np.where(MASK, -np.asarray(b.advantages), 0.0).sum(axis=1) / np.array([3, 4, 1])
    trl = dialects.trl({"loss_type": "grpo"})(b)[0]
    verl = dialects.verl({"actor.loss_agg_mode": "seq-mean-token-mean"})(b)[0]
    np.testing.assert_allclose([trl, verl], [sums.sum() / 3, sums.sum() / 2], rtol=1e-5)


def test_verl_holds_log_ratios_at_20_and_k3_at_10():
    one = jnp.ones((1, 1))
    far = Batch(one * -1.0, one * -41.0, -one, one > 0, ref_logprobs=one * -1.0)
    assert dialects.verl({})(far)[0] == 3.0
    no_dual = dialects.verl({"actor.clip_ratio_c": 1e30})
    np.testing.assert_allclose(no_dual(far)[0], np.exp(20.0), rtol=1e-6)
    low = far._replace(old_logprobs=far.logprobs, advantages=one * 0.0, ref_logprobs=one * 8.0)
    assert dialects.verl({"actor.use_kl_loss": True, "actor.kl_loss_coef": 1.0})(low)[0] == 10.0


def test_openrlhf_averages_the_kl_over_tokens_beside_a_policy_loss_over_sequences():
    options = {"actor.loss_agg_mode": "seq-mean-token-mean", "algo.kl.use_loss": True, "algo.kl.init_coef": 1.0}
    b = batch()._replace(advantages=jnp.zeros(MASK.shape))
    d = np.asarray(b.logprobs - b.ref_logprobs)
    objective = dialects.openrlhf({**options, "algo.kl.estimator": "k2"})
    np.testing.assert_allclose(objective(b)[0], 0.5 * (d[MASK] ** 2).mean(), rtol=1e-5)
    assert "kl averaged by token-mean" in objective.explain()


def test_a_kl_in_the_reward_needs_log_probabilities_and_is_taken_off_every_token():
    objective = dialects.openrlhf({"algo.advantage.estimator": "rloo", "algo.kl.init_coef": 0.5})
    rewards, mask = jnp.array([1.0, 0.0]), jnp.array([[True, True], [True, False]])
    with pytest.raises(ValueError, match=r"needs Rollouts\.old_logprobs"):
        objective.advantages(Rollouts(rewards, mask))
    old, ref = jnp.full((2, 2), -1.0), jnp.full((2, 2), -3.0)
    read = Rollouts(rewards, mask, old_logprobs=old, ref_logprobs=ref)
    out = objective.advantages(read).advantages
    np.testing.assert_allclose(out, [[1.0 - 2.0, 1.0 - 1.0], [-1.0 - 1.0, 0.0]], atol=1e-6)
    np.testing.assert_allclose(objective.token_rewards(read), [[-1.0, 0.0], [-1.0, 0.0]], atol=1e-6)


def test_tunix_and_verl_divide_by_the_padded_width():
    b = batch()._replace(old_logprobs=batch().logprobs)
    total = -np.asarray(b.advantages)[MASK].sum()
    tunix = dialects.tunix({"loss_agg_mode": "sequence-mean-token-scale", "beta": 0.0})(b)[0]
    verl = dialects.verl({"actor.loss_agg_mode": "seq-mean-token-sum-norm"})(b)[0]
    np.testing.assert_allclose([tunix, verl], [total / 2 / 4] * 2, rtol=1e-5)
