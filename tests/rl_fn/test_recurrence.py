"""The scan under every return and advantage, at lengths around its block size and its powers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_fn.recurrence import BLOCK, scan

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
