"""What a read out of bounds in mode "fill" gives: NaN, or the extreme of the integers, as in JAX."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from rl_bridge.functional import from_jax


@pytest.mark.parametrize("dtype", ["float32", "int32", "int8", "uint8"])
def test_the_value_of_a_read_out_of_bounds(dtype):
    def read(x, i):
        return x.at[i].get(mode="fill")

    x, i = np.arange(1, 4).astype(dtype), np.array([2, 3, 0, 7], np.int32)
    wanted = np.asarray(read(jnp.asarray(x), jnp.asarray(i)))
    fill = np.nan if dtype == "float32" else np.iinfo(dtype).max if dtype == "uint8" else np.iinfo(dtype).min
    np.testing.assert_array_equal(wanted, np.array([3, fill, 1, fill], dtype))
    np.testing.assert_array_equal(from_jax(read)(torch.from_numpy(x), torch.from_numpy(i)).numpy(), wanted)
