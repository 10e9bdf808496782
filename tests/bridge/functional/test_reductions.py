"""The extremum of nothing, against JAX: minus infinity, the least integer, False, and the other way round."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from rl_bridge.functional import from_jax
from tests.bridge.functional.both import assert_same, to_torch


@pytest.mark.parametrize("dtype", ["float32", "int32", "int8", "uint8", "bool"])
@pytest.mark.parametrize("reduce", [lax.reduce_max, lax.reduce_min])
def test_the_extremum_of_nothing(dtype, reduce):
    x = np.zeros((0, 2), dtype)
    assert_same(from_jax(lambda x: reduce(x, (0,)))(to_torch(x)), reduce(jnp.asarray(x), (0,)))
