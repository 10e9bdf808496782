"""Identities and invariances of advantages from a group."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rl_fn
from tests.rl_fn.registry import Draw

SEEDS = st.integers(0, 2**32 - 1)
OPO, GPG = jax.jit(rl_fn.opo_advantages), jax.jit(rl_fn.gpg_advantages)
LEAVE_ONE_OUT = jax.jit(rl_fn.leave_one_out_std_advantages)
RAGGED = {
    "grpo_advantages": {},
    "rloo_advantages": {},
    "gpg_advantages": {},
    "maxrl_advantages": {},
    "leave_one_out_std_advantages": {},
    "passk_advantages": {},
    "passk_analytic_advantages": {"k": 2},
    "group_filter": {"low": 0.4},
}


@functools.cache
def compiled(name):
    return jax.jit(functools.partial(getattr(rl_fn, name), **RAGGED[name]))


@given(seed=SEEDS)
def test_rloo_is_the_centred_reward_scaled_up(seed):
    r = Draw(seed).normal(3, 5)
    centred = rl_fn.grpo_advantages(r, scale="none")
    np.testing.assert_allclose(rl_fn.rloo_advantages(r), 5 / 4 * np.asarray(centred), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", RAGGED)
@given(seed=SEEDS)
def test_ragged_groups_equal_dense_ones(name, seed):
    d = Draw(seed)
    function, dense = compiled(name), d.uniform(0.1, 1.0, 3, 4)
    order = d.rng.permutation(12)
    ids = np.repeat(np.arange(3, dtype=np.int32), 4)[order]
    ragged = function(dense.reshape(-1)[order], group_ids=ids)
    np.testing.assert_allclose(ragged, np.asarray(function(dense)).reshape(-1)[order], rtol=1e-5, atol=1e-6)


@given(seed=SEEDS)
def test_large_offsets_cost_the_baselines_no_precision(seed):
    d = Draw(seed)
    r, lengths = np.round(d.uniform(0.0, 1.0, 3, 4) * 64).astype(np.float32) / 64, d.integers(9, 3, 4, low=1)
    for function in (lambda x: OPO(x, lengths), GPG, LEAVE_ONE_OUT):
        # Multiples of 1/64 up to 10⁴ + 1 are exact in float32: what differs would be the function's own rounding.
        np.testing.assert_allclose(function(r + np.float32(1e4)), function(r), rtol=1e-5, atol=1e-5)
