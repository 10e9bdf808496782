"""Returns, advantages from a critic and sums over sequences, with halves and quarters that float32 holds exactly."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rl_fn
from rl_fn.recurrence import linear_recurrence, next_counted, segment_ends, segment_starts, segment_totals

R, V = jnp.array([1.0, 2.0, 4.0]), jnp.array([2.0, 4.0, 8.0])
ALL = jnp.ones(3, bool)
HOLE = jnp.array([True, False, True])
TWO = jnp.array([0, 0, 1], jnp.int32)
# Weights of 1/2, 2 and 1 against the rollout policy.
RATIOS = jnp.log(jnp.array([0.5, 2.0, 1.0]))


def test_segments_begin_and_end():
    assert segment_ends((3,), TWO).tolist() == [False, True, True]
    assert segment_starts((3,), TWO).tolist() == [True, False, True]
    assert segment_ends((3,), None).tolist() == [False, False, True]
    assert segment_starts((3,), None).tolist() == [True, False, False]
    assert segment_totals(R, TWO).tolist() == [3.0, 3.0, 4.0]
    assert segment_totals(R, None).tolist() == [7.0, 7.0, 7.0]
    assert segment_totals(jnp.stack([R, 2 * R]), None).tolist() == [[7.0] * 3, [14.0] * 3]
    assert segment_totals(jnp.stack([R, R]), jnp.stack([TWO, 0 * TWO])).tolist() == [[3.0, 3.0, 4.0], [7.0] * 3]
    assert segment_totals(jnp.zeros((2, 0)), jnp.zeros((2, 0), jnp.int32)).shape == (2, 0)
    assert segment_totals(jnp.zeros(0), jnp.zeros(0, jnp.int32)).shape == (0,)


def test_next_counted_looks_over_holes_but_not_over_ends():
    last = jnp.array(0.5)
    assert next_counted(V, ALL, last, None).tolist() == [4.0, 8.0, 0.5]
    assert next_counted(V, HOLE, last, None).tolist() == [8.0, 8.0, 0.5]
    assert next_counted(V, ALL, last, TWO).tolist() == [4.0, 0.5, 0.5]
    assert next_counted(V, jnp.array([True, False, False]), last, None).tolist() == [0.5, 0.5, 0.5]
    for shape in ((2, 0), (0, 3)):
        nothing = next_counted(jnp.zeros(shape), jnp.zeros(shape, bool), last, None)
        assert nothing.shape == linear_recurrence(0.5, jnp.zeros(shape), jnp.zeros(shape, bool)).shape == shape
    rows = next_counted(jnp.stack([V, V]), jnp.stack([ALL, HOLE]), jnp.array([0.5, 0.25]), None)
    assert rows.tolist() == [[4.0, 8.0, 0.5], [8.0, 8.0, 0.25]]


def test_linear_recurrence_by_hand():
    # 4 + ½·8 = 8; 2 + 4 = 6; 1 + 3 = 4.
    assert linear_recurrence(0.5, R, ALL, init=8.0).tolist() == [4.0, 6.0, 8.0]
    # The hole is jumped over: 1 + ½·8.
    assert linear_recurrence(0.5, R, HOLE, init=8.0).tolist() == [5.0, 0.0, 8.0]
    assert linear_recurrence(0.5, R, ALL, init=8.0, segment_ids=TWO).tolist() == [4.0, 6.0, 8.0]
    assert linear_recurrence(0.5, R, ALL, segment_ids=TWO).tolist() == [2.0, 2.0, 4.0]
    assert linear_recurrence(jnp.array([0.5, 2.0, 9.0]), R, ALL).tolist() == [6.0, 10.0, 4.0]
    rows = linear_recurrence(
        jnp.array([0.0, 1.0]), jnp.stack([R, R]), jnp.stack([ALL, ALL]), init=jnp.array([0.0, 1.0])
    )
    assert rows.tolist() == [[1.0, 2.0, 4.0], [8.0, 7.0, 5.0]]
    assert linear_recurrence(0.5, jnp.zeros(0), jnp.zeros(0, bool)).shape == (0,)


def test_discounted_returns_and_gae():
    assert rl_fn.discounted_returns(R, ALL, gamma=0.5).tolist() == [3.0, 4.0, 4.0]
    # δ = 1 + ½·4 − 2, 2 + ½·8 − 4, 4 + ½·2 − 8 = 1, 2, −3; γλ = ¼: A₂ = −3, A₁ = 2 − ¾, A₀ = 1 + 5/16.
    got = rl_fn.gae(R, V, ALL, gamma=0.5, lam=0.5, bootstrap=2.0)
    assert got.advantages.tolist() == [1.3125, 1.25, -3.0]
    assert got.returns.tolist() == [3.3125, 5.25, 5.0]
    same = rl_fn.td_lambda(R, V, ALL, gamma=0.5, lam=0.5, bootstrap=2.0)
    assert same.advantages.tolist() == [1.3125, 1.25, -3.0] and same.returns.tolist() == [3.3125, 5.25, 5.0]
    # Over the hole: δ₀ = 1 + ½·8 − 2 = 3, A₀ = 3 − ¾.
    for function in (rl_fn.gae, rl_fn.td_lambda):
        holes = function(R, V, HOLE, gamma=0.5, lam=0.5, bootstrap=2.0)
        assert holes.advantages.tolist() == [2.25, 0.0, -3.0] and holes.returns.tolist() == [4.25, 0.0, 5.0]
        # λ and the bootstrap of each row: TD (λ = 0) in one, Monte Carlo in the other.
        rows = function(
            jnp.stack([R, R]), jnp.stack([V, V]), jnp.stack([ALL, ALL]),
            gamma=0.5, lam=jnp.array([0.0, 1.0]), bootstrap=jnp.array([2.0, 0.0]),
        )  # fmt: skip
        assert rows.advantages.tolist() == [[1.0, 2.0, -3.0], [1.0, 0.0, -4.0]]


def test_n_step_looks_n_ahead():
    options: dict[str, Any] = {"gamma": 0.5, "bootstrap": 2.0}
    # One step: r + ½V'; two: 1 + 1 + ¼·8, 2 + 2 + ¼·2; three or more: to the end, 1 + 1 + 1 + ⅛·2.
    for n, returns in ((1, [3.0, 6.0, 5.0]), (2, [4.0, 4.5, 5.0]), (3, [3.25, 4.5, 5.0]), (9, [3.25, 4.5, 5.0])):
        got = rl_fn.n_step(R, V, ALL, n=n, **options)
        assert got.returns.tolist() == returns, n
        assert got.advantages.tolist() == [g - v for g, v in zip(returns, V.tolist(), strict=True)]
    # Over the hole 2 steps reach the end: 1 + ½·4 + ¼·2.
    assert rl_fn.n_step(R, V, HOLE, n=2, **options).returns.tolist() == [3.5, 0.0, 5.0]
    assert rl_fn.n_step(R, V, ALL, n=1, segment_ids=TWO, **options).returns.tolist() == [3.0, 3.0, 5.0]
    assert rl_fn.n_step(R[:0], V[:0], ALL[:0], n=1).returns.shape == (0,)


def test_vtrace_with_truncated_weights():
    # ρ = ½, 1 (of 2), 1 and c the same; γ = ½, bootstrap 2: ρδ = ½, 2, −3.
    # v − V: −3; 2 + ½·(−3) = ½; ½ + ½·½·½ = ⅝. A = ρ(r + ½v' − V): v = 2⅝, 4½, 5.
    got = rl_fn.vtrace(R, V, RATIOS, ALL, gamma=0.5, bootstrap=2.0)
    np.testing.assert_allclose(got.returns, [2.625, 4.5, 5.0], rtol=1e-6)
    np.testing.assert_allclose(got.advantages, [0.5 * (1 + 2.25 - 2), 2 + 2.5 - 4, -3.0], rtol=1e-6)
    # ρ̄ = 2 and c̄ = ½, λ = ½: ρδ = ½, 4, −3; c = ¼ each: v − V = −3, 4 − ⅜, ½ + 29/64.
    got = rl_fn.vtrace(R, V, RATIOS, ALL, gamma=0.5, rho_clip=2.0, c_clip=0.5, lam=0.5, bootstrap=2.0)
    np.testing.assert_allclose(got.returns, [2.953125, 7.625, 5.0], rtol=1e-6)


def test_retrace_and_clipped_weights():
    # δ = 1, 2, −3; the trace of the next token: λ min(1, ratio) = ½, ½ for tokens 1 and 2.
    # A₂ = −3; A₁ = 2 + ½·½·(−3) = 1.25; A₀ = 1 + ½·½·1.25.
    got = rl_fn.retrace(R, V, RATIOS, ALL, gamma=0.5, lam=0.5, bootstrap=2.0)
    np.testing.assert_allclose(got.advantages, [1.3125, 1.25, -3.0], rtol=1e-6)
    # c̄ = 2: token 1 has λ·2 = 1: A₀ = 1 + ½·1.25.
    got = rl_fn.retrace(R, V, RATIOS, ALL, gamma=0.5, lam=0.5, c_clip=2.0, bootstrap=2.0)
    np.testing.assert_allclose(got.advantages, [1.625, 1.25, -3.0], rtol=1e-6)
    # Weights ¾ (of ½), 1½ (of 2), 1 of the returns 3, 4, 4.
    got = rl_fn.clipped_importance_advantages(R, V, RATIOS, ALL, gamma=0.5, clip_low=0.25, clip_high=0.5)
    np.testing.assert_allclose(got.advantages, [0.25, 2.0, -4.0], rtol=1e-6)
    assert got.returns.tolist() == [3.0, 4.0, 4.0]


MODES = {
    # Rows (1, 2, ·) and (4, 8, 16): tokens 5, sequences 2.
    "token-mean": (31.0, 5.0),
    "token-sum": (31.0, 0.0),
    "seq-mean-token-sum": (31.0, 2.0),
    "seq-mean-token-mean": (1.5 + 28 / 3, 2.0),
}
X = jnp.array([[1.0, 2.0, 99.0], [4.0, 8.0, 16.0], [99.0, 99.0, 99.0]])
M = jnp.array([[True, True, False], [True, True, True], [False, False, False]])


@pytest.mark.parametrize("mode", MODES)
def test_aggregation(mode):
    total, denominator = MODES[mode]
    parts = rl_fn.aggregate_parts(X, M, mode)
    np.testing.assert_allclose(parts, (total, denominator), rtol=1e-6)
    np.testing.assert_allclose(rl_fn.aggregate(X, M, mode), total / (denominator or 1.0), rtol=1e-6)
    np.testing.assert_allclose(rl_fn.aggregate(X, M, mode, denominator=4.0), total / 4.0, rtol=1e-6)
    np.testing.assert_allclose(parts + parts, (2 * total, 2 * denominator), rtol=1e-6)
    np.testing.assert_allclose(sum([parts, parts]), (2 * total, 2 * denominator), rtol=1e-6)
    with pytest.raises(TypeError):
        _ = parts + 1


def test_aggregation_by_a_horizon_by_prompt_and_packed():
    assert rl_fn.aggregate_parts(X, M, "seq-mean-token-sum-norm", max_completion_length=10) == (31.0, 20.0)
    # A prompt's tokens together: one of 5 tokens, one of none.
    prompts = rl_fn.aggregate_parts(jnp.stack([X, X]), jnp.stack([M, M & False]), "prompt-mean")
    np.testing.assert_allclose(prompts, (31 / 5, 1.0), rtol=1e-6)
    ids = jnp.array([[0, 1, 1], [0, 0, 1], [0, 0, 0]], jnp.int32)
    # Segments (1), (2, ·), (4, 8), (16) and an empty one.
    parts = rl_fn.aggregate_parts(X, M, "seq-mean-token-mean", segment_ids=ids)
    np.testing.assert_allclose(parts, (1 + 2 + 6 + 16, 4.0), rtol=1e-6)


def test_one_row_is_legal_and_a_sum_without_a_denominator_has_a_gradient():
    for mode in MODES:
        parts = rl_fn.aggregate_parts(X[1], M[1], mode)
        tokens = {"token-mean": 3.0, "token-sum": 0.0}.get(mode, 1.0)
        value = 28 / 3 if mode == "seq-mean-token-mean" else 28.0
        np.testing.assert_allclose(parts, (value, tokens), rtol=1e-6, err_msg=mode)
    slope = jax.grad(lambda x: rl_fn.aggregate(x, M, "token-sum"))(X)
    assert slope.tolist() == M.astype(float).tolist()
    slope = jax.grad(lambda x: rl_fn.aggregate(x, M, "token-mean"))(X)
    np.testing.assert_allclose(slope, 0.2 * M.astype(jnp.float32), rtol=1e-6)


def test_whitening_equal_numbers_without_eps_is_flat():
    slope = jax.grad(lambda x: rl_fn.whiten(x, ALL, eps=0.0).sum())(jnp.ones(3))
    assert slope.tolist() == [0.0, 0.0, 0.0]


def test_masked_statistics():
    assert float(rl_fn.masked_sum(X, M)) == 31.0
    np.testing.assert_allclose(rl_fn.masked_mean(X, M), 6.2, rtol=1e-6)
    assert rl_fn.masked_sum(X, M, axis=0).tolist() == [5.0, 10.0, 16.0]
    np.testing.assert_allclose(rl_fn.masked_mean(X, M, axis=-1), [1.5, 28 / 3, 0.0], rtol=1e-6)
    # (¼ + ¼)/1, and 4, 8, 16 about 28/3: 672/9 over 2.
    np.testing.assert_allclose(rl_fn.masked_var(X, M, axis=-1), [0.5, 336 / 9, 0.0], rtol=1e-6)
    np.testing.assert_allclose(rl_fn.masked_var(X, M, axis=-1, ddof=0), [0.25, 224 / 9, 0.0], rtol=1e-6)
    np.testing.assert_allclose(rl_fn.effective_sample_size(X[:2], M[:2]), 31.0**2 / (1 + 4 + 16 + 64 + 256), rtol=1e-6)
    assert float(rl_fn.effective_sample_size(X, M & False)) == 0.0


@pytest.mark.parametrize("d", [0.4999, 0.5001, -0.4999, -0.5001, 0.1, -0.05, 2.0, -3.0])
def test_kl_estimators_on_both_sides_of_the_series(d):
    x = jnp.array([d])
    exact = math.expm1(-float(x[0])) + float(x[0])
    np.testing.assert_allclose(rl_fn.kl_k3(x, 0 * x), [exact], rtol=1e-6)
    np.testing.assert_allclose(rl_fn.kl_k2(x, 0 * x), [d * d / 2], rtol=1e-6)
    assert rl_fn.kl_k1(x, 0 * x).tolist() == x.tolist() and rl_fn.kl_abs(x, 0 * x).tolist() == jnp.abs(x).tolist()


@pytest.mark.parametrize("d", [0.4999, -0.4999, 0.1])
def test_the_series_of_k3_is_good_for_float64(d):
    """The first term left out is 2·d¹¹/13! of the sum: 2e-13 at the switch."""
    with jax.enable_x64(True):
        x = jnp.array([d], jnp.float64)
        np.testing.assert_allclose(rl_fn.kl_k3(x, 0 * x), [math.expm1(-d) + d], rtol=3e-13)


def test_the_lambda_of_one_token():
    np.testing.assert_allclose(rl_fn.length_adaptive_lambda(jnp.array([0, 1, 2]), alpha=0.5), [0.0, -1.0, 0.0])


def test_n_steps_of_one_token():
    out = rl_fn.n_step(R[:1], V[:1], ALL[:1], n=2, gamma=0.5, bootstrap=jnp.array(8.0))
    assert out.advantages.tolist() == [1.0 + 0.5 * 8.0 - 2.0] and out.returns.tolist() == [5.0]
