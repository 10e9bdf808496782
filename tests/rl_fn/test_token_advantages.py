"""The optimal token baseline is optimal, and GiGPO's limits are the group's advantages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rl_fn
from tests.rl_fn.laws import close, quick_jit
from tests.rl_fn.registry import Draw

OTB = quick_jit(rl_fn.optimal_token_baseline_advantages)
GIGPO = quick_jit(rl_fn.step_group_advantages, static_argnames=("gamma", "weight", "scale", "eps"))
SEEDS = pytest.mark.parametrize("seed", range(5))


@SEEDS
def test_no_other_baseline_has_less_variance(seed):
    """One token from a policy whose probabilities are eighths: a group of 8 answers enumerates it exactly."""
    d = Draw(seed)
    times, rewards = np.array([1, 1, 2, 4]), d.normal(4)
    p = times / 8
    # Gradients of log π in the logits, one row a token.
    scores = np.eye(4) - p
    tokens = np.repeat(np.arange(4), times)
    squares, mask = np.full((8, 1), np.sum(p**2), np.float32), np.ones((8, 1), bool)
    logprobs = np.log(p)[tokens, None].astype(np.float32)
    advantages = np.asarray(OTB(rewards[tokens, None], logprobs, squares, mask))[:, 0]
    baseline = rewards[tokens] - advantages
    np.testing.assert_allclose(baseline, baseline[0], atol=1e-5)

    def noise(b):
        estimates = (rewards - b)[:, None] * scores
        return np.sum(p[:, None] * (estimates - p @ estimates) ** 2)

    candidates = [rewards @ p, rewards.mean(), 0.0, *(baseline[0] + np.array([-0.3, -0.01, 0.01, 0.3]))]
    assert all(noise(baseline[0]) < noise(b) for b in candidates)
    np.testing.assert_allclose(noise(baseline[0] + 1e-3), noise(baseline[0] - 1e-3), rtol=1e-5)


def _sequences(d: Draw):
    logprobs = d.logprobs(2, 4, 6)
    squares = np.exp(2 * logprobs)
    return logprobs, squares + d.uniform(0.0, 1.0, 2, 4, 6) * (1 - squares), d.mask(2, 4, 6)


@SEEDS
def test_weighted_by_energy_the_advantages_sum_to_nothing(seed):
    d = Draw(seed)
    logprobs, squares, mask = _sequences(d)
    advantages = np.asarray(OTB(d.normal(2, 4, 6), logprobs, squares, mask))
    weights = np.cumsum(np.where(mask, 1 - 2 * np.exp(logprobs) + squares, 0.0), axis=-1)
    np.testing.assert_allclose(np.sum(weights * advantages, axis=-2), 0.0, atol=2e-5)


def test_equal_energies_give_the_plain_mean():
    mask = np.ones((4, 3), bool)
    rewards = np.zeros((4, 3), np.float32)
    rewards[:, -1] = 1, 0, 0, 1
    alike = np.full((4, 3), -0.5, np.float32)
    got = OTB(rewards, alike, np.full((4, 3), 0.6, np.float32), mask)
    np.testing.assert_allclose(got, np.repeat([[0.5], [-0.5], [-0.5], [0.5]], 3, axis=1), atol=1e-6)


def test_the_last_answer_left_has_no_baseline_and_teaches_nothing():
    mask = np.array([[True, True, True], [True, False, False]])
    d = Draw(3)
    got = np.asarray(OTB(d.normal(2, 3), d.logprobs(2, 3), np.ones((2, 3), np.float32), mask))
    assert got[:, 0].all() and not got[:, 1:].any()


def test_certain_tokens_have_no_advantage():
    """π = 1 everywhere: no gradient to weight, all energies 0."""
    ones = np.ones((2, 2), np.float32)
    assert not np.asarray(OTB(np.float32([[0, 1], [0, 0]]), 0 * ones, ones, ones > 0)).any()


def test_no_gradient_flows_into_the_weights():
    d = Draw(2)
    logprobs, squares, mask = _sequences(d)
    rewards, weights = d.normal(2, 4, 6), d.normal(2, 4, 6)

    def total(r, x, s):
        return jnp.sum(weights * rl_fn.optimal_token_baseline_advantages(r, x, s, mask))

    slopes = quick_jit(jax.grad(total, argnums=(0, 1, 2)))(rewards, logprobs, squares)
    assert np.asarray(slopes[0]).any() and not np.asarray(slopes[1]).any() and not np.asarray(slopes[2]).any()


@SEEDS
def test_an_offset_of_all_returns_costs_no_precision(seed):
    d = Draw(seed)
    logprobs, squares, _ = _sequences(d)
    mask = np.ones((2, 4, 6), bool)
    rewards = np.zeros((2, 4, 6), np.float32)
    rewards[..., -1] = d.integers(65, 2, 4) / 64
    shifted = rewards.copy()
    shifted[..., -1] += 1e4
    close([OTB(shifted, logprobs, squares, mask)], [OTB(rewards, logprobs, squares, mask)], atol=1e-5)


def _episodes(seed):
    d = Draw(seed)
    return d.normal(2, 4, 5), d.integers(3, 2, 4, 5), d.mask(2, 4, 5)


@SEEDS
@pytest.mark.parametrize("scale", ["group", "none"])
def test_gigpo_with_weight_0_is_the_groups_advantage(seed, scale):
    rewards, states, mask = _episodes(seed)
    totals = np.sum(rewards, axis=-1, where=mask)
    group = np.asarray(rl_fn.grpo_advantages(totals, mask.any(-1), scale=scale))
    expected = np.where(mask, group[..., None], 0.0)
    close([GIGPO(rewards, states, mask, weight=0.0, scale=scale)], [expected], atol=1e-5)
    # Nor does the step add anything where no state is met twice.
    apart = np.arange(40, dtype=np.int32).reshape(2, 4, 5)
    close([GIGPO(rewards, apart, mask, weight=3.0, scale=scale)], [expected], atol=1e-5)


@SEEDS
def test_one_step_from_one_state_counts_the_group_twice(seed):
    rewards = Draw(seed).normal(3, 4)
    once = np.zeros((3, 4, 1), np.int32)
    got = GIGPO(rewards[..., None], once, once == 0, weight=0.5)
    close([got[..., 0]], [1.5 * np.asarray(rl_fn.grpo_advantages(rewards))])


@SEEDS
def test_names_of_states_and_padding_do_not_matter(seed):
    rewards, states, mask = _episodes(seed)
    plain = GIGPO(rewards, states, mask)
    close([GIGPO(rewards, 100 - 7 * states, mask)], [plain])

    def pad(x, fill):
        return np.pad(x, [(0, 0), (0, 1), (0, 2)], constant_values=fill)

    padded = np.asarray(GIGPO(pad(rewards, np.nan), pad(states, 1), pad(mask, False)))
    close([padded[:, :4, :5]], [plain], atol=1e-5)
    assert not padded[:, 4:].any() and not padded[:, :, 5:].any()


def test_a_better_step_from_the_same_state_is_told_apart():
    """Two episodes with equal totals: the group's advantage is 0, the steps' is not."""
    rewards, states = np.float32([[1, 0], [0, 1]]), np.int32([[5, 6], [6, 5]])
    got = GIGPO(rewards, states, np.ones((2, 2), bool), gamma=0.5, scale="none")
    # From state 5 both go on to get 1; from state 6 the second episode gets 0.5, the first nothing.
    np.testing.assert_allclose(got, [[0.0, -0.25], [0.25, 0.0]])


def test_bad_arguments():
    ones = jnp.ones((2, 2))
    ids, mask = ones.astype(int), ones > 0
    with pytest.raises(ValueError, match="scale"):
        rl_fn.step_group_advantages(ones, ids, mask, scale="batch")
    with pytest.raises(ValueError, match="eps"):
        rl_fn.step_group_advantages(ones, ids, mask, eps=-1.0)
    with pytest.raises(ValueError, match="gamma"):
        rl_fn.step_group_advantages(ones, ids, mask, gamma=2.0)
    with pytest.raises(ValueError, match="gamma"):
        rl_fn.optimal_token_baseline_advantages(ones, -ones, ones, mask, gamma=-0.1)
