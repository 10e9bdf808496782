"""Products with more than one batch axis, whose order is that of the left operand's numbers."""

import jax
import numpy as np
import pytest
import torch

from rl_bridge.functional import from_jax


@pytest.mark.parametrize(
    ("batch_x", "batch_y", "wanted"), [((0, 1), (0, 1), "abij,abjk->abik"), ((1, 0), (1, 0), "abij,abjk->baik")]
)
def test_two_batch_axes(batch_x, batch_y, wanted):
    product = from_jax(lambda x, y: jax.lax.dot_general(x, y, (((3,), (2,)), (batch_x, batch_y))))
    x, y = (np.arange(n, dtype=np.float32).reshape(shape) for n, shape in ((72, (2, 3, 3, 4)), (120, (2, 3, 4, 5))))
    got = product(torch.from_numpy(x), torch.from_numpy(y))
    np.testing.assert_array_equal(got.numpy(), np.einsum(wanted, x, y))
