"""The scan under every return and advantage, at lengths around its block size and its powers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_fn.recurrence import BLOCK, _scan_of_symbolic_length, scan
from tests.rl_fn.laws import quick_jit

LENGTHS = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK**2, BLOCK**2 + 1, BLOCK**3 + 3]


def one_by_one(decay: np.ndarray, inputs: np.ndarray, init: np.ndarray, reverse: bool) -> np.ndarray:
    out, x = np.zeros(inputs.shape), init
    for t in reversed(range(inputs.shape[-1])) if reverse else range(inputs.shape[-1]):
        x = decay[..., t] * x + inputs[..., t]
        out[..., t] = x
    return out


@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("length", LENGTHS)
def test_scan_is_the_recurrence_one_by_one(length, reverse):
    rng = np.random.default_rng(length)
    decay, inputs = rng.uniform(-1.0, 1.0, (2, 3, length)), rng.normal(size=(2, 3, length))
    init = rng.normal(size=(2, 3))
    decay[rng.random(decay.shape) < 0.1] = 0.0
    decay[rng.random(decay.shape) < 0.2] = 1.0
    out = jax.jit(scan, static_argnames="reverse")(
        *(jnp.asarray(x, jnp.float32) for x in (decay, inputs, init)), reverse=reverse
    )
    assert out.shape == inputs.shape and out.dtype == jnp.float32
    np.testing.assert_allclose(out, one_by_one(decay, inputs, init, reverse), atol=2e-5)


@pytest.mark.parametrize("reverse", [True, False])
def test_a_constant_passes_through_exactly(reverse):
    """Decay 1 and one input: what a masked position does must not change a digit."""
    length = BLOCK**2 + 5
    inputs = jnp.zeros(length).at[length - 1 if reverse else 0].set(0.1)
    np.testing.assert_array_equal(scan(jnp.ones(length), inputs, jnp.zeros(()), reverse=reverse), jnp.full(length, 0.1))


@pytest.mark.parametrize("reverse", [True, False])
def test_a_decay_of_zero_cuts_off_what_is_beyond(reverse):
    length, cut = BLOCK**2 + 5, BLOCK + 3
    decay = jnp.ones(length).at[cut].set(0.0)
    inputs = jnp.arange(1.0, length + 1)
    gradient = jax.grad(lambda x: scan(decay, x, jnp.ones(()), reverse=reverse)[cut])(inputs)
    np.testing.assert_array_equal(gradient, jnp.zeros(length).at[cut].set(1.0))
    out = scan(decay, inputs, jnp.ones(()), reverse=reverse)
    assert out[cut] == inputs[cut]
    near = cut - 1 if reverse else cut + 1
    assert out[near] == inputs[near] + inputs[cut]


def _summed(decay, inputs, init, cuts, weights, *, reverse):
    x = scan(decay, inputs, init, reverse=reverse, cuts=cuts)
    return jnp.sum(weights * x), x


CUT = {
    reverse: quick_jit(jax.value_and_grad(functools.partial(_summed, reverse=reverse), argnums=(0, 1), has_aux=True))
    for reverse in (True, False)
}


@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_cut_keeps_what_is_not_finite_from_the_neighbours(length, reverse):
    """Value and gradient, also in decays that are not finite, beside segments that are shorter than a block."""
    rng = np.random.default_rng(length)
    segments = np.cumsum(rng.random((6, length)) < 0.15, axis=-1)
    edges = np.diff(segments, axis=-1) != 0
    cuts = np.pad(edges, ((0, 0), (0, 1) if reverse else (1, 0)))
    ill = segments % 3 == 1
    decay, inputs, weights = (rng.uniform(0.5, 1.0, (6, length)).astype(np.float32) for _ in range(3))
    init = rng.normal(size=6).astype(np.float32)
    (_, clean), slopes = CUT[reverse](decay, inputs, init, cuts, weights)
    np.testing.assert_allclose(clean, one_by_one(np.where(cuts, 0, decay), inputs, init, reverse), rtol=1e-5, atol=1e-5)
    for value in (np.nan, np.inf, -np.inf):
        spoiled = [np.where(ill, np.float32(value), x) for x in (decay, inputs)]
        (_, found), found_slopes = CUT[reverse](*spoiled, init, cuts, weights)
        for a, b in zip((clean, *slopes), (found, *found_slopes), strict=True):
            np.testing.assert_array_equal(np.asarray(a)[~ill], np.asarray(b)[~ill])
        assert not np.isfinite(np.asarray(found)[ill]).any()


@pytest.mark.parametrize("reverse", [True, False])
def test_the_form_for_symbolic_lengths_is_the_scan(reverse):
    """Its steps are jax.lax.associative_scan's, which JAX alone can run only where the length is a number."""
    rng = np.random.default_rng(0)
    decay, inputs = (jnp.asarray(x, jnp.float32) for x in rng.uniform(-1.0, 1.0, (2, 2, 3, BLOCK + 3)))
    init, cuts = jnp.arange(6.0).reshape(2, 3), jnp.asarray(rng.random((2, 3, BLOCK + 3)) < 0.2)

    def both(*forms):
        given = [(a, inputs, init, c) for a in (decay, None) for c in (cuts, None)]
        return [[form(*x[:3], x[3], reverse=reverse) for x in given] for form in forms]

    def plain(decay, inputs, init, cuts, *, reverse):
        return scan(decay, inputs, init, reverse=reverse, cuts=cuts)

    for a, b in zip(*quick_jit(lambda: both(plain, _scan_of_symbolic_length))(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
