"""Truncations keep what they promise; the sampler draws from what it reports."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rl_fn
from tests.rl_fn.registry import Draw

SEEDS = st.integers(0, 2**32 - 1)


def _probabilities(logits):
    return np.asarray(jax.nn.softmax(jnp.asarray(logits), axis=-1), np.float64)


@given(seed=SEEDS, p=st.floats(0.05, 0.99))
def test_top_p_is_the_smallest_set_with_that_mass(seed, p):
    logits = Draw(seed).normal(12, scale=2.0)
    kept = np.isfinite(rl_fn.top_p(logits, p))
    probabilities = _probabilities(logits)
    assert probabilities[kept].sum() >= p - 1e-6
    assert probabilities[kept].sum() - probabilities[kept].min() < p + 1e-6
    assert probabilities[kept].min() >= probabilities[~kept].max(initial=0.0)


@given(seed=SEEDS, k=st.integers(1, 15))
def test_top_k_keeps_exactly_k_and_ties_go_to_the_lower_id(seed, k):
    logits = Draw(seed).integers(3, 12).astype(np.float32)
    kept = np.isfinite(rl_fn.top_k(logits, k))
    assert kept.sum() == min(k, 12)
    worst = logits[kept].min()
    tied = np.flatnonzero(logits == worst)
    assert kept[tied].tolist() == sorted(kept[tied].tolist(), reverse=True)
    assert (logits[~kept] <= worst).all()


def test_parameters_that_keep_everything():
    logits = Draw(0).normal(3, 200, scale=8.0)
    for same in (
        rl_fn.top_p(logits, 1.0),
        rl_fn.top_k(logits, 200),
        rl_fn.min_p(logits, 0.0),
        rl_fn.temperature(logits, 1.0),
    ):
        np.testing.assert_array_equal(same, logits)


def test_per_row_parameters_are_the_rows_own():
    logits = Draw(1).normal(3, 9)
    for f, parameters in ((rl_fn.top_p, [0.2, 0.6, 1.0]), (rl_fn.min_p, [0.0, 0.3, 1.0])):
        together = f(logits, jnp.array(parameters))
        for i, parameter in enumerate(parameters):
            np.testing.assert_array_equal(together[i], f(logits[i], parameter))


def test_the_drawn_frequencies_are_the_reported_probabilities():
    logits = jnp.array([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
    draw = jax.jit(lambda key: rl_fn.sample(key, logits, temperature=1.3, top_k=5, top_p=0.9, min_p=0.05))
    tokens, logprobs = jax.vmap(draw)(jax.random.split(jax.random.key(0), 40_000))
    filtered = rl_fn.min_p(rl_fn.top_p(rl_fn.top_k(rl_fn.temperature(logits, 1.3), 5), 0.9), 0.05)
    expected = _probabilities(filtered)
    assert (expected == 0).any()
    frequency = np.bincount(np.asarray(tokens), minlength=6) / 40_000
    np.testing.assert_allclose(frequency, expected, atol=4 * np.sqrt(0.25 / 40_000))
    np.testing.assert_allclose(np.exp(np.asarray(logprobs)), expected[np.asarray(tokens)], rtol=1e-5)


def test_temperature_zero_is_greedy_with_logprob_zero():
    logits = Draw(2).normal(5, 8)
    heat = jnp.array([0.0, 1.0, 0.0, 1.0, 0.0])
    tokens, logprobs = rl_fn.sample(jax.random.key(1), logits, temperature=heat, top_p=0.9)
    cold = np.asarray(heat) == 0
    np.testing.assert_array_equal(np.asarray(tokens)[cold], logits.argmax(-1)[cold])
    assert (np.asarray(logprobs)[cold] == 0).all()
    assert (np.asarray(logprobs)[~cold] < 0).all()


def test_the_key_decides():
    logits = jnp.zeros((4, 50))
    a, b, other = (rl_fn.sample(jax.random.key(i), logits)[0].tolist() for i in (0, 0, 1))
    assert a == b != other


@pytest.mark.parametrize(
    ("f", "bad"),
    [
        (rl_fn.top_k, 0),
        (rl_fn.top_p, 0.0),
        (rl_fn.top_p, 1.5),
        (rl_fn.min_p, -0.1),
        (rl_fn.temperature, -1.0),
        (rl_fn.top_p, np.array([0.5, 0.5], np.float32)),
    ],
)
def test_bad_parameters_are_refused(f, bad):
    with pytest.raises(ValueError, match=r"must|need"):
        f(jnp.zeros((3, 4)), bad)
