"""States of rows that hold nothing, and what of them has a gradient; and three sums that small numbers give away."""

import jax
import jax.numpy as jnp
import numpy as np

import rl_fn
from rl_fn.advantages.passk import passk_analytic_advantages
from rl_fn.logprobs.row_state import RowState, finalize_row_state, row_state
from rl_fn.multi_objective.scalarise import signs

LOGITS = jnp.array([0.0, 1.0, 2.0])


def test_a_token_outside_the_row_has_probability_zero():
    out = finalize_row_state(row_state(LOGITS, jnp.array(5)))
    assert out.logprobs == -jnp.inf and jnp.isfinite(out.logsumexp)


def test_a_row_without_entries_has_no_entropy():
    out = finalize_row_state(row_state(jnp.full(3, -jnp.inf), jnp.array(1)))
    assert (out.logprobs, out.entropy, out.logsumexp) == (-jnp.inf, 0.0, -jnp.inf)


def test_what_of_a_state_has_a_gradient():
    assert not jax.grad(lambda x: row_state(x, jnp.array(0)).maximum)(LOGITS).any()

    def logprobs(target):
        return finalize_row_state(RowState(jnp.array(2.0), jnp.array(1.5), jnp.array(0.5), target)).logprobs

    assert jax.grad(logprobs)(jnp.array(-jnp.inf)) == 0.0 and jax.grad(logprobs)(jnp.array(1.0)) == 1.0


def test_directions_are_plus_and_minus_one():
    assert signs([True, False], 2).tolist() == [1.0, -1.0] and signs(False, 2).tolist() == [-1.0, -1.0]


def test_the_best_of_sets():
    """One of four is right: sets of two with it are worth 1, with another 1/3, and sets of three 1 and 2/3."""
    rewards = jnp.array([1.0, 0.0, 0.0, 0.0])
    got = passk_analytic_advantages(rewards, k=2)
    np.testing.assert_allclose(got, [1.0, -1 / 3, -1 / 3, -1 / 3], rtol=1e-6)
    got = passk_analytic_advantages(rewards, k=3) * np.float32(np.sqrt(3 / 16))
    np.testing.assert_allclose(got, [1 / 4, -1 / 12, -1 / 12, -1 / 12], rtol=1e-6)


def test_vtrace_has_no_gradient_in_the_ratios():
    row, mask = jnp.array([1.0, 2.0]), jnp.ones(2, bool)

    def total(x):
        out = rl_fn.vtrace(row, row, x, mask, rho_clip=3.0, c_clip=3.0)
        return jnp.sum(out.advantages) + 2.0 * jnp.sum(out.returns)

    assert not jax.grad(total)(jnp.array([0.5, -0.5])).any()
