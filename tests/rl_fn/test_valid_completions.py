"""One rule for every function of a group: who counts in it, and that ragged groups are each group alone."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rl_fn
from tests.rl_fn.laws import close, quick_jit
from tests.rl_fn.registry import Draw

N, TOKENS = 8, 5
FUNCTIONS = {
    "grpo_advantages": {},
    "grpo_advantages[none]": {"scale": "none"},
    "rloo_advantages": {},
    "opo_advantages": {},
    "grpo_advantages[batch]": {"scale": "batch"},
    "gpg_advantages": {},
    "gpg_advantages[none]": {"alpha": "none"},
    "maxrl_advantages": {},
    "leave_one_out_std_advantages": {},
    "passk_advantages": {},
    "passk_analytic_advantages": {"k": 2},
    "remax_advantages": {},
    "optimal_token_baseline_advantages": {},
    "step_group_advantages": {},
    "group_filter": {},
    "gdpo_advantages": {},
    "reinforce_pp_baseline_advantages": {},
}
# Their last step is over the batch: a group alone is another batch.
OF_THE_BATCH = {
    "grpo_advantages[batch]",
    "gpg_advantages",
    "gdpo_advantages",
    "reinforce_pp_baseline_advantages",
}
# ReMax's baseline is no statistic of the group.
OF_A_GROUP = [key for key in FUNCTIONS if key not in OF_THE_BATCH and key != "remax_advantages"]


def name_of(key):
    return key.split("[")[0]


def arguments(name, seed):
    """Arrays of one batch of N completions, the completions' axis of each, and how many come before valid."""
    d = Draw(seed)
    match name:
        case "opo_advantages":
            arrays = [d.uniform(0.1, 1.0, N), d.integers(9, N, low=1)]
        case "remax_advantages":
            arrays = [d.normal(N), d.normal(N)]
        case "gdpo_advantages":
            arrays = [d.normal(2, N), np.float32([1.0, 0.5])]
        case "reinforce_pp_baseline_advantages":
            arrays = [d.normal(N), d.mask(N, TOKENS)]
        case "step_group_advantages":
            arrays = [d.normal(N, TOKENS), d.integers(2, N, TOKENS), d.mask(N, TOKENS)]
        case "optimal_token_baseline_advantages":
            logprobs = d.logprobs(N, TOKENS)
            arrays = [d.normal(N, TOKENS), logprobs, np.exp(logprobs), d.mask(N, TOKENS)]
        case _:
            arrays = [d.uniform(0.1, 1.0, N)]
    return arrays, d


def of_completions(x, where):
    """The completions' entries of an array; weights of rewards are no completion's."""
    axis = [i for i, size in enumerate(x.shape) if size == N]
    return np.compress(where, x, axis=axis[0]) if axis else x


@functools.cache
def compiled(key):
    return quick_jit(functools.partial(getattr(rl_fn, name_of(key)), **FUNCTIONS[key]))


def test_every_function_of_a_group_is_here():
    found = {
        name
        for name in rl_fn.__all__
        if inspect.isfunction(function := getattr(rl_fn, name))
        and {"valid", "group_ids"} & set(inspect.signature(function).parameters)
    }
    assert found == {name_of(key) for key in FUNCTIONS}
    in_groups = [name for name in rl_fn.__all__ if "group along" in (getattr(rl_fn, name).__doc__ or "")]
    assert set(in_groups) <= found
    without_ids = {n for n in found if "group_ids" not in inspect.signature(getattr(rl_fn, n)).parameters}
    assert without_ids == {"remax_advantages"}
    assert all("valid" in inspect.signature(getattr(rl_fn, name)).parameters for name in found)


@pytest.mark.parametrize("key", FUNCTIONS)
def test_an_invalid_completion_has_no_advantage_and_changes_nothing(key):
    for seed in range(6):
        arrays, d = arguments(name_of(key), seed)
        valid = np.arange(N) < N - 3
        valid = valid[d.rng.permutation(N)]
        found = np.asarray(compiled(key)(*arrays, valid))
        absent = [np.asarray(x) for x in (of_completions(x, valid) for x in arrays)]
        close([found[valid]], [compiled(key)(*absent, np.ones(N - 3, bool))], rtol=1e-4, atol=1e-5)
        assert not found[~valid].any()
        for junk in (np.nan, np.inf, 1e30):
            spoiled = [
                np.where(np.broadcast_to(_column(valid, x), x.shape), x, np.float32(junk))
                if x.dtype == np.float32 and N in x.shape
                else x
                for x in arrays
            ]
            np.testing.assert_array_equal(compiled(key)(*spoiled, valid), found)


def _column(valid, x):
    return valid[:, None] if x.shape == (N, TOKENS) else valid


@pytest.mark.parametrize("key", OF_A_GROUP)
def test_ragged_groups_are_each_group_alone(key):
    for seed in range(4):
        arrays, d = arguments(name_of(key), seed)
        ids, valid = d.integers(3, N), d.rng.random(N) < 0.8
        found = np.asarray(compiled(key)(*arrays, valid, group_ids=ids))
        for one in set(ids.tolist()):
            # The group's own arrays, filled up with completions that do not exist.
            members = np.argsort(ids != one, kind="stable")
            alone = [x[members] for x in arrays]
            expected = np.asarray(compiled(key)(*alone, (valid & (ids == one))[members]))
            size = int((ids == one).sum())
            close([found[members[:size]]], [expected[:size]], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("key", sorted(OF_THE_BATCH))
def test_ragged_groups_of_a_batch_are_its_rows(key):
    """Rows of equal size, flattened and shuffled, are the same groups of the same batch."""
    for seed in range(4):
        d = Draw(seed)
        order, ids = d.rng.permutation(12), np.repeat(np.arange(3, dtype=np.int32), 4)
        rewards, valid, tokens = d.uniform(0.1, 1.0, 3, 4), d.rng.random((3, 4)) < 0.8, d.mask(3, 4, TOKENS)
        mask = [tokens] if name_of(key) == "reinforce_pp_baseline_advantages" else []
        flat_mask = [x.reshape(12, TOKENS)[order] for x in mask]
        flat, flat_valid = rewards.reshape(-1)[order], valid.reshape(-1)[order]
        if name_of(key) == "gdpo_advantages":
            rewards, flat, mask = rewards[:, None], flat[None], [np.ones(1, np.float32)]
            flat_mask = mask
        rows = np.asarray(compiled(key)(rewards, *mask, valid))
        ragged = np.asarray(compiled(key)(flat, *flat_mask, flat_valid, group_ids=ids[order]))
        close([ragged], [rows.reshape(12, *ragged.shape[1:])[order]], rtol=1e-4, atol=1e-5)


def test_a_completion_without_tokens_counts_unless_it_is_not_valid():
    rewards, mask = np.float32([1.0, 0.0, 0.0]), np.array([[True], [True], [False]])
    centred = rl_fn.grpo_advantages(rewards, scale="none")
    np.testing.assert_allclose(centred, [2 / 3, -1 / 3, -1 / 3], rtol=1e-6)
    for valid, expected in ((None, centred[:2]), (mask[:, 0], jnp.array([0.5, -0.5]))):
        found = rl_fn.reinforce_pp_baseline_advantages(rewards, mask, valid, eps=0.0)[:2, 0]
        np.testing.assert_allclose(found, rl_fn.whiten(expected, jnp.ones(2, bool), eps=0.0), rtol=1e-5)


def test_an_episode_without_a_step_has_no_reward_unless_it_is_said_to_be_valid():
    rewards, states = np.float32([[2.0], [1.0], [9.0]]), np.zeros((3, 1), np.int32)
    taken = np.array([[True], [True], [False]])
    for valid, episode in ((None, [0.5, -0.5]), (np.ones(3, bool), [1.0, 0.0])):
        found = rl_fn.step_group_advantages(rewards, states, taken, valid, scale="none", weight=0.0)
        np.testing.assert_allclose(found[:2, 0], episode, rtol=1e-6)
        assert float(found[2, 0]) == 0.0


def test_remax_takes_a_greedy_reward_for_each_completion():
    rewards, greedy = jnp.array([1.0, 0.0, 3.0]), jnp.array([0.5, 0.5, 2.0])
    assert rl_fn.remax_advantages(rewards, greedy).tolist() == [0.5, -0.5, 1.0]
    slope = jax.grad(lambda r: jnp.sum(rl_fn.remax_advantages(r, greedy, jnp.array([True, False, True]))))
    assert slope(rewards).tolist() == [1.0, 0.0, 1.0]
