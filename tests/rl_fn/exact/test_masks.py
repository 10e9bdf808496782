"""Masks and weights against drift, on and beside their thresholds, and metrics of it."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rl_fn

LOG2 = np.log(2.0).astype(np.float32)
ALL = jnp.ones(2, bool)


def test_a_value_on_the_threshold_is_kept():
    d = jnp.array([1.0, -0.5])
    for level, kept in (("token", [True, True]), ("seq_mean", [True, True]), ("seq_max", [True, True])):
        got = rl_fn.rejection_mask(d, ALL, statistic="k1", level=level, threshold=1.0)
        assert got.tolist() == kept, level
    # Below the largest, |−1|: that token, or all of them where one decides; the mean is |−0.25|, the sum |−0.5|.
    for level, kept in (("token", [False, True]), ("seq_max", [False, False]), ("seq_mean", [True, True])):
        got = rl_fn.rejection_mask(d, ALL, statistic="k1", level=level, threshold=0.9)
        assert got.tolist() == kept, level
    for level, threshold in (("seq_sum", 0.5), ("seq_mean", 0.25)):
        assert rl_fn.rejection_mask(d, ALL, statistic="k1", level=level, threshold=threshold).all()
        assert not rl_fn.rejection_mask(d, ALL, statistic="k1", level=level, threshold=0.9 * threshold).any()
    # k2 = d²/2 = ½ and ⅛; k3 = eᵈ − 1 − d = 0.71828 and 0.10653.
    assert rl_fn.rejection_mask(d, ALL, statistic="k2", threshold=0.5).tolist() == [True, True]
    assert rl_fn.rejection_mask(d, ALL, statistic="k2", threshold=0.49).tolist() == [False, True]
    assert rl_fn.rejection_mask(d, ALL, statistic="k3", threshold=0.719).tolist() == [True, True]
    assert rl_fn.rejection_mask(d, ALL, statistic="k3", threshold=0.718).tolist() == [False, True]
    assert rl_fn.rejection_mask(d, ALL, statistic="k3", threshold=0.106).tolist() == [False, False]


def test_off_policy_sequences_go_only_beyond_the_threshold_and_below_zero():
    new, rollout = jnp.array([-2.0, -2.0]), jnp.array([-1.0, -1.0])
    a = jnp.array([-1.0, 0.0])
    # The mean gap is 1: on a threshold of 1 everything stays, below it A < 0 goes and A = 0 stays.
    assert rl_fn.off_policy_sequence_mask(a, new, rollout, ALL, threshold=1.0).tolist() == [True, True]
    assert rl_fn.off_policy_sequence_mask(a, new, rollout, ALL, threshold=0.99).tolist() == [False, True]
    assert rl_fn.off_policy_sequence_mask(-a, new, rollout, ALL, threshold=0.99).tolist() == [True, True]


def test_second_moment_keeps_the_smallest_whose_mean_is_within():
    d, mask = jnp.array([2.0, 1.0, 0.0, 9.0]), jnp.array([True, True, True, False])
    # Squares 0, 1, 4 with running means 0, ½, 5/3.
    for threshold, kept in (
        (5 / 3 + 1e-3, [1, 1, 1, 0]),
        (1.6, [0, 1, 1, 0]),
        (0.5, [0, 1, 1, 0]),
        (0.49, [0, 0, 1, 0]),
    ):
        assert rl_fn.second_moment_mask(d, mask, threshold=threshold).astype(int).tolist() == kept
    # A mean on the threshold stays; nothing to sort is legal.
    assert rl_fn.second_moment_mask(jnp.array([1.0]), ALL[:1], threshold=1.0).tolist() == [True]
    assert rl_fn.second_moment_mask(jnp.array([1.0]), ALL[:1], threshold=0.99).tolist() == [False]
    assert rl_fn.second_moment_mask(jnp.zeros(0), jnp.zeros(0, bool), threshold=1.0).shape == (0,)


def test_total_variation_masks_what_would_move_further_out():
    # Ratios 2 and 1: distance ½ · (1 + 0)/2 = ¼.
    new, old = jnp.array([0.0, -1.0]), jnp.array([-LOG2, -1.0])
    a = jnp.array([1.0, 1.0])
    for threshold, kept in ((0.251, [True, True]), (0.249, [False, True])):
        assert rl_fn.total_variation_mask(a, new, old, ALL, threshold=threshold).tolist() == kept
    assert rl_fn.total_variation_mask(-a, new, old, ALL, threshold=0.1).tolist() == [True, True]
    assert rl_fn.total_variation_mask(0 * a, new, old, ALL, threshold=0.1).tolist() == [True, True]
    # Ratio ½: distance ¼ again, and A < 0 is outward.
    assert rl_fn.total_variation_mask(-a[:1], old[:1], new[:1], ALL[:1], threshold=0.249).tolist() == [False]
    # On the threshold, 2 of a ratio of 5, nothing is masked.
    far = jnp.log(jnp.array([5.0]))
    gap = 0.5 * float(jnp.abs(jnp.exp(far) - 1.0)[0])
    assert rl_fn.total_variation_mask(a[:1], far, 0 * far, ALL[:1], threshold=gap).tolist() == [True]
    assert rl_fn.total_variation_mask(a[:1], far, 0 * far, ALL[:1], threshold=gap * 0.999).tolist() == [False]


@pytest.mark.parametrize("cap", [0.3, 1.0, 1.7, 5.0, 100.0])
def test_a_truncated_weight_is_the_cap_itself(cap):
    far = rl_fn.truncated_importance_weights(jnp.array([80.0, 1000.0]), ALL, cap=cap)
    assert far.tolist() == [np.float32(cap)] * 2
    near = rl_fn.truncated_importance_weights(jnp.array([math.log(0.9 * cap), -200.0]), ALL, cap=cap)
    np.testing.assert_allclose(near, [0.9 * cap, 0.0], rtol=1e-6)


def test_masked_weights_keep_both_ends():
    zero = jnp.zeros(2)
    for low, high in ((1.0, 2.0), (0.5, 1.0)):
        assert rl_fn.masked_importance_weights(zero, ALL, low=low, high=high).tolist() == [1.0, 1.0]
    for low, high in ((1.01, 2.0), (0.5, 0.99)):
        assert rl_fn.masked_importance_weights(zero, ALL, low=low, high=high).tolist() == [0.0, 0.0]


def test_mismatch_metrics_by_hand():
    # Probabilities ¼ against ½ and ½ against ½: d = −log 2 and 0.
    new, old = jnp.log(jnp.array([0.25, 0.5])), jnp.log(jnp.array([0.5, 0.5]))
    got = rl_fn.mismatch_metrics(new, old, ALL)
    expected = {
        "probability_gap_mean": 0.125,
        "probability_gap_max": 0.25,
        "k1": math.log(2.0) / 2,
        "k3": (0.5 - 1.0 + math.log(2.0)) / 2,  # eᵈ − 1 − d
        "chi_squared": (0.25 - 1.0) / 2,
        "perplexity_ratio": math.sqrt(2.0),
        "effective_sample_share": 1.5**2 / (0.25 + 1.0) / 2,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(got, name), value, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(("factor", "over_2", "over_8"), [(1.99, 0, 0), (2.01, 1, 0), (7.99, 1, 0), (8.01, 1, 1)])
def test_shares_of_large_ratios(factor, over_2, over_8):
    for sign in (1.0, -1.0):
        d = jnp.array([sign * math.log(factor), 0.0])
        got = rl_fn.mismatch_metrics(d - 5.0, jnp.full(2, -5.0), ALL)
        assert (got.share_over_2, got.share_over_8) == (over_2 / 2, over_8 / 2)


def test_a_ratio_of_exactly_two_is_not_over_two():
    d = jnp.array([LOG2, 0.0])
    assert rl_fn.mismatch_metrics(d, jnp.zeros(2), ALL).share_over_2 == 0.0
    eight = jnp.array([np.float32(np.log(8.0)), 0.0])
    assert rl_fn.mismatch_metrics(eight, jnp.zeros(2), ALL).share_over_8 == 0.0


def test_levels_of_a_log_ratio():
    new, old = jnp.array([[-1.0, -2.0, jnp.nan]]), jnp.array([[-2.0, -4.0, 0.0]])
    mask = jnp.array([[True, True, False]])
    for level, expected in (
        ("token", [1.0, 2.0, 0.0]),
        ("sequence", [1.5, 1.5, 0.0]),
        ("sequence_sum", [3.0, 3.0, 0.0]),
    ):
        assert rl_fn.log_ratio(new, old, mask, level=level).tolist() == [expected]


def test_covariance_masks_on_their_bounds():
    # Two tokens, log-probabilities ±1 and advantages ±1 about their means: both covariances are 1.
    new, a = jnp.array([-1.0, -3.0]), jnp.array([2.0, 0.0])
    loss = rl_fn.ppo_clip(new, new, a, ALL)
    assert loss.tolist() == [-2.0, 0.0]
    # Strictly between the bounds only.
    for low, high, chosen in ((0.5, 2.0, True), (1.0, 2.0, False), (0.5, 1.0, False)):
        got = rl_fn.clip_cov(new, new, a, ALL, fraction=1.0, cov_low=low, cov_high=high)
        assert got.tolist() == [0.0 if chosen else -2.0, 0.0], (low, high)
    # A share of 0 takes nothing; a share that rounds to nothing takes one, here that of less noise.
    noise = jnp.array([0.1, 0.2])
    assert rl_fn.clip_cov(new, new, a, ALL, noise, fraction=0.0, cov_low=0.5).tolist() == [-2.0, 0.0]
    assert rl_fn.clip_cov(new, new, a, ALL, noise, fraction=0.1, cov_low=0.5).tolist() == [0.0, 0.0]
    assert rl_fn.clip_cov(new, new, a, ALL, -noise, fraction=0.1, cov_low=0.5).tolist() == [-2.0, 0.0]


def test_kl_cov_adds_the_distance_of_the_most_covariant():
    # Covariances of (log π, A) about the means (−2, 1): (1)(2) = 2, 0 · …, (−1)(−1) = 1.
    new, old, a = jnp.array([-1.0, -2.0, -3.0]), jnp.array([-1.5, -2.0, -3.0]), jnp.array([3.0, 0.0, 0.0])
    mask = jnp.ones(3, bool)
    plain = np.array([-3.0 * math.exp(0.5), 0.0, 0.0])
    np.testing.assert_allclose(rl_fn.kl_cov(new, old, a, mask, fraction=0.0), plain, rtol=1e-6)
    got = rl_fn.kl_cov(new, old, a, mask, fraction=0.4, coef=2.0)
    np.testing.assert_allclose(got, plain + np.array([2.0 * 0.5, 0.0, 0.0]), rtol=1e-6)
    # |d| has slope sign(d), and 0 at d = 0.
    slope = jax.grad(lambda x: rl_fn.kl_cov(x, old, 0.0 * a, mask, fraction=1.0, coef=2.0).sum())(new)
    assert slope.tolist() == [2.0, 0.0, 0.0]


def test_high_entropy_keeps_the_top_share_and_its_ties():
    h, mask = jnp.array([1.0, 2.0, 3.0, 4.0, 5.0, 9.0]), jnp.array([True] * 5 + [False])
    for quantile, kept in ((0.0, 5), (0.25, 4), (0.5, 3), (0.6, 2), (0.75, 2), (0.8, 1), (1.0, 1)):
        got = rl_fn.high_entropy_mask(h, mask, quantile=quantile)
        assert got.tolist() == [i >= 5 - kept and i < 5 for i in range(6)], quantile
    assert rl_fn.high_entropy_mask(jnp.ones(3), jnp.ones(3, bool), quantile=0.9).tolist() == [True] * 3
