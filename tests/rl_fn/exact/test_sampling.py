"""Truncations, log-probabilities and distillation on rows of two or three entries."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rl_fn

INF = math.inf
HALF = math.log(0.5)


def test_temperature_zero_is_the_first_best():
    assert rl_fn.temperature(jnp.array([1.0, 3.0, 3.0]), 0.0).tolist() == [-INF, 0.0, -INF]
    assert rl_fn.temperature(jnp.array([1.0, 3.0, 3.0]), 2.0).tolist() == [0.5, 1.5, 1.5]
    assert rl_fn.temperature(jnp.array([1.0, 3.0]), 1).tolist() == [1.0, 3.0]


def test_a_parameter_of_each_row_of_a_stack():
    x, each = jnp.ones((2, 3, 2)), jnp.array([[1.0, 2.0, 4.0], [0.5, 0.25, 1.0]])
    assert rl_fn.temperature(x, each)[..., 1].tolist() == [[1.0, 0.5, 0.25], [2.0, 4.0, 1.0]]


def test_top_k_and_top_p_take_what_is_needed_and_no_more():
    x = jnp.array([1.0, 2.0, 2.0, 0.0])
    assert rl_fn.top_k(x, 1).tolist() == [-INF, 2.0, -INF, -INF]
    assert rl_fn.top_k(x, 3).tolist() == [1.0, 2.0, 2.0, -INF]
    # Two of ½: a mass of ½ is the first alone, more is both.
    even = jnp.zeros(2)
    assert rl_fn.top_p(even, 0.5).tolist() == [0.0, -INF]
    assert rl_fn.top_p(even, 0.51).tolist() == [0.0, 0.0]
    # ½, ¼, ¼ given out of order: 0.6 needs the largest and the first of the others.
    assert np.isfinite(rl_fn.top_p(jnp.log(jnp.array([0.25, 0.5, 0.25])), 0.6)).tolist() == [True, True, False]
    # All of it keeps what rounds to a mass of 1 before it.
    assert np.isfinite(rl_fn.top_p(jnp.array([0.0, -30.0]), 1.0)).all()


def test_min_p_keeps_its_own_boundary():
    x = jnp.array([0.0, HALF, -2.0])
    assert rl_fn.min_p(x, 0.5).tolist() == [0.0, np.float32(HALF), -INF]
    assert rl_fn.min_p(x, 0.51).tolist() == [0.0, -INF, -INF]
    assert rl_fn.min_p(x, 1.0).tolist() == [0.0, -INF, -INF]
    assert rl_fn.min_p(x, 0.0).tolist() == x.tolist()


def test_repetition_penalty_lowers_both_signs():
    x, seen = jnp.array([2.0, -2.0, 0.0, 2.0]), jnp.array([True, True, True, False])
    assert rl_fn.repetition_penalty(x, seen, 2.0).tolist() == [1.0, -4.0, 0.0, 2.0]


def test_a_sample_reports_the_truncated_distribution():
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.25]]))
    certain: list[dict[str, Any]] = [{"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.9}, {"temperature": 0.0}]
    for options in certain:
        token, logprob = rl_fn.sample(jax.random.key(0), logits, **options)
        assert token.tolist() == [0] and logprob.tolist() == [0.0], options
    token, logprob = rl_fn.sample(jax.random.key(1), logits, temperature=0.5)
    # Squared and normalised: 4/6, 1/6, 1/6.
    np.testing.assert_allclose(logprob, jnp.log(jnp.array([4.0, 1.0, 1.0]) / 6.0)[token], rtol=1e-5)


def test_log_probabilities_of_one_row():
    out = rl_fn.logits_logprobs(jnp.log(jnp.array([1.0, 3.0])), jnp.array(1))
    np.testing.assert_allclose(out.logprobs, math.log(0.75), rtol=1e-6)
    np.testing.assert_allclose(out.logsumexp, math.log(4.0), rtol=1e-6)
    np.testing.assert_allclose(out.entropy, -0.75 * math.log(0.75) - 0.25 * math.log(0.25), rtol=1e-6)
    # Temperature ½ squares: 1 and 9.
    out = rl_fn.logits_logprobs(jnp.log(jnp.array([1.0, 3.0])), jnp.array(1), temperature=0.5)
    np.testing.assert_allclose(out.logprobs, math.log(0.9), rtol=1e-6)
    out = rl_fn.logits_logprobs(jnp.array([0.0, 1e9]), jnp.array(0), softcap=2.0)
    np.testing.assert_allclose(out.logprobs, -2.0 - math.log1p(math.exp(-2.0)), rtol=1e-6)


def test_a_token_outside_the_support_or_the_tile():
    x = jnp.array([0.0, 0.0, 5.0])
    allowed_tokens = jnp.array([True, True, False])
    out = rl_fn.logits_logprobs(jnp.stack([x, x]), jnp.array([2, 0]), allowed_tokens=allowed_tokens)
    np.testing.assert_allclose(out.logprobs, [-INF, HALF], rtol=1e-6)
    np.testing.assert_allclose(out.entropy, [math.log(2.0)] * 2, rtol=1e-6)
    # A tile of ids 3, 4, 5 knows the logits of these alone.
    state = rl_fn.row_state(jnp.stack([x] * 5), jnp.array([2, 3, 5, 6, 0]), start=3)
    assert state.target.tolist() == [-INF, 0.0, 5.0, -INF, -INF]
    nothing = rl_fn.logits_logprobs(x, jnp.array(0), allowed_tokens=jnp.zeros(3, bool))
    assert [float(part) for part in nothing] == [-INF, 0.0, -INF]


def test_states_of_tiles_merge_to_the_whole():
    x = jnp.array([1.0, 2.0, 7.0, 0.0])
    for token in range(4):
        whole = rl_fn.row_state(x, jnp.array(token))
        left = rl_fn.row_state(x[:3], jnp.array(token))
        right = rl_fn.row_state(x[3:], jnp.array(token), start=3)
        for a, b in zip(rl_fn.merge_row_states(left, right), whole, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
        for a, b in zip(rl_fn.merge_row_states(right, left), whole, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


def test_sequence_logprobs_of_rows_and_of_segments():
    x, mask = jnp.array([-1.0, -2.0, jnp.nan, -4.0]), jnp.array([True, True, False, True])
    assert float(rl_fn.sequence_logprobs(x, mask)) == -7.0
    ids = jnp.array([0, 0, 0, 1], jnp.int32)
    assert rl_fn.sequence_logprobs(x, mask, segment_ids=ids).tolist() == [-3.0, -3.0, 0.0, -4.0]


def test_divergences_of_a_coin():
    p, q = jnp.log(jnp.array([0.75, 0.25])), jnp.log(jnp.array([0.25, 0.75]))
    np.testing.assert_allclose(rl_fn.reverse_kl(p, q), 0.5 * math.log(3.0), rtol=1e-6)
    np.testing.assert_allclose(rl_fn.total_variation(p, q), 0.5, rtol=1e-6)
    # The mixture is even: ¾ log(3/2) + ¼ log(1/2).
    js = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    np.testing.assert_allclose(rl_fn.jensen_shannon(p, q), js, rtol=1e-5)
    np.testing.assert_allclose(rl_fn.gkd(p, q), js, rtol=1e-5)
    # β = 0 is KL(teacher‖student), β = 1 KL(student‖teacher).
    r = jnp.log(jnp.array([0.5, 0.5]))
    forward, reverse = 0.5 * math.log(2 / 3) + 0.5 * math.log(2.0), 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    np.testing.assert_allclose(rl_fn.gkd(p, r, beta=0.0), forward, rtol=1e-5)
    np.testing.assert_allclose(rl_fn.gkd(p, r, beta=1.0), reverse, rtol=1e-5)
    np.testing.assert_allclose(rl_fn.forward_kl(p, r), forward, rtol=1e-5)
    # Mass where the other has none.
    one = jnp.array([0.0, -INF])
    assert float(rl_fn.reverse_kl(r, one)) == INF
    np.testing.assert_allclose(rl_fn.reverse_kl(one, r), math.log(2.0), rtol=1e-6)
    assert float(rl_fn.gkd(one, r, beta=0.0)) == INF
    np.testing.assert_allclose(rl_fn.gkd(one, r, beta=1.0), math.log(2.0), rtol=1e-6)
    # At ½ a half-empty coin against an even one: ½(log 4/3) + ½(½ log ⅔ + ½ log 2).
    expected = 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3) + 0.25 * math.log(2.0)
    np.testing.assert_allclose(rl_fn.gkd(one, r), expected, rtol=1e-5)
    assert float(rl_fn.entropy(one)) == 0.0


def test_the_tail_of_a_teachers_list():
    student = jnp.log(jnp.array([0.5, 0.25, 0.25]))
    teacher, ids = jnp.log(jnp.array([0.75])), jnp.array([0], jnp.int32)
    # ¾ on the listed and ¼ on the rest, against ½ and ½.
    bucket = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    tails: dict[Any, float] = {"bucket": bucket, "renormalise": 0.0, "drop": 0.75 * math.log(1.5)}
    for tail, expected in tails.items():
        got = rl_fn.top_k_distillation(student, teacher, ids, tail=tail)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7, err_msg=tail)
    # A full list has no rest.
    full = rl_fn.top_k_distillation(student, student, jnp.arange(3, dtype=jnp.int32))
    np.testing.assert_allclose(full, 0.0, atol=1e-7)


def test_mass_that_underflows_is_no_mass():
    # e^−200 is 0 in float32: that the student excludes it costs nothing, in value and gradient.
    student, teacher = jnp.array([0.0, -INF]), jnp.array([0.0, -200.0])
    value, slope = jax.value_and_grad(lambda s: rl_fn.gkd(s, teacher, beta=0.0))(student)
    assert float(value) == 0.0 and slope.tolist() == [0.0, 0.0]
    assert float(rl_fn.reverse_kl(teacher, student)) == 0.0


def test_a_masked_row_is_exactly_nothing():
    x = jnp.array([[math.nan, 1.0, 2.0, 0.5, 0.25]])
    for beta in (0.0, 0.1, 0.3, 0.5, 0.7, 1.0):
        assert rl_fn.gkd(x, x[..., ::-1], jnp.array([False]), beta=beta).tolist() == [0.0]
