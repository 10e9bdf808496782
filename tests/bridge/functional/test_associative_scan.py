"""jax.lax.associative_scan of one array alone: what it scans need not be a pair."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.bridge.functional.both import check


# JAX refuses an axis counted from the end where it goes backwards.
@pytest.mark.parametrize(("axis", "reverse"), [(0, True), (1, False), (1, True), (-1, False)])
def test_of_one_array(axis, reverse):
    x = np.random.default_rng(0).normal(size=(3, 11)).astype(np.float32)
    check(lambda x: lax.associative_scan(jnp.logaddexp, x, axis=axis, reverse=reverse), x)
