"""Identities between members of a family, and what the papers promise."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rl_fn
from tests.rl_fn.registry import Draw

SEEDS = st.integers(0, 2**32 - 1)
MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
PARTS = jax.jit(rl_fn.aggregate_parts, static_argnums=2, static_argnames="max_completion_length")
AGGREGATE = jax.jit(rl_fn.aggregate, static_argnums=2, static_argnames="max_completion_length")
TD_LAMBDA_AND_GAE = jax.jit(
    lambda r, v, m, gamma, lam: [f(r, v, m, gamma=gamma, lam=lam, bootstrap=0.4) for f in (rl_fn.gae, rl_fn.td_lambda)],
    static_argnums=(3, 4),
)
K3 = jax.jit(jax.value_and_grad(lambda x: rl_fn.kl_k3(x, jnp.zeros_like(x))[0]))
GRPO = jax.jit(rl_fn.grpo_advantages, static_argnames=("scale", "eps"))
RLOO = jax.jit(rl_fn.rloo_advantages)
WHITEN = jax.jit(rl_fn.whiten, static_argnames="eps")
GAE = jax.jit(lambda r, v, m: rl_fn.gae(r, v, m, gamma=0.9, lam=0.8))


@given(seed=SEEDS, gamma=st.sampled_from([0.0, 0.9, 1.0]), lam=st.sampled_from([0.0, 0.7, 1.0]))
def test_td_lambda_is_gae(seed, gamma, lam):
    d = Draw(seed)
    rewards, values, mask = d.normal(), d.normal(), d.mask()
    a, b = TD_LAMBDA_AND_GAE(rewards, values, mask, gamma, lam)
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_gae_with_lambda_one_is_the_return_minus_the_value():
    d = Draw(0)
    rewards, values, mask = d.normal(), d.normal(), d.mask()
    returns = rl_fn.gae(rewards, values, mask, gamma=0.9).returns
    np.testing.assert_allclose(returns, rl_fn.discounted_returns(rewards, mask, gamma=0.9), rtol=1e-5, atol=1e-5)


@given(seed=SEEDS)
def test_holes_are_jumped_over(seed):
    """Counted tokens moved together at the front have the same advantages."""
    d = Draw(seed)
    rewards, values, mask = d.normal(), d.normal(), d.mask()
    front = np.argsort(~mask, axis=-1, kind="stable")
    r, v, m = (np.take_along_axis(x, front, axis=-1) for x in (rewards, values, mask))
    for scattered, dense in zip(GAE(rewards, values, mask), GAE(r, v, m), strict=True):
        np.testing.assert_allclose(
            np.take_along_axis(np.asarray(scattered), front, axis=-1), dense, rtol=1e-5, atol=1e-6
        )


def _packed(*rows: np.ndarray) -> np.ndarray:
    return np.concatenate(rows)[None]


def _per_sequence(rewards, values, mask, segment_ids):
    """All that depends on where a sequence ends: per token, and aggregated."""
    tokens = [*rl_fn.gae(rewards, values, mask, gamma=0.9, lam=0.8, bootstrap=0.3, segment_ids=segment_ids)]
    tokens += [
        rl_fn.log_ratio(rewards, values, mask, level=x, segment_ids=segment_ids) for x in ("sequence", "sequence_sum")
    ]
    return tokens, [rl_fn.aggregate_parts(rewards, mask, mode, segment_ids=segment_ids) for mode in MODES[:4]]


@given(seed=SEEDS)
def test_packed_is_padded(seed):
    """Three padded rows as one packed row: the same advantages, ratios and aggregates."""
    d = Draw(seed)
    rows = d.normal(), d.normal(), d.mask()
    ids = np.repeat(np.arange(3, dtype=np.int32), rows[0].shape[1])[None]
    padded_tokens, padded_parts = PER_SEQUENCE(*rows, None)
    packed_tokens, packed_parts = PER_SEQUENCE(*(_packed(*x) for x in rows), ids)
    for a, b in zip(padded_tokens, packed_tokens, strict=True):
        np.testing.assert_allclose(_packed(*np.asarray(a)), b, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.array(padded_parts), np.array(packed_parts), rtol=1e-5, atol=1e-5)


PER_SEQUENCE = jax.jit(_per_sequence)


def test_a_segments_size_does_not_spoil_its_neighbour():
    x = jnp.array([1e8, 1e8, 0.25, 0.5])
    got = rl_fn.sequence_logprobs(x, jnp.ones(4, bool), segment_ids=jnp.array([0, 0, 1, 1]))
    assert got[2:].tolist() == [0.75, 0.75]


@given(seed=SEEDS, group=st.sampled_from([2, 3, 8]))
def test_rloo_is_centred_times_g_over_g_minus_one(seed, group):
    rewards = Draw(seed).normal(2, group)
    centred = np.asarray(GRPO(rewards, scale="none"))
    np.testing.assert_allclose(RLOO(rewards), group / (group - 1) * centred, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reward", [0.1, 0.7, 1e4 + 0.3, -3e-5])
@pytest.mark.parametrize("group", [1, 7, 8])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_equal_rewards_have_no_advantage(reward, group, eps):
    rewards = np.full((3, group), reward, np.float32)
    for scale in ("group", "batch", "none"):
        assert not np.asarray(GRPO(rewards, scale=scale, eps=eps)).any()
    if group > 1:
        assert not np.asarray(RLOO(rewards)).any()
    assert not np.asarray(WHITEN(rewards, np.ones_like(rewards, bool), eps=eps)).any()


@given(seed=SEEDS)
def test_normalised_advantages_ignore_an_offset_and_a_scale(seed):
    # Multiples of 1/64 stay exact in float32 after the shift, so only the function's own rounding is seen.
    rewards = Draw(seed).integers(65, 3, 8).astype(np.float32) / 64
    for normalise in (
        lambda r, eps: GRPO(r, eps=eps),
        lambda r, eps: GRPO(r, scale="batch", eps=eps),
        lambda r, eps: WHITEN(r, np.ones(r.shape, bool), eps=eps),
    ):
        plain = np.asarray(normalise(rewards, 0.0))
        np.testing.assert_allclose(normalise(rewards + np.float32(1e4), 0.0), plain, atol=2e-5)
        np.testing.assert_allclose(normalise(rewards * np.float32(1e-3), 0.0), plain, atol=2e-5)
    by_default = GRPO(rewards)
    np.testing.assert_allclose(GRPO(rewards + np.float32(1e4)), by_default, atol=2e-5)


SLOPE = jax.jit(lambda loss, x, *rest: jax.grad(lambda y: loss(y, *rest).sum())(x), static_argnums=0)


@functools.cache
def _ppo(low, high, dual):
    return functools.partial(rl_fn.ppo_clip, clip_low=low, clip_high=high, dual_clip=dual)


@given(seed=SEEDS)
def test_ppo_at_ratio_one_has_reinforces_gradient(seed):
    d = Draw(seed)
    logprobs, advantages = d.logprobs(), d.normal()
    reinforce = SLOPE(rl_fn.reinforce, jnp.asarray(logprobs), advantages)
    for clips in ((0.2, 0.2, None), (0.0, 0.0, None), (0.2, 0.2, 3.0)):
        ppo = SLOPE(_ppo(*clips), jnp.asarray(logprobs), logprobs, advantages)
        np.testing.assert_allclose(ppo, reinforce, rtol=1e-6)


@given(seed=SEEDS)
def test_clipped_tokens_are_those_without_gradient(seed):
    d = Draw(seed)
    logprobs, old, advantages, mask = d.logprobs(), d.logprobs(), d.normal(), d.mask()
    clips = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 2.0}
    slope = SLOPE(_ppo(*clips.values()), jnp.asarray(logprobs), old, advantages, mask)
    cut = rl_fn.clipped_tokens(logprobs, old, advantages, mask, **clips)
    np.testing.assert_array_equal(np.asarray(cut), (np.asarray(slope) == 0) & mask & (advantages != 0))


@given(d=st.floats(-60.0, 60.0, width=32) | st.floats(-(2.0**-10), 2.0**-10, width=32))
def test_k3_is_accurate_and_never_negative(d):
    value, slope = K3(jnp.array([d], jnp.float32))
    exact = np.expm1(-np.longdouble(d)) + np.longdouble(d)
    assert value >= 0
    if abs(d) > 1e-6:  # below, expm1's own cancellation in long double shows
        np.testing.assert_allclose(float(value), float(exact), rtol=1e-5)
    np.testing.assert_allclose(float(slope[0]), -np.expm1(-np.float64(d)), rtol=2e-5, atol=1e-30)


@pytest.mark.parametrize("d", [90.0, -90.0])
def test_k3_at_ninety(d):
    value, slope = K3(jnp.array([d]))
    if d > 0:
        assert float(value) == 89.0 and float(slope[0]) == 1.0
    else:  # e⁹⁰ does not fit into float32: the tangent at 64
        np.testing.assert_allclose(float(value), np.exp(64.0) * 27, rtol=1e-5)
        np.testing.assert_allclose(float(slope[0]), -np.exp(64.0), rtol=1e-5)
    with jax.enable_x64(True):
        value, slope = K3(jnp.array([d]))
        np.testing.assert_allclose([value, slope[0]], [np.expm1(-d) + d, -np.expm1(-d)], rtol=1e-12)


def test_kl_estimators_as_losses_by_enumeration():
    """E_π[∇k1] = 0, E_π[∇k2] = ∇KL(π‖π_ref), E_π[∇k3] = ∇KL(π_ref‖π), over all tokens of a small vocabulary."""
    d = Draw(4)
    logits, ref = jnp.asarray(d.normal(6)), jnp.asarray(d.normal(6))
    p = jax.nn.softmax(logits)

    def expected_gradient(estimator):
        return jax.jit(jax.grad(lambda z: jnp.sum(p * estimator(jax.nn.log_softmax(z), jax.nn.log_softmax(ref)))))(
            logits
        )

    reverse = jax.jit(jax.grad(lambda z: rl_fn.kl_categorical(z, ref)))(logits)
    forward = jax.jit(jax.grad(lambda z: rl_fn.kl_categorical(ref, z)))(logits)
    np.testing.assert_allclose(expected_gradient(rl_fn.kl_k1), np.zeros(6), atol=1e-6)
    np.testing.assert_allclose(expected_gradient(rl_fn.kl_k2), reverse, atol=1e-6)
    np.testing.assert_allclose(expected_gradient(rl_fn.kl_k3), forward, atol=1e-6)
    unbiased = jnp.sum(p * rl_fn.kl_k3(jax.nn.log_softmax(logits), jax.nn.log_softmax(ref)))
    np.testing.assert_allclose(unbiased, rl_fn.kl_categorical(logits, ref), rtol=1e-5)


def test_straight_through_has_one_value_and_the_other_gradient():
    ref = jnp.array([0.5, -0.25])

    def mixed(x):
        return rl_fn.kl_straight_through(rl_fn.kl_k3(x, ref), rl_fn.kl_k2(x, ref)).sum()

    x = jnp.array([0.1, 0.2])
    np.testing.assert_allclose(mixed(x), rl_fn.kl_k3(x, ref).sum(), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(mixed)(x), x - ref, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@given(seed=SEEDS, cuts=st.sampled_from([(4,), (1, 5), (2, 3, 6), (1, 2, 3, 4, 5, 6, 7)]))
def test_any_partition_adds_up_to_the_whole(mode, seed, cuts):
    d = Draw(seed)
    x, mask = d.normal(8, 5), d.mask(8, 5)
    max_completion_length = 16 if mode == "seq-mean-token-sum-norm" else None
    pieces = [(x[a:b], mask[a:b]) for a, b in itertools.pairwise((0, *cuts, 8))]
    whole = PARTS(x, mask, mode, max_completion_length=max_completion_length)
    added = sum((PARTS(*p, mode, max_completion_length=max_completion_length) for p in pieces), start=0)
    assert isinstance(added, rl_fn.Ratio)
    assert float(added.denominator) == float(whole.denominator)
    np.testing.assert_allclose(added.value(), whole.value(), rtol=1e-5, atol=1e-6)
    shares = [
        AGGREGATE(*p, mode, max_completion_length=max_completion_length, denominator=whole.denominator) for p in pieces
    ]
    np.testing.assert_allclose(sum(map(float, shares)), whole.value(), rtol=1e-5, atol=1e-6)


def test_ratio_adds_only_ratios():
    one = rl_fn.Ratio(jnp.float32(1.0), jnp.float32(2.0))
    with pytest.raises(TypeError):
        one + 1


def test_effective_sample_size_survives_huge_weights():
    weights, mask = jnp.array([1e30, 1e30, 1e-30]), jnp.ones(3, bool)
    np.testing.assert_allclose(rl_fn.effective_sample_size(weights, mask), 2.0, rtol=1e-6)


@given(seed=SEEDS)
def test_reinforce_with_any_constant_baseline_is_unbiased(seed):
    """Σ_a π(a) A ∇log π(a) does not change when a constant is added to A."""
    d = Draw(seed)
    logits, rewards = jnp.asarray(d.normal(5)), jnp.asarray(d.normal(5))
    p = jax.nn.softmax(logits)

    def expected_gradient(advantages):
        return jax.grad(lambda z: jnp.sum(p * rl_fn.reinforce(jax.nn.log_softmax(z), advantages)))(logits)

    np.testing.assert_allclose(expected_gradient(rewards), expected_gradient(rewards + 3.0), atol=3e-6)
