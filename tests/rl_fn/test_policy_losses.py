"""What the policy losses promise each other, and gradients that are no derivative of the value."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rl_fn
from tests.rl_fn.laws import quick_jit
from tests.rl_fn.registry import Draw

SEEDS = st.integers(0, 2**32 - 1)


@functools.cache
def _compiled(loss, static):
    def total(x, args, arrays):
        values = loss(x, *args, **arrays, **dict(static))
        return jnp.sum(values), values

    return quick_jit(jax.grad(total, has_aux=True))


def value_and_gradient(loss, logprobs, *args, **options):
    """Losses, and the gradient of their sum in the log-probabilities."""
    arrays = {k: v for k, v in options.items() if isinstance(v, np.ndarray)}
    static = tuple((k, v) for k, v in options.items() if k not in arrays)
    gradient, values = _compiled(loss, static)(jnp.asarray(logprobs), args, arrays)
    return np.asarray(values), np.asarray(gradient)


@given(seed=SEEDS)
def test_at_ratio_one_gradients_are_those_of_reinforce(seed):
    d = Draw(seed)
    new, a, mask = d.logprobs(), d.normal(), d.mask()
    expected = np.where(mask, -a, 0.0)
    for loss, options in (
        (rl_fn.ppo_clip, {}),
        (rl_fn.sapo, {"tau_pos": 0.5, "tau_neg": 3.0}),
        (rl_fn.cispo, {"clip_high": 0.2}),
        (rl_fn.dppo, {"threshold": 0.1}),
        (rl_fn.topr, {}),
        (rl_fn.vespo, {}),
        (rl_fn.dro, {"beta": 0.3}),
        (rl_fn.gspo_token, {}),
    ):
        _, gradient = value_and_gradient(loss, new, new, a, mask, **options)
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6, err_msg=loss.__name__)


@pytest.mark.parametrize(("advantage", "far"), [(1.0, 0.5), (-1.0, -0.5)])
def test_ppo_is_flat_beyond_the_clip(advantage, far):
    a = jnp.array([advantage])
    value, gradient = value_and_gradient(rl_fn.ppo_clip, jnp.array([far - 3.0]), jnp.array([-3.0]), a)
    assert gradient.tolist() == [0.0]
    np.testing.assert_allclose(value, -a * (1.2 if far > 0 else 0.8), rtol=1e-6)


@given(seed=SEEDS)
def test_gspo_of_one_token_is_ppo(seed):
    d = Draw(seed)
    new, old, a, mask = d.logprobs(5, 1), d.logprobs(5, 1), d.normal(5, 1), d.mask(5, 1)
    clips = {"clip_low": 0.3, "clip_high": 0.4}
    expected = value_and_gradient(rl_fn.ppo_clip, new, old, a, mask, **clips)
    for loss in (rl_fn.gspo, rl_fn.gspo_token, rl_fn.luspo):
        for x, y in zip(value_and_gradient(loss, new, old, a, mask, **clips), expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@given(seed=SEEDS, packed=st.booleans())
def test_gspo_token_is_gspo_when_a_sequence_has_one_advantage(seed, packed):
    d = Draw(seed)
    new, old, mask = d.logprobs(), d.logprobs(), d.mask()
    ids = d.segments() if packed else np.zeros_like(mask, np.int32)
    a = d.normal()[np.arange(len(ids))[:, None], ids]
    options = {"segment_ids": ids, "clip_low": 0.3, "clip_high": 0.4}
    whole = value_and_gradient(rl_fn.gspo, new, old, a, mask, **options)
    token = value_and_gradient(rl_fn.gspo_token, new, old, a, mask, **options)
    for x, y in zip(whole, token, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@given(seed=SEEDS)
def test_cispo_unclipped_has_the_importance_weighted_gradient(seed):
    d = Draw(seed)
    new, old, a, mask = d.logprobs(), d.logprobs(), d.normal(), d.mask()
    _, gradient = value_and_gradient(rl_fn.cispo, new, old, a, mask, clip_high=1e6)
    np.testing.assert_allclose(gradient, np.where(mask, -np.exp(new - old) * a, 0.0), rtol=1e-5, atol=1e-6)


@given(seed=SEEDS)
def test_decoupled_ppo_around_the_rollout_policy_is_ppo(seed):
    d = Draw(seed)
    new, old, a, mask = d.logprobs(), d.logprobs(), d.normal(), d.mask()
    one = value_and_gradient(rl_fn.decoupled_ppo, new, old, old, a, mask)
    for x, y in zip(one, value_and_gradient(rl_fn.ppo_clip, new, old, a, mask), strict=True):
        np.testing.assert_array_equal(x, y)


def test_held_ratio_of_dppo_keeps_a_gradient():
    new, old = jnp.log(jnp.array([0.04])), jnp.log(jnp.array([0.01]))
    value, gradient = value_and_gradient(rl_fn.dppo, new, old, jnp.ones(1), threshold=0.1, ratio_cap=2.0)
    np.testing.assert_allclose([value, gradient], [[-2.0], [-2.0]], rtol=1e-6)


FAR = {
    "sapo": {},
    "cispo": {"clip_high": 0.2},
    "dppo": {"threshold": 0.1},
    "gspo": {},
    "gspo_token": {},
    "luspo": {},
    "gmpo": {},
    "vespo": {},
    "dro": {"beta": 0.1},
    "kimi": {"tau": 0.1, "level": "sequence_sum"},
    "topr": {},
}


@pytest.mark.parametrize("gap", [100.0, -100.0])
@pytest.mark.parametrize("name", sorted(FAR))
def test_log_ratios_of_a_hundred_are_finite(name, gap):
    new, old = (np.full((2, 3), min(0.0, x), np.float32) for x in (gap, -gap))
    a = np.array([[1.0] * 3, [-1.0] * 3], np.float32)
    results = value_and_gradient(getattr(rl_fn, name), new, old, a, np.ones((2, 3), bool), **FAR[name])
    assert all(np.isfinite(x).all() for x in results)


def test_named_clamps_bound_what_the_formulas_leave_unbounded():
    far = jnp.array([-300.0])
    explodes = value_and_gradient(rl_fn.decoupled_ppo, jnp.zeros(1), far / 2, far, -jnp.ones(1))
    assert not np.isfinite(explodes).all()
    capped = value_and_gradient(
        rl_fn.decoupled_ppo, jnp.zeros(1), far / 2, far, -jnp.ones(1), dual_clip=3.0, weight_cap=2.0
    )
    np.testing.assert_allclose(capped, [[6.0], [0.0]])
    new, old, ref = jnp.array([-100.0]), jnp.array([-200.0]), jnp.zeros(1)
    assert not np.isfinite(value_and_gradient(rl_fn.kl_importance_corrected, new, old, ref)).all()
    assert np.isfinite(value_and_gradient(rl_fn.kl_importance_corrected, new, old, ref, log_clip=20.0)).all()
