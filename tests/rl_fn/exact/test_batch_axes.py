"""More axes in front of a row or a group than the cases have: the same numbers as for each by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rl_fn
from rl_fn._groups import within
from rl_fn.objectives.batch import Rollouts, counted
from rl_fn.objectives.dialects.dialect_terms import OverWidth

RNG = np.random.default_rng(5)
SHAPE = (2, 3, 5)
REWARDS, VALUES, LOG_RATIOS = (jnp.asarray(x, jnp.float32) for x in RNG.normal(size=(3, *SHAPE)))
MASK = jnp.asarray(RNG.random(SHAPE) < 0.8)
LAST = jnp.asarray(RNG.normal(size=SHAPE[:2]), jnp.float32)
RETURNS = {
    "gae": lambda r, v, d, m, last: rl_fn.gae(r, v, m, gamma=0.9, lam=0.8, bootstrap=last),
    "linear_recurrence": lambda r, v, d, m, last: rl_fn.linear_recurrence(0.5, r, m, init=last),
    "n_step": lambda r, v, d, m, last: rl_fn.n_step(r, v, m, n=2, gamma=0.9, bootstrap=last),
    "retrace": lambda r, v, d, m, last: rl_fn.retrace(r, v, d, m, gamma=0.9, lam=0.8, bootstrap=last),
    "td_lambda": lambda r, v, d, m, last: rl_fn.td_lambda(r, v, m, gamma=0.9, lam=0.8, bootstrap=last),
    "vtrace": lambda r, v, d, m, last: rl_fn.vtrace(r, v, d, m, gamma=0.9, bootstrap=last),
}


@pytest.mark.parametrize("name", RETURNS)
def test_rows_in_two_axes(name):
    arrays = (REWARDS, VALUES, LOG_RATIOS, MASK, LAST)
    flat = RETURNS[name](*(x.reshape(6, *x.shape[2:]) for x in arrays))
    for a, b in zip(jax.tree.leaves(RETURNS[name](*arrays)), jax.tree.leaves(flat), strict=True):
        np.testing.assert_allclose(a.reshape(b.shape), b, rtol=1e-6, atol=1e-6)


def test_ragged_groups_in_an_axis():
    x, valid = REWARDS[0], jnp.asarray([[True] * 5, [True, False] * 2 + [True], [True] * 5])
    ids = jnp.asarray([[0, 0, 1, 1, 1], [0] * 5, [2, 0, 2, 0, 0]], jnp.int32)
    stacked = within(x, valid, ids)
    for row in range(3):
        alone = within(x[row], valid[row], ids[row])
        for a, b in zip(stacked, alone, strict=True):
            np.testing.assert_allclose(a[row], b, rtol=1e-6, atol=1e-6)


def test_the_completions_that_count():
    mask, valid = jnp.ones((2, 3, 4), bool), jnp.array([[True, False, True], [False, True, True]])
    expected = np.broadcast_to(valid[..., None], mask.shape)
    np.testing.assert_array_equal(counted(Rollouts(None, mask, valid=valid)), expected)


def test_the_width_is_the_last_axis():
    assert OverWidth()(REWARDS, jnp.ones(SHAPE, bool), None).denominator == 2 * 3 * 5


def test_a_matrix_of_several_has_a_scale_for_each_channel():
    found = rl_fn.quantize_fp8(REWARDS, granularity="channel")
    np.testing.assert_allclose(found.scale[..., 0], jnp.abs(REWARDS).max(-1) / 448.0, rtol=1e-6)
