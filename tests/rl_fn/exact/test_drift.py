"""Masks and weights against drift, on four tokens worked by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rl_fn

# Two sequences of two tokens; k1 = −d: 0.1, 0.9 and 0.4, −0.4. In the first, one token alone is beyond ½.
D = jnp.array([[-0.1, -0.9], [-0.4, 0.4]])
MASK = jnp.ones((2, 2), bool)
KEPT = {
    "token": [[True, False], [True, True]],
    "seq_sum": [[False, False], [True, True]],  # 1.0 and 0
    "seq_mean": [[True, True], [True, True]],  # ½, at the threshold, and 0
    "seq_max": [[False, False], [True, True]],
}


@pytest.mark.parametrize("level", KEPT)
def test_rejection_by_level(level):
    got = rl_fn.rejection_mask(D, MASK, statistic="k1", level=level, threshold=0.5)
    assert got.tolist() == KEPT[level]
    ids = jnp.array([[3, 3, 5, 5]], jnp.int32)
    packed = rl_fn.rejection_mask(
        D.reshape(1, 4), MASK.reshape(1, 4), statistic="k1", level=level, threshold=0.5, segment_ids=ids
    )
    assert packed.reshape(2, 2).tolist() == KEPT[level]


def test_toprs_weight_is_held_fixed():
    """ρ = e^−½ for a negative advantage: the loss is −ρ A log π, and its slope −ρ A alone."""
    new, old, a = jnp.array([-1.5]), jnp.array([-1.0]), jnp.array([-2.0])
    value, slope = jax.value_and_grad(lambda x: rl_fn.topr(x, old, a, jnp.ones(1, bool)).sum())(new)
    np.testing.assert_allclose([value, slope[0]], [np.exp(-0.5) * 2.0 * -1.5, np.exp(-0.5) * 2.0], rtol=1e-6)
