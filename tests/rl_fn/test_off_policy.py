"""Off-policy advantages reduce to the on-policy ones, and masks against drift keep what they promise."""

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import rl_fn
from tests.rl_fn.registry import Draw, T

SEEDS = st.integers(0, 2**32 - 1)
OPTIONS = {"gamma": 0.9, "bootstrap": 0.4}


@jax.jit
def _estimates(r, v, m, ids):
    zero = 0.0 * r
    return {
        "gae": rl_fn.gae(r, v, m, lam=0.7, **OPTIONS, segment_ids=ids),
        "vtrace": rl_fn.vtrace(r, v, zero, m, lam=0.7, **OPTIONS, segment_ids=ids),
        "retrace": rl_fn.retrace(r, v, zero, m, lam=0.7, **OPTIONS, segment_ids=ids),
        "n_step": rl_fn.n_step(r, v, m, n=T, **OPTIONS, segment_ids=ids),
        "one_step": rl_fn.n_step(r, v, m, n=1, **OPTIONS, segment_ids=ids),
        "monte_carlo": rl_fn.gae(r, v, m, lam=1.0, **OPTIONS, segment_ids=ids),
        "td": rl_fn.gae(r, v, m, lam=0.0, **OPTIONS, segment_ids=ids),
    }


@given(seed=SEEDS)
def test_on_policy_identities(seed):
    d = Draw(seed)
    out = _estimates(d.normal(), d.normal(), d.mask(), d.segments())
    tolerance = {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(out["vtrace"].returns, out["gae"].returns, **tolerance)
    for a, b in (("retrace", "gae"), ("n_step", "monte_carlo"), ("one_step", "td")):
        np.testing.assert_allclose(out[a], out[b], **tolerance, err_msg=a)


@given(seed=SEEDS)
def test_second_moment_mask_keeps_the_most_within_the_threshold(seed):
    d = Draw(seed)
    x, mask = d.normal(), d.mask()
    kept = np.asarray(rl_fn.second_moment_mask(x, mask, threshold=0.3))
    assert not (kept & ~mask).any()
    if kept.any():
        assert np.mean(np.square(x[kept])) <= 0.3 + 1e-6
    left = np.sort(np.square(x[mask & ~kept]))
    if left.size:
        assert np.mean(np.append(np.square(x[kept]), left[0])) > 0.3 - 1e-6
