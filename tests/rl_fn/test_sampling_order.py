"""sample applies its transforms in the documented order: temperature, top_k, top_p, min_p.

Where two of them commute, no order can be seen: top_k with temperature (both go by rank) and with min_p (which looks at
the largest probability alone).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rl_fn

LOGITS = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
# Options, and the probabilities of the tokens that they leave: by hand, and by hand in the other order.
ORDERS = {
    # Of the two that top_k leaves, 4/7 reaches ½; of all four, 0.4 does not, and two are left.
    "top_k before top_p": ({"top_k": 2, "top_p": 0.5}, [1.0], [4 / 7, 3 / 7]),
    # Of all four, 0.4 does not reach ½; of the two that min_p would leave first, 4/7 does.
    "top_p before min_p": ({"top_p": 0.5, "min_p": 0.6}, [4 / 7, 3 / 7], [1.0]),
    # Squared and normalised, 16/30 reaches ½.
    "temperature before top_p": ({"temperature": 0.5, "top_p": 0.5}, [1.0], [16 / 25, 9 / 25]),
    # Squared, 9/16 is below 0.6 of the largest; before, 3/4 is not.
    "temperature before min_p": ({"temperature": 0.5, "min_p": 0.6}, [1.0], [16 / 25, 9 / 25]),
}
KEYS = jax.random.split(jax.random.key(0), 64)


@pytest.mark.parametrize("name", ORDERS)
def test_order(name):
    options, expected, otherwise = ORDERS[name]
    tokens, logprobs = jax.vmap(lambda key: rl_fn.sample(key, jnp.asarray(LOGITS), **options))(KEYS)
    assert sorted(set(tokens.tolist())) == list(range(len(expected)))
    np.testing.assert_allclose(np.exp(logprobs), np.array(expected)[np.asarray(tokens)], rtol=1e-5)
    assert len(expected) != len(otherwise)


@pytest.mark.parametrize("name", ORDERS)
def test_the_other_order_would_be_seen(name):
    options, _, otherwise = ORDERS[name]
    x = jnp.asarray(LOGITS)
    for transform in reversed(options):
        x = getattr(rl_fn, transform)(x, options[transform])
    kept = np.exp(np.asarray(x)[np.isfinite(x)])
    np.testing.assert_allclose(kept / kept.sum(), otherwise, rtol=1e-5)
