"""Log-probabilities, entropy and the mergeable row state at the edges: truncated rows, tiles, narrow dtypes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rl_fn
from tests.rl_fn.registry import Draw, V

SEEDS = st.integers(0, 2**32 - 1)


@functools.partial(jax.jit, static_argnames=("temperature", "softcap"))
def _outputs(logits, tokens, **options):
    return jnp.stack(list(rl_fn.logits_logprobs(logits, tokens, **options)))


def test_truncated_logits_have_finite_entropy_and_gradients():
    logits = jnp.array([[1.0, -jnp.inf, 0.5, -jnp.inf], [-jnp.inf, -jnp.inf, -1000.0, -jnp.inf]])
    tokens = jnp.array([0, 2])
    out = rl_fn.logits_logprobs(logits, tokens)
    np.testing.assert_allclose(out.entropy, [0.66290, 0.0], atol=1e-4)
    for f in (lambda z: _outputs(z, tokens).sum(), jax.jit(lambda z: rl_fn.entropy(z).sum())):
        slope = jax.grad(f)(logits)
        assert np.isfinite(slope).all()
        assert not slope[logits == -jnp.inf].any()


def test_a_token_outside_the_support_is_impossible_and_has_no_gradient():
    allowed_tokens = jnp.array([True, False, True])

    @jax.jit
    def logprob(z):
        return rl_fn.logits_logprobs(z, jnp.array(1), allowed_tokens=allowed_tokens).logprobs

    assert logprob(jnp.zeros(3)) == -jnp.inf
    assert not jax.grad(logprob)(jnp.zeros(3)).any()


def test_a_support_is_minus_infinity_elsewhere():
    d = Draw(1)
    logits, kept = d.normal(5, V), d.allowed_tokens(5, V)
    masked = np.where(kept, logits, -np.inf).astype(np.float32)
    zeros = np.zeros(5, np.int32)
    np.testing.assert_allclose(_outputs(logits, zeros, allowed_tokens=kept), _outputs(masked, zeros), rtol=1e-6)


@functools.partial(jax.jit, static_argnums=2)
def _tiled(logits, tokens, starts):
    """From the left and from the right: merge is associative, and any order of tiles will do."""
    a, b, c = (rl_fn.row_state(logits[:, s : s + 4], tokens, start=s) for s in starts)
    groupings = (
        rl_fn.merge_row_states(rl_fn.merge_row_states(a, b), c),
        rl_fn.merge_row_states(a, rl_fn.merge_row_states(b, c)),
    )
    return [jnp.stack(list(rl_fn.finalize_row_state(state))) for state in groupings]


@given(seed=SEEDS, starts=st.sampled_from([(0, 4, 8), (8, 0, 4)]))
def test_any_tiling_in_any_order_is_the_whole_row(seed, starts):
    d = Draw(seed)
    logits, tokens = d.normal(2, 12, scale=20.0), d.integers(12, 2)
    logits[0, 4:8] = -np.inf  # a whole tile without an allowed entry
    for got in _tiled(logits, tokens, starts):
        np.testing.assert_allclose(got, _outputs(logits, tokens), rtol=1e-5, atol=1e-5)


def test_the_gradient_through_merged_tiles_is_that_of_the_whole_row():
    d = Draw(2)
    logits, tokens, weights = jnp.asarray(d.normal(3, 8, scale=5.0)), d.integers(8, 3), d.normal(3, 3)

    def whole(z):
        return jnp.vdot(_outputs(z, tokens), weights)

    @jax.jit
    def tiled(z):
        states = [rl_fn.row_state(z[:, s : s + 4], tokens, start=s) for s in (0, 4)]
        return jnp.vdot(jnp.stack(list(rl_fn.finalize_row_state(rl_fn.merge_row_states(*states)))), weights)

    np.testing.assert_allclose(jax.grad(tiled)(logits), jax.grad(whole)(logits), rtol=1e-5, atol=1e-6)


def test_linear_logprobs_do_not_depend_on_the_chunk_and_never_hold_the_logits():
    d = Draw(3)
    hidden, weight, tokens = jnp.asarray(d.normal(6, 5)), jnp.asarray(d.normal(103, 5)), d.integers(103, 6)

    def total(h, w, chunk):
        return jnp.stack(list(rl_fn.linear_logprobs(h, w, tokens, chunk=chunk))).sum()

    gradient = jax.jit(jax.value_and_grad(total, argnums=(0, 1)), static_argnums=2)
    whole = gradient(hidden, weight, 103)
    for chunk in (7, 50, 1000):
        for a, b in zip(jax.tree.leaves(gradient(hidden, weight, chunk)), jax.tree.leaves(whole), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)
    text = gradient.lower(hidden, weight, 7).as_text()
    assert "tensor<6x7xf32>" in text and "tensor<6x103xf32>" not in text and "tensor<15x6x7xf32>" not in text


@pytest.mark.long
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_bfloat16_logits_of_a_large_vocabulary(offset):
    """Within 1e-4 nats of float64 on the same bfloat16 values; the entropy does not mind a common offset."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(0.0, 3.0, (4, 50_000)) + offset, jnp.bfloat16)
    tokens = np.arange(4, dtype=np.int32)
    got = rl_fn.logits_logprobs(logits, tokens)
    wide = np.asarray(logits, np.float64)
    shifted = wide - wide.max(-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    np.testing.assert_allclose(got.logprobs, log_p[np.arange(4), tokens], atol=1e-4)
    np.testing.assert_allclose(got.entropy, -(np.exp(log_p) * log_p).sum(-1), atol=1e-4)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": -1.0}, {"softcap": 0.0}])
def test_bad_arguments_are_refused_with_their_values(options):
    with pytest.raises(ValueError, match=str(next(iter(options.values())))):
        rl_fn.logits_logprobs(jnp.zeros(3), jnp.array(0), **options)


@pytest.mark.parametrize("temperature", [np.array(0.5), np.array([0.5, 2.0])], ids=["number", "per-token"])
def test_a_wide_temperature_makes_the_tiles_wide(temperature):
    d = Draw(3)
    hidden, weight, tokens = d.normal(2, 4), d.normal(V, 4), d.integers(V, 2)
    with jax.enable_x64(True):
        tiled = rl_fn.linear_logprobs(hidden, weight, tokens, temperature=temperature, chunk=3)
        whole = rl_fn.logits_logprobs(hidden.astype(np.float64) @ weight.T, tokens, temperature=temperature)
        for a, b in zip(tiled, whole, strict=True):
            assert a.dtype == jnp.float64
            np.testing.assert_allclose(a, b, rtol=1e-12)
