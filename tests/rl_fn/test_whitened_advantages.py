"""What advantages over the batch promise: REINFORCE++, its group baseline, GDPO."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rl_fn
from tests.rl_fn.laws import close, quick_jit
from tests.rl_fn.registry import Draw

PP = quick_jit(rl_fn.reinforce_pp_advantages, static_argnames=("gamma", "eps"))
BASELINE = quick_jit(rl_fn.reinforce_pp_baseline_advantages, static_argnames="eps")
GDPO = quick_jit(rl_fn.gdpo_advantages, static_argnames="eps")
SEEDS = pytest.mark.parametrize("seed", range(5))


def _sixty_fourths(d: Draw, *shape: int) -> np.ndarray:
    """Rewards that stay exact in float32 after + 10⁴, so that only the function's own rounding is seen."""
    return d.integers(65, *shape).astype(np.float32) / 64


@SEEDS
def test_reinforce_pp_has_mean_0_and_variance_1(seed):
    d = Draw(seed)
    rewards, mask = d.normal(6, 7), d.mask(6, 7)
    tokens = np.asarray(PP(rewards, mask, gamma=0.9))[mask]
    np.testing.assert_allclose([tokens.mean(), tokens.std(ddof=1)], [0.0, 1.0], atol=1e-5)


@SEEDS
def test_reinforce_pp_ignores_an_offset_and_a_scale_of_the_outcome(seed):
    d = Draw(seed)
    lengths = d.integers(8, 6, 1, low=1)
    mask, last = np.arange(7) < lengths, np.arange(7) == lengths - 1
    outcome = _sixty_fourths(d, 6, 1)
    plain = PP(last * outcome, mask, eps=0.0)
    close([PP(last * (outcome + np.float32(1e4)), mask, eps=0.0)], [plain], atol=2e-5)
    close([PP(last * (outcome * np.float32(1e-3)), mask, eps=0.0)], [plain], atol=2e-5)


@SEEDS
def test_the_baseline_takes_each_groups_offset_off(seed):
    d = Draw(seed)
    rewards, mask, offsets = _sixty_fourths(d, 3, 4), d.mask(3, 4, 7), np.float32([[1e4], [-3.0], [0.5]])
    close([BASELINE(rewards + offsets, mask, eps=0.0)], [BASELINE(rewards, mask, eps=0.0)], atol=2e-5)


def test_an_invalid_completion_is_in_no_mean():
    d = Draw(0)
    rewards, mask = d.normal(2, 4), np.ones((2, 4, 3), bool)
    mask[:, 3] = False
    valid = mask.any(axis=-1)

    def weighted(r):
        advantages = rl_fn.reinforce_pp_baseline_advantages(r, mask, valid)
        return jnp.sum(jnp.cos(jnp.arange(24.0).reshape(2, 4, 3)) * advantages)

    junk = rewards.copy()
    junk[:, 3] = np.nan, np.inf
    close([BASELINE(junk, mask, valid)[:, :3]], [BASELINE(rewards[:, :3], mask[:, :3])])
    slope = np.asarray(quick_jit(jax.grad(weighted))(junk))
    assert np.isfinite(slope).all() and not slope[:, 3].any() and slope[:, :3].all()


def test_the_baseline_divides_by_the_batchs_spread_not_the_groups():
    mask = np.ones((2, 2, 1), bool)
    wide, narrow = np.asarray(BASELINE(np.float32([[1.0, 0.0], [0.1, 0.0]]), mask))[:, 0, 0]
    np.testing.assert_allclose(wide / narrow, 10.0, rtol=1e-5)


@SEEDS
def test_gdpo_of_one_reward_is_whitened_grpo(seed):
    d = Draw(seed)
    rewards, valid = d.normal(3, 4), d.mask(3, 4)
    expected = rl_fn.whiten(rl_fn.grpo_advantages(rewards, valid), valid, eps=1e-6)
    close([GDPO(rewards[:, None], None, valid)], [expected])
    # Another reward with weight 0 is no reward at all.
    both = np.stack([rewards, d.normal(3, 4)], axis=1)
    close([GDPO(both, np.float32([1.0, 0.0]), valid)], [expected])


@SEEDS
def test_gdpo_ignores_each_rewards_offset_and_scale(seed):
    d = Draw(seed)
    rewards = _sixty_fourths(d, 3, 2, 8)
    plain = GDPO(rewards, eps=0.0)
    close([GDPO(rewards + np.float32([[1e4], [-7.0]])[None], eps=0.0)], [plain], atol=3e-5)
    close([GDPO(rewards * np.float32([[1e-3], [64.0]])[None], eps=0.0)], [plain], atol=3e-5)


def test_gdpo_tells_apart_what_grpo_of_the_sum_does_not():
    """Right but long, wrong but brief: equal sums, and one of the two is rarer in the group."""
    right, brief = np.float32([1, 0, 0, 0]), np.float32([0, 1, 1, 0])
    summed = np.asarray(rl_fn.grpo_advantages(right + brief))
    decoupled = np.asarray(GDPO(np.stack([right, brief])))
    assert summed[0] == summed[1] and decoupled[0] > decoupled[1] + 0.1


def test_gdpo_does_not_see_invalid_answers():
    d = Draw(1)
    rewards, valid = d.normal(2, 2, 4), np.array([[True, True, True, False]] * 2)
    junk = rewards.copy()
    junk[:, 0, 3], junk[:, 1, 3] = np.nan, np.inf
    close([GDPO(junk, None, valid)[:, :3]], [GDPO(rewards[:, :, :3])])
    weights = jnp.arange(8.0).reshape(2, 4)
    slope = np.asarray(quick_jit(jax.grad(lambda r: jnp.sum(weights * rl_fn.gdpo_advantages(r, None, valid))))(junk))
    assert np.isfinite(slope).all() and not slope[:, :, 3].any() and slope[:, :, :3].any()


@pytest.mark.parametrize("reward", [0.1, 1e4 + 0.3])
def test_equal_rewards_have_no_advantage(reward):
    rewards, mask = np.full((3, 4), reward, np.float32), np.ones((3, 4, 2), bool)
    assert not np.asarray(BASELINE(rewards, mask)).any()
    assert not np.asarray(GDPO(np.stack([rewards, 2 * rewards], axis=1))).any()
    assert not np.asarray(PP(rewards, mask[..., 0], gamma=0.0)).any()


def test_bad_arguments():
    ones = jnp.ones((2, 2))
    for wrong in (
        functools.partial(rl_fn.reinforce_pp_advantages, ones, ones > 0, gamma=1.5),
        functools.partial(rl_fn.reinforce_pp_advantages, ones, ones > 0, eps=-1.0),
        functools.partial(rl_fn.reinforce_pp_baseline_advantages, ones[0], ones > 0, eps=-1.0),
        functools.partial(rl_fn.gdpo_advantages, ones, eps=-1.0),
    ):
        with pytest.raises(ValueError, match=r"gamma|eps"):
            wrong()
