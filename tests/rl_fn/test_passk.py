"""Pass@k: the estimator without bias, the closed form of the paper, and what the advantages do not see."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

import rl_fn
from tests.rl_fn.laws import close, quick_jit
from tests.rl_fn.registry import Draw

BEST = quick_jit(rl_fn.passk_advantages, static_argnames=("scale", "eps"))
ANALYTIC = quick_jit(rl_fn.passk_analytic_advantages, static_argnames="k")
AT_K = quick_jit(rl_fn.pass_at_k, static_argnums=2)
SEEDS = pytest.mark.parametrize("seed", range(5))


@pytest.mark.parametrize("n", [1, 5])
def test_the_estimator_has_no_bias(n):
    """E over c ~ Binomial(n, p) of the estimate is 1 − (1 − p)ᵏ."""
    counts = np.arange(n + 1)
    for k in range(1, n + 1):
        estimates = np.asarray(AT_K(counts, np.full(n + 1, n), k))
        for p in (0.0, 0.3, 0.9, 1.0):
            chance = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in counts]
            np.testing.assert_allclose(np.dot(chance, estimates), 1 - (1 - p) ** k, atol=1e-6)


def test_the_estimator_with_many_answers():
    n, correct = 1000, np.array([0, 1, 10, 500, 900, 1000])
    for k in (1, 64, 200):
        exact = [1 - math.comb(n - c, k) / math.comb(n, k) for c in correct.tolist()]
        np.testing.assert_allclose(AT_K(correct, np.full(6, n), k), exact, rtol=2e-5, atol=1e-6)


def test_fewer_answers_than_k():
    got = rl_fn.pass_at_k(jnp.array([0, 1, 0]), jnp.array([3, 3, 0]), 5)
    assert got.tolist() == [0.0, 1.0, 0.0]


@SEEDS
def test_the_best_gets_what_the_group_would_lose_without_it(seed):
    r = Draw(seed).normal(3, 5)
    got = np.asarray(BEST(r, scale=False))
    lost = [[np.max(row) - np.max(np.delete(row, i)) for i in range(5)] for row in r]
    np.testing.assert_allclose(got, lost, rtol=1e-6)
    assert (np.count_nonzero(got, axis=-1) == 1).all()
    spread = r.std(axis=-1, ddof=1, keepdims=True)
    close([BEST(r, eps=0.0)], [got / spread])


def test_two_best_answers_get_nothing():
    assert not np.asarray(BEST(np.float32([[1, 1, 0], [2, 2, 2]]))).any()


@pytest.mark.parametrize(("group", "k"), [(6, 1), (6, 2), (8, 4), (64, 32)])
def test_right_and_wrong_answers_have_the_papers_closed_form(group, k):
    for right in range(group + 1):
        wrong = group - right
        mean = 1 - math.comb(wrong, k) / math.comb(group, k)
        if 0.0 < mean < 1.0:
            spread = math.sqrt(mean * (1 - mean))
            fails_too = math.comb(wrong - 1, k - 1) / math.comb(group - 1, k - 1)
            expected = [(1 - mean) / spread] * right + [(1 - mean - fails_too) / spread] * wrong
        else:
            expected = [0.0] * group
        rewards = np.float32([1.0] * right + [0.0] * wrong)
        np.testing.assert_allclose(ANALYTIC(rewards, k=k), expected, rtol=2e-4, atol=1e-6)


@SEEDS
def test_one_answer_a_set_is_grpo_with_the_biased_std(seed):
    r = Draw(seed).normal(3, 6)
    close([ANALYTIC(r, k=1)], [(r - r.mean(-1, keepdims=True)) / r.std(-1, keepdims=True)])


@SEEDS
@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_analytic_advantages_of_a_group_sum_to_nothing(seed, k):
    d = Draw(seed)
    r, valid = np.round(d.normal(3, 8) * 2) / 2, d.mask(3, 8)
    np.testing.assert_allclose(np.sum(ANALYTIC(r.astype(np.float32), valid, k=k), axis=-1), 0.0, atol=2e-5)


@SEEDS
def test_offset_and_scale_do_not_matter(seed):
    r = Draw(seed).integers(65, 3, 8).astype(np.float32) / 64
    for function in (lambda x: BEST(x, eps=0.0), lambda x: ANALYTIC(x, k=3)):
        plain = function(r)
        close([function(r + np.float32(1e4))], [plain], atol=2e-5)
        close([function(r * np.float32(1e-3))], [plain], atol=2e-5)


@SEEDS
def test_the_order_of_the_answers_does_not_matter(seed):
    d = Draw(seed)
    # Coarse, so that some are equal: which of them counts as the better one must not show.
    r, order = (np.round(d.normal(8)) / 2).astype(np.float32), d.rng.permutation(8)
    for function in (BEST, lambda x: ANALYTIC(x, k=3)):
        close([function(r[order])], [np.asarray(function(r))[order]])


def test_sets_that_all_hold_a_best_answer_teach_nothing():
    rewards = np.float32([[0.3, 0.7, 0.7, 0.7], [0.1, 0.1, 0.1, 0.1]])
    for k in (2, 3, 4):
        assert not np.asarray(ANALYTIC(rewards, k=k)).any()


def test_a_group_smaller_than_k_teaches_nothing():
    rewards, valid = np.float32([1.0, 0.0, 0.5, 9.0]), np.array([True, True, False, False])
    assert not np.asarray(ANALYTIC(rewards, valid, k=3)).any()
    assert np.asarray(ANALYTIC(rewards, valid, k=1)).any()


def test_bad_arguments():
    r = jnp.ones(4)
    for k in (0, 5):
        with pytest.raises(ValueError, match="k must be"):
            rl_fn.passk_analytic_advantages(r, k=k)
    with pytest.raises(ValueError, match="k must be"):
        rl_fn.pass_at_k(jnp.array([1]), jnp.array([2]), 0)
    with pytest.raises(ValueError, match="eps"):
        rl_fn.passk_advantages(r, eps=-1.0)
