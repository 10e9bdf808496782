"""Which arguments of from_jax that are no tensors share a program: those that are the same in value, type and shape."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from rl_bridge.functional import from_jax

ONE = np.ones((1, 1), np.float32)
PAIRS = {
    "dtype": (ONE, ONE.view(np.int32), [[2.0]], [[float(0x3F800000)]]),
    "shape": (np.ones((1, 2), np.float32), np.ones((2, 1), np.float32), [[2.0, 2.0]], [[2.0], [2.0]]),
    "value": (ONE, 2 * ONE, [[2.0]], [[3.0]]),
}


@pytest.mark.parametrize("what", PAIRS)
def test_an_array_of_other_bytes_shape_or_dtype_is_another_constant(what):
    add = from_jax(lambda x, constant: x + constant.astype(x.dtype))
    first, second, sum_first, sum_second = PAIRS[what]
    for constant, wanted in ((first, sum_first), (second, sum_second), (first, sum_first)):
        got = add(torch.ones(1, 1), constant)
        torch.testing.assert_close(got, torch.tensor(wanted, dtype=torch.float32), rtol=0, atol=0)


def test_zero_and_minus_zero_are_two_constants():
    sign = from_jax(jnp.copysign)
    assert [float(sign(torch.ones(()), zero)) for zero in (0.0, -0.0, 0.0, -0.0)] == [1.0, -1.0, 1.0, -1.0]
