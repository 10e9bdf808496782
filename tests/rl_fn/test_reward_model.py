"""Comparisons and rankings as distributions, and the metrics of pairs."""

import itertools

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
PLACKETT_LUCE = quick_jit(lambda rewards: rl_fn.plackett_luce(rewards))
BRADLEY_TERRY = quick_jit(lambda c, r: rl_fn.bradley_terry(c, r))


@given(seed=SEEDS)
def test_plackett_luce_is_a_distribution_over_orders(seed):
    rewards = Draw(seed).normal(4, scale=3.0)
    orders = np.array(list(itertools.permutations(rewards)), np.float32)
    losses = np.asarray(PLACKETT_LUCE(orders), np.float64)
    np.testing.assert_allclose(np.exp(-losses).sum(), 1.0, rtol=1e-5)
    np.testing.assert_allclose(PLACKETT_LUCE(orders + np.float32(7)), losses, rtol=1e-4, atol=1e-5)
    pair = BRADLEY_TERRY(rewards[:1], rewards[1:2])
    np.testing.assert_allclose(PLACKETT_LUCE(rewards[None, :2]), pair, rtol=1e-5, atol=1e-6)


def test_plackett_luce_far_out_and_with_ties():
    rewards = jnp.array([[-1e3, 1e3, 0.0], [1e3, 0.0, -1e3], [1.0, 1.0, 1.0]])
    value, slope = jax.value_and_grad(lambda x: rl_fn.plackett_luce(x).sum())(rewards)
    np.testing.assert_allclose(value, 2000.0 + np.log(6.0), rtol=1e-5)
    np.testing.assert_allclose(slope[2], [-2 / 3, -1 / 6, 5 / 6], rtol=1e-5)
    assert np.isfinite(slope).all()


@given(seed=SEEDS)
def test_a_centred_reward_model_is_pulled_to_zero_and_a_margin_is_a_head_start(seed):
    d = Draw(seed)
    c, r = d.normal(4), d.normal(4)
    centred = rl_fn.bradley_terry(jnp.asarray(c), jnp.asarray(r), center=0.1)
    np.testing.assert_allclose(centred, BRADLEY_TERRY(c, r) + 0.1 * (c + r) ** 2, rtol=1e-5)
    late = rl_fn.bradley_terry(jnp.asarray(c), jnp.asarray(r), margin=1.5)
    np.testing.assert_allclose(late, BRADLEY_TERRY(c - np.float32(1.5), r), rtol=1e-5)


def test_metrics_count_ties_as_wrong_and_reduce_with_aggregate():
    c, zero = jnp.array([1.0, 0.0, -3.0]), jnp.zeros(3)
    mask = jnp.array([True, True, True])
    metrics = rl_fn.preference_metrics(c, zero, zero, zero, mask, beta=0.5)
    assert metrics.accuracy.tolist() == [1.0, 0.0, 0.0]
    assert float(rl_fn.masked_mean(metrics.margin, mask)) == pytest.approx(-1 / 3)
    np.testing.assert_array_equal(metrics.margin, metrics.chosen_reward - metrics.rejected_reward)
    loss = rl_fn.dpo(c, zero, zero, zero, beta=0.5)
    np.testing.assert_allclose(loss, np.log1p(np.exp(-np.asarray(metrics.margin))), rtol=1e-6)
