"""Advantages from a group on tiny groups, with everything that can be equal equal."""

import math

import jax.numpy as jnp
import numpy as np

import rl_fn
from rl_fn._groups import own
from tests.oracle.lookup import ORACLE


def test_opo_without_a_token_has_no_advantage():
    r = jnp.array([1.0, 0.0])
    assert rl_fn.opo_advantages(r, jnp.array([0, 0])).tolist() == [0.0, 0.0]
    # One answer has all the length: it is the baseline.
    assert rl_fn.opo_advantages(r, jnp.array([0, 5])).tolist() == [1.0, 0.0]
    assert rl_fn.opo_advantages(r, jnp.array([5, 5]), jnp.array([True, False])).tolist() == [0.0, 0.0]


def test_gpg_counts_informative_answers():
    r = jnp.array([[1.0, 0.0], [1.0, 1.0]])
    # One of two groups is informative: 2 · (±½).
    assert rl_fn.gpg_advantages(r).tolist() == [[1.0, -1.0], [0.0, 0.0]]
    # An answer at the mean belongs to an informative group too: 6/3 · (−1, 0, 1).
    assert rl_fn.gpg_advantages(jnp.array([[0.0, 1.0, 2.0], [1.0, 1.0, 1.0]])).tolist() == [[-2.0, 0.0, 2.0], [0.0] * 3]
    # Three of four answers are not zero: 4/3 · (±½), over 2.
    np.testing.assert_allclose(rl_fn.gpg_advantages(r, alpha="nonzero", norm=2.0)[0], [1 / 3, -1 / 3], rtol=1e-6)
    assert rl_fn.gpg_advantages(r, alpha="none", norm=2.0).tolist() == [[0.25, -0.25], [0.0, 0.0]]
    assert rl_fn.gpg_advantages(0.0 * r).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_a_mean_or_a_spread_of_zero():
    assert rl_fn.maxrl_advantages(jnp.array([1.0, -1.0])).tolist() == [0.0, 0.0]
    assert rl_fn.maxrl_advantages(jnp.array([1.0, 3.0])).tolist() == [-0.5, 0.5]
    # The others of the last are equal: the plain distance 0.75 − 0.25; of the others, mean ½ and spread √⅛.
    got = rl_fn.leave_one_out_std_advantages(jnp.array([0.25, 0.25, 0.75]))
    np.testing.assert_allclose(got, [-0.25 * math.sqrt(8), -0.25 * math.sqrt(8), 0.5], rtol=1e-6)
    assert rl_fn.leave_one_out_std_advantages(jnp.array([3.0])).tolist() == [0.0]
    assert rl_fn.leave_one_out_std_advantages(jnp.array([1.0, 3.0])).tolist() == [-2.0, 2.0]


def test_grpo_scales_by_the_group_or_by_the_batch():
    r = jnp.array([[0.0, 2.0], [4.0, 4.0]])
    # Group: ±1 over √2. Batch: 0, 2, 4, 4 about 2.5, Σd² = 6.25 + 0.25 + 2.25 + 2.25 = 11, over 3.
    np.testing.assert_allclose(rl_fn.grpo_advantages(r, eps=0.0)[0], [-math.sqrt(0.5), math.sqrt(0.5)], rtol=1e-6)
    got = rl_fn.grpo_advantages(r, scale="batch", eps=1.0)
    np.testing.assert_allclose(got[0], np.array([-1.0, 1.0]) / (math.sqrt(11 / 3) + 1.0), rtol=1e-6)
    assert got[1].tolist() == [0.0, 0.0]
    assert rl_fn.grpo_advantages(r, scale="none").tolist() == [[-1.0, 1.0], [0.0, 0.0]]


def test_rloo_leaves_out_only_itself():
    valid = jnp.array([[True, True, True], [True, True, False], [True, False, False]])
    r = jnp.array([[0.0, 3.0, 6.0]] * 3)
    # Against the others' means 4.5, 3, 1.5; then 3 and 0; then nobody.
    expected = [[-4.5, 0.0, 4.5], [-3.0, 3.0, 0.0], [0.0, 0.0, 0.0]]
    np.testing.assert_allclose(rl_fn.rloo_advantages(r, valid), expected, rtol=1e-6)


def test_passk_rewards_the_best_by_its_lead():
    r = jnp.array([1.0, 0.25, 0.25])
    assert rl_fn.passk_advantages(r, scale=False).tolist() == [0.75, 0.0, 0.0]
    # Mean ½, spread √((¼ + 1/16 + 1/16)/2) = √(3/16).
    np.testing.assert_allclose(rl_fn.passk_advantages(r, eps=0.0), [0.75 / math.sqrt(3 / 16), 0.0, 0.0], rtol=1e-6)
    # A tie for the best leads by nothing, and one answer has nobody to lead.
    assert rl_fn.passk_advantages(jnp.array([1.0, 1.0, 0.0])).tolist() == [0.0, 0.0, 0.0]
    assert rl_fn.passk_advantages(jnp.array([1.0, 5.0]), jnp.array([True, False])).tolist() == [0.0, 0.0]


def test_pass_at_k_by_counting():
    # 2 right of 4: of the 6 pairs 1 is all wrong; k = 3 cannot miss; k beyond n is pass@n.
    for k, expected in ((1, 1 / 2), (2, 5 / 6), (3, 1.0), (5, 1.0)):
        np.testing.assert_allclose(rl_fn.pass_at_k(jnp.array(2), jnp.array(4), k), expected, rtol=1e-6)
    assert float(rl_fn.pass_at_k(jnp.array(0), jnp.array(2), 5)) == 0.0


def test_passk_analytic_of_one_is_grpo_and_of_all_is_flat():
    r = jnp.array([0.0, 1.0, 2.0, 5.0])
    # k = 1: (r − 2)/√(14/4), with the variance of all n.
    np.testing.assert_allclose(
        rl_fn.passk_analytic_advantages(r, k=1), np.array([-2.0, -1.0, 0.0, 3.0]) / math.sqrt(3.5), rtol=1e-5
    )
    # k = 2 of {0, 1, 3}: pairs give 1, 3, 3 with mean 7/3, spread √8/3; with 0: 2, with 1: 2, with 3: 3.
    got = rl_fn.passk_analytic_advantages(jnp.array([0.0, 1.0, 3.0]), k=2)
    np.testing.assert_allclose(got, np.array([-1.0, -1.0, 2.0]) / math.sqrt(8.0), rtol=1e-5)
    # k = 3 = n: always the best.
    assert rl_fn.passk_analytic_advantages(jnp.array([0.0, 1.0, 3.0]), k=3).tolist() == [0.0, 0.0, 0.0]


def test_a_filter_excludes_its_bounds():
    r = jnp.array([0.25, 0.75])
    assert rl_fn.group_filter(r, low=0.4, high=0.6).tolist() == [True, True]
    assert rl_fn.group_filter(r, low=0.5, high=0.6).tolist() == [False, False]
    assert rl_fn.group_filter(r, low=0.4, high=0.5).tolist() == [False, False]
    assert rl_fn.group_filter(jnp.array([0.5, 0.5])).tolist() == [False, False]


def test_overlong_penalty_at_its_corners():
    lengths = jnp.array([0, 12, 14, 20, 24])
    assert rl_fn.overlong_penalty(lengths, max_length=20, buffer=8).tolist() == [0.0, 0.0, -0.25, -1.0, -1.0]
    assert rl_fn.overlong_penalty(lengths, max_length=20, buffer=0).tolist() == [0.0, 0.0, 0.0, 0.0, -1.0]
    assert rl_fn.overlong_penalty(lengths, max_length=20, buffer=1).tolist() == [0.0, 0.0, 0.0, -1.0, -1.0]
    # Half a token over, where the buffer is a number that changes: of 1, and of 0.
    for buffer, penalty in ((1.0, -0.5), (0.0, 0.0)):
        assert rl_fn.overlong_penalty(jnp.array([19.5]), max_length=20, buffer=jnp.array(buffer)).tolist() == [penalty]
    assert rl_fn.overlong_penalty(jnp.array([20.5]), max_length=20, buffer=jnp.array(0.0)).tolist() == [-1.0]


def test_length_adaptive_lambda():
    got = rl_fn.length_adaptive_lambda(jnp.array([0, 10, 40]))
    # 1 − 1/(0.05 l): −1 at 10, ½ at 40; an empty answer has 0.
    np.testing.assert_allclose(got, [0.0, -1.0, 0.5], rtol=1e-6)
    assert rl_fn.length_adaptive_lambda(jnp.array([10, 40]), minimum=0.25).tolist() == [0.25, 0.5]


def test_whiten_by_hand():
    x, mask = jnp.array([1.0, 3.0, 99.0]), jnp.array([True, True, False])
    # Mean 2, variance 2 (unbiased); with eps = 2 the scale is 2.
    np.testing.assert_allclose(rl_fn.whiten(x, mask, eps=2.0), [-0.5, 0.5, 0.0], rtol=1e-6)
    np.testing.assert_allclose(rl_fn.whiten(x, mask, eps=2.0, shift_mean=False), [1.5, 2.5, 0.0], rtol=1e-6)
    assert rl_fn.whiten(jnp.ones(3), mask, eps=0.0).tolist() == [0.0, 0.0, 0.0]


def test_step_groups_share_a_state():
    # Two episodes of two steps; returns with γ = ½ are (1 + ½·0, 0) and (0 + ½·2, 2); totals 1 and 2.
    r, mask = jnp.array([[1.0, 0.0], [0.0, 2.0]]), jnp.ones((2, 2), bool)
    ids = jnp.array([[0, 1], [0, 1]], jnp.int32)
    got = rl_fn.step_group_advantages(r, ids, mask, gamma=0.5, weight=2.0, scale="none")
    # Episodes ∓½; state 0: 1 and 1, so 0; state 1: 0 and 2, so ∓1, weighted 2.
    assert got.tolist() == [[-0.5, -2.5], [0.5, 2.5]]
    scaled = rl_fn.step_group_advantages(r, ids, mask, gamma=0.5, eps=0.0)
    # Every pair becomes ∓1/√2.
    np.testing.assert_allclose(scaled, np.array([[-1.0, -2.0], [1.0, 2.0]]) / math.sqrt(2.0), rtol=1e-6)


def test_the_eps_of_several_rewards_weighs_them():
    """Standard deviations of √2 and √2/10, each with ½ beside it: the whitening after does not take that away."""
    r = jnp.array([[[1.0, -1.0], [0.1, -0.1]], [[-1.0, 1.0], [0.1, -0.1]]])
    np.testing.assert_allclose(rl_fn.gdpo_advantages(r, eps=0.5), ORACLE["gdpo_advantages"](r, eps=0.5), rtol=1e-5)


def test_own_with_two_batch_dimensions():
    x = np.arange(2 * 3 * 4 * 4, dtype=np.float32).reshape(2, 3, 4, 4)
    np.testing.assert_array_equal(own(jnp.asarray(x)), np.diagonal(x, axis1=-2, axis2=-1))
