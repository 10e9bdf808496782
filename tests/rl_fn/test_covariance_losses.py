"""Which tokens Clip-Cov, KL-Cov and the high-entropy mask choose, and what happens to the others."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rl_fn
from tests.rl_fn.laws import quick_jit
from tests.rl_fn.registry import Draw

CLIP_COV = quick_jit(rl_fn.clip_cov, static_argnames=("fraction", "cov_low", "cov_high"))
KL_COV = quick_jit(rl_fn.kl_cov, static_argnames=("fraction", "coef"))
PPO, CUT = quick_jit(rl_fn.ppo_clip), quick_jit(rl_fn.clipped_tokens)
SEEDS = pytest.mark.parametrize("seed", range(5))


def _batch(seed):
    """log π, π_old's close to it, advantages, mask, noise, and the covariances by their definition."""
    d = Draw(seed)
    logprobs, advantages, mask = d.logprobs(6, 20), d.normal(6, 20), d.mask(6, 20)
    old = np.minimum(logprobs + d.normal(6, 20, scale=0.2), 0.0)
    cov = (logprobs - logprobs[mask].mean()) * (advantages - advantages[mask].mean())
    return logprobs, old, advantages, mask, d.uniform(0.0, 1.0, 6, 20), cov


@SEEDS
def test_nothing_chosen_is_the_base_loss(seed):
    logprobs, old, advantages, mask, noise, _ = _batch(seed)
    ppo = PPO(logprobs, old, advantages, mask)
    np.testing.assert_array_equal(CLIP_COV(logprobs, old, advantages, mask, noise, fraction=0.0), ppo)
    # Above every covariance there is nothing to choose from either.
    np.testing.assert_array_equal(
        CLIP_COV(logprobs, old, advantages, mask, noise, cov_low=1e3, cov_high=1e4, fraction=1.0), ppo
    )
    unclipped = np.where(mask, -np.exp(logprobs - old) * advantages, 0.0)
    np.testing.assert_allclose(KL_COV(logprobs, old, advantages, mask, fraction=0.0), unclipped, rtol=1e-5)


@SEEDS
@pytest.mark.parametrize("fraction", [1e-4, 0.125, 1.0])
def test_clip_cov_drops_the_right_tokens_and_as_many_as_it_says(seed, fraction):
    logprobs, old, advantages, mask, noise, cov = _batch(seed)
    ppo = np.asarray(PPO(logprobs, old, advantages, mask))
    got = np.asarray(CLIP_COV(logprobs, old, advantages, mask, noise, fraction=fraction, cov_low=0.2, cov_high=2.0))
    dropped = (got == 0) & (ppo != 0)
    np.testing.assert_array_equal(got[~dropped], ppo[~dropped])
    eligible = mask & (cov > 0.2) & (cov < 2.0) & ~np.asarray(CUT(logprobs, old, advantages, mask))
    assert not (dropped & ~eligible).any()
    number = min(max(math.floor(fraction * mask.sum()), 1), eligible.sum())
    assert dropped.sum() == number
    assert number == 0 or noise[dropped].max() <= np.sort(noise[eligible])[number - 1]


def test_dropped_tokens_have_no_gradient():
    logprobs, old, advantages, mask, noise, _ = _batch(1)

    def total(x):
        return jnp.sum(rl_fn.clip_cov(x, old, advantages, mask, noise, fraction=0.5, cov_low=0.0))

    slope = np.asarray(quick_jit(jax.grad(total))(logprobs))
    loss = np.asarray(CLIP_COV(logprobs, old, advantages, mask, noise, fraction=0.5, cov_low=0.0))
    assert not slope[loss == 0].any() and slope[loss != 0].any()


def test_the_draw_is_uniform():
    """Each of the eligible tokens is dropped about equally often, over 2000 draws."""
    logprobs, old, advantages, mask, _, cov = _batch(2)
    ppo = np.asarray(PPO(logprobs, old, advantages, mask))
    draws = jax.random.uniform(jax.random.key(0), (2000, 6, 20))
    drop = quick_jit(
        jax.vmap(lambda noise: rl_fn.clip_cov(logprobs, old, advantages, mask, noise, cov_low=0.2, cov_high=2.0))
    )
    dropped = (np.asarray(drop(draws)) == 0) & (ppo != 0)
    eligible = mask & (cov > 0.2) & (cov < 2.0) & ~np.asarray(CUT(logprobs, old, advantages, mask))
    assert (dropped.sum(axis=(1, 2)) == 1).all()
    expected = 2000 / eligible.sum()
    assert eligible.sum() > 5
    assert (np.abs(dropped.sum(axis=0)[eligible] - expected) < 5 * math.sqrt(expected)).all()


@SEEDS
def test_without_noise_the_largest_covariances_are_dropped(seed):
    logprobs, old, advantages, mask, _, cov = _batch(seed)
    ppo = np.asarray(PPO(logprobs, old, advantages, mask))
    got = np.asarray(CLIP_COV(logprobs, old, advantages, mask, fraction=0.1, cov_low=0.0, cov_high=2.0))
    eligible = mask & (cov > 0.0) & (cov < 2.0) & ~np.asarray(CUT(logprobs, old, advantages, mask))
    number = max(math.floor(0.1 * mask.sum()), 1)
    cut = np.sort(cov[eligible])[-number:][0]
    np.testing.assert_array_equal((got == 0) & (ppo != 0), eligible & (cov >= cut - 1e-6))


@SEEDS
@pytest.mark.parametrize("fraction", [1e-4, 0.25, 1.0])
def test_kl_cov_penalises_the_largest_covariances(seed, fraction):
    logprobs, old, advantages, mask, _, cov = _batch(seed)
    base = np.asarray(KL_COV(logprobs, old, advantages, mask, fraction=0.0))
    penalty = np.asarray(KL_COV(logprobs, old, advantages, mask, fraction=fraction, coef=2.0)) - base
    number = max(math.floor(fraction * mask.sum()), 1)
    chosen = mask & (cov >= np.sort(cov[mask])[-number] - 1e-6)
    np.testing.assert_allclose(penalty, np.where(chosen, 2.0 * np.abs(logprobs - old), 0.0), atol=2e-5)


def test_kl_cov_pulls_the_chosen_token_back_to_the_old_policy():
    logprobs, old = np.float32([-1.0, -4.0]), np.float32([-1.5, -4.0])
    advantages, mask = np.float32([0.5, -0.5]), np.ones(2, bool)

    def slope(coef):
        return jax.grad(lambda x: jnp.sum(rl_fn.kl_cov(x, old, advantages, mask, fraction=0.5, coef=coef)))(logprobs)

    # Both have the same covariance here, and the second is at ratio 1, where |log ρ| has no slope.
    np.testing.assert_allclose(slope(3.0) - slope(0.0), [3.0, 0.0], atol=1e-5)


@pytest.mark.parametrize("quantile", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("tokens", [1, 2, 5, 6, 11, 64])
def test_an_interpolated_quantile_keeps_the_same_tokens(quantile, tokens):
    d = Draw(tokens)
    entropies, mask = d.positive(2, 64), np.zeros((2, 64), bool)
    mask.reshape(-1)[d.rng.choice(128, tokens, replace=False)] = True
    kept = np.asarray(rl_fn.high_entropy_mask(entropies, mask, quantile=quantile))
    # A shade below: interpolation itself rounds, also where the quantile is one of the entropies.
    threshold = np.quantile(entropies[mask].astype(np.float64), quantile) - 1e-6
    np.testing.assert_array_equal(kept, mask & (entropies >= threshold))
    assert kept.sum() == tokens - math.ceil(round(quantile * (tokens - 1), 9))


def test_equal_entropies_are_all_kept():
    mask = np.array([True, True, False, True])
    np.testing.assert_array_equal(rl_fn.high_entropy_mask(np.full(4, 0.7, np.float32), mask), mask)


def test_bad_arguments():
    x, mask = jnp.zeros(2), jnp.ones(2, bool)
    for fraction in (-0.1, 1.1):
        with pytest.raises(ValueError, match="fraction"):
            rl_fn.clip_cov(x, x, x, mask, fraction=fraction)
        with pytest.raises(ValueError, match="fraction"):
            rl_fn.kl_cov(x, x, x, mask, fraction=fraction)
        with pytest.raises(ValueError, match="quantile"):
            rl_fn.high_entropy_mask(x, mask, quantile=fraction)
    with pytest.raises(ValueError, match="cov_low < cov_high"):
        rl_fn.clip_cov(x, x, x, mask, cov_low=5.0)
    with pytest.raises(ValueError, match="clips"):
        rl_fn.clip_cov(x, x, x, mask, clip_low=-1.0)
    with pytest.raises(ValueError, match="coef"):
        rl_fn.kl_cov(x, x, x, mask, coef=-1.0)
