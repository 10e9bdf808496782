"""The group filter keeps what carries a gradient; the overlong penalty at its knots."""

import jax.numpy as jnp
import numpy as np
import pytest

import rl_fn
from tests.rl_fn.registry import Draw


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("wrong", "right"), [(0.0, 1.0), (-1.0, 1.0), (-7.0, -2.0), (3.0, 50.0)])
def test_kept_are_exactly_the_groups_with_an_advantage(seed, wrong, right):
    """Whatever the rewards stand for: DAPO's are −1 and 1."""
    d = Draw(seed)
    rewards = np.where(d.integers(2, 12, 3) == 1, np.float32(right), np.float32(wrong))
    valid = d.rng.random((12, 3)) < 0.8
    kept = np.asarray(rl_fn.group_filter(rewards, valid))
    informative = np.asarray(rl_fn.grpo_advantages(rewards, valid)).any(axis=-1, keepdims=True)
    np.testing.assert_array_equal(kept, informative & valid)
    assert kept.any() and not kept.all()


def test_bounds_are_on_the_mean_and_exclusive():
    rewards = np.float32([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]])
    assert np.asarray(rl_fn.group_filter(rewards, low=0.25, high=0.75))[:, 0].tolist() == [False, True, False]
    assert np.asarray(rl_fn.group_filter(rewards, low=0.2, high=0.75))[:, 0].tolist() == [True, True, False]


def test_equal_rewards_between_the_bounds_are_dropped():
    assert not np.asarray(rl_fn.group_filter(np.full((1, 4), 0.3, np.float32))).any()


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (20481, -1.0)]
)
def test_the_penalty_at_its_knots(length, penalty):
    """L = 20480 and b = 4096 as in the paper."""
    got = rl_fn.overlong_penalty(jnp.array([length]), max_length=20480, buffer=4096)
    assert got.tolist() == [penalty]


def test_the_penalty_without_a_buffer_is_a_step():
    got = rl_fn.overlong_penalty(jnp.array([0, 100, 101]), max_length=100, buffer=0)
    assert got.tolist() == [0.0, 0.0, -1.0]


def test_bad_arguments():
    with pytest.raises(ValueError, match="low < high"):
        rl_fn.group_filter(jnp.ones((2, 2)), low=1.0, high=1.0)
    for buffer in (-1, 101):
        with pytest.raises(ValueError, match="buffer"):
            rl_fn.overlong_penalty(jnp.array([1]), max_length=100, buffer=buffer)
