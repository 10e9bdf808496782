"""Policy losses at the corners of their trust regions, worked out by hand."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rl_fn

ONE = jnp.ones(1)
E = float(jnp.exp(jnp.float32(1.0)))


def value_and_slope(loss, new, *rest, **options):
    value, slope = jax.value_and_grad(lambda x: loss(x, *rest, **options).sum())(jnp.asarray(new))
    return float(value), slope.tolist()


@pytest.mark.parametrize("log_ratio", [math.log(4.0), -math.log(4.0)])
def test_an_advantage_of_zero_is_never_clipped(log_ratio):
    new, zero = jnp.array([log_ratio]), jnp.zeros(1)
    for dual_clip in (None, 3.0):
        assert rl_fn.clipped_tokens(new, zero, zero, dual_clip=dual_clip).tolist() == [False]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_on_the_boundary_is_inside(advantage):
    """A ratio of exactly 1 between clips of 0: nothing is cut, and the gradient is REINFORCE's."""
    a, zero = jnp.array([advantage]), jnp.zeros(1)
    assert rl_fn.clipped_tokens(zero, zero, a, clip_low=0.0, clip_high=0.0).tolist() == [False]
    assert value_and_slope(rl_fn.ppo_clip, zero, zero, a, clip_low=0.0, clip_high=0.0) == (-advantage, [-advantage])


def test_dual_clip_is_an_open_bound_for_negative_advantages_alone():
    zero = jnp.zeros(1)
    assert rl_fn.clipped_tokens(ONE, zero, -ONE, dual_clip=E).tolist() == [False]
    assert rl_fn.clipped_tokens(ONE, zero, -ONE, dual_clip=E - 0.001).tolist() == [True]
    # Ratio 1.6: below 1 + 0.8, and the bound 1.5 is not for A > 0.
    new = jnp.array([math.log(1.6)])
    assert rl_fn.clipped_tokens(new, zero, 0.5 * ONE, clip_high=0.8, dual_clip=1.5).tolist() == [False]
    # Ratio 1.8, A = −1: held at 1.5, so the loss is 1.5 and flat.
    assert value_and_slope(rl_fn.ppo_clip, [math.log(1.8)], zero, -ONE, dual_clip=1.5) == (1.5, [0.0])
    # Ratio 0.5, A = −1: the lower clip, not the dual one.
    value, slope = value_and_slope(rl_fn.ppo_clip, [math.log(0.5)], zero, -ONE, dual_clip=1.5)
    assert value == pytest.approx(0.8) and slope == [0.0]


def test_dppo_between_bernoulli_distributions():
    # π_old = 1/2, π = 1/4: KL = ½ log 2 + ½ log(½ / ¾) = 0.34657 − 0.20273 = 0.14384. A = −1 moves further away.
    new, old = jnp.log(jnp.array([0.25])), jnp.log(jnp.array([0.5]))
    loss = functools.partial(rl_fn.dppo, new, old, -ONE, divergence="kl")
    assert loss(threshold=0.143).tolist() == [0.0]
    assert loss(threshold=0.145).tolist() == [0.5]
    # π_old = 1: nothing is left for another token, KL = −log 0.9 = 0.10536.
    new, old = jnp.log(jnp.array([0.9])), jnp.zeros(1)
    loss = functools.partial(rl_fn.dppo, new, old, -ONE, divergence="kl")
    assert loss(threshold=0.105).tolist() == [0.0]
    np.testing.assert_allclose(loss(threshold=0.106), [0.9], rtol=1e-6)


def test_dppo_at_the_threshold_is_inside():
    # |1 − ½| = ½ is not more than ½; ratio 2.
    new, old = jnp.zeros(1), jnp.log(jnp.array([0.5]))
    np.testing.assert_allclose(rl_fn.dppo(new, old, ONE, threshold=0.5), [-2.0], rtol=1e-6)
    assert rl_fn.dppo(new, old, ONE, threshold=0.49).tolist() == [0.0]
    # Back towards π_old is always allowed.
    np.testing.assert_allclose(rl_fn.dppo(new, old, -ONE, threshold=0.1), [2.0], rtol=1e-6)
    np.testing.assert_allclose(rl_fn.dppo(old, new, ONE, threshold=0.1), [-0.5], rtol=1e-6)
    assert rl_fn.dppo(old, new, -ONE, threshold=0.1).tolist() == [0.0]


def test_gmpo_leaves_tokens_without_an_advantage_unclipped():
    # Log-ratios 1 and 0, mean ½; A of the first is 0, so it is not clipped to 0.4 for the second.
    old, mask = jnp.array([-2.0, -1.0]), jnp.ones(2, bool)
    up = rl_fn.gmpo(jnp.array([-1.0, -1.0]), old, jnp.array([0.0, 1.0]), mask)
    np.testing.assert_allclose(up, [0.0, -math.exp(0.5)], rtol=1e-6)
    down = rl_fn.gmpo(jnp.array([-3.0, -1.0]), old, jnp.array([0.0, -1.0]), mask)
    np.testing.assert_allclose(down, [0.0, math.exp(-0.5)], rtol=1e-6)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_gmpo_on_the_clip_still_learns(sign):
    # A log-ratio of ±½ between ±½: the loss −e^{±½}A has the slope −e^{±½}A.
    old, clips = jnp.array([-2.0]), {"clip_low": 0.5, "clip_high": 0.5}
    value, slope = value_and_slope(rl_fn.gmpo, old + 0.5 * sign, old, sign * ONE, jnp.ones(1, bool), **clips)
    assert value == pytest.approx(-sign * math.exp(0.5 * sign)) and slope == pytest.approx([value])
    # Just inside the clip of 0.4 nothing is left of it.
    value, slope = value_and_slope(rl_fn.gmpo, old + 0.5 * sign, old, sign * ONE, jnp.ones(1, bool))
    assert value == pytest.approx(-sign * math.exp(0.4 * sign)) and slope == [0.0]


def test_value_losses_by_hand():
    v, r = jnp.array([1.0, 3.0]), jnp.array([0.0, 0.0])
    # Huber at 1: ½ inside and on δ, δ(|e| − δ/2) = 2.5 outside.
    assert rl_fn.value_huber(v, r).tolist() == [0.5, 2.5]
    # v is held at old ± 0.5: max(3², 0.5²) = 9; the other way v = 1, old = 3: max(1, 2.5²) = 6.25.
    assert rl_fn.value_clip(v, v[::-1], r).tolist() == [6.25, 9.0]
