"""The advantages of the dialects in float64 NumPy: order of baseline, clip, KL and whitening, and groups of one."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from rl_fn.objectives.batch import Rollouts
from rl_fn.objectives.dialects.dialect_advantages import (
    BiasedGAE,
    NeMoRLAdvantage,
    OpenRLHFAdvantage,
    TunixGroup,
    VerlAdvantage,
    bounds,
    normalise,
    on_every_token,
    on_last_token,
)
from tests.oracle.lookup import ORACLE

RNG = np.random.default_rng(3)
MASK = RNG.uniform(size=(3, 4, 6)) < 0.7
MASK[..., 5], MASK[1, 2], MASK[0, 0] = False, False, [True, True, False, True, False, False]
# Zeros among them, for gpg; the largest of a group is neither its first nor its last.
R = RNG.integers(-2, 3, (3, 4)) + RNG.integers(0, 2, (3, 4)) * 0.5
R[:, 1], R[:, 2] = (3.0, 2.5, 3.5), 0.0
COST = np.where(MASK, RNG.normal(size=MASK.shape) * 0.1, 0.0)
NOTHING = np.zeros(MASK.shape)
EVERYWHERE = np.ones(MASK.shape, bool)


def run(piece: Any, rewards: Any = R, mask: Any = MASK, cost: Any = COST):
    penalties = None if cost is None else jnp.asarray(cost, jnp.float32)
    read = Rollouts(jnp.asarray(rewards, jnp.float32), jnp.asarray(mask), penalties=penalties)
    return np.asarray(piece(read).advantages)


def close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)


def spread(per_answer, mask=MASK):
    return np.where(mask, np.asarray(per_answer)[..., None], 0.0)


def last(per_answer, mask=MASK):
    out = np.zeros(mask.shape)
    for place in np.ndindex(mask.shape[:-1]):
        if mask[place].any():
            out[(*place, np.flatnonzero(mask[place])[-1])] = per_answer[place]
    return out


def population(x, mask=MASK):
    return np.where(mask, (x - x[mask].mean()) / np.sqrt(max(x[mask].var(), 1e-8)), 0.0)


def test_on_the_last_token_and_on_all():
    mask = jnp.asarray(MASK)
    np.testing.assert_array_equal(on_last_token(jnp.asarray(R, jnp.float32), mask), last(R))
    np.testing.assert_array_equal(on_every_token(jnp.asarray(R, jnp.float32), mask), spread(R))


def test_normalised_by_the_population():
    x = RNG.normal(size=MASK.shape)
    arrays = jnp.asarray(x, jnp.float32), jnp.asarray(MASK)
    close(normalise(*arrays), population(x))
    close(normalise(*arrays, divide_by_std=False), np.where(MASK, x - x[MASK].mean(), 0.0))
    # The variance counts as 1e-8 at least.
    small = jnp.array([1e-5, -1e-5])
    np.testing.assert_allclose(normalise(small, small < 9), [0.1, -0.1], rtol=1e-5)


def per_answer(name, scale, r, lengths):
    if name == "gpg":
        return ORACLE["gpg_advantages"](r, alpha="none") * r.size / max(np.count_nonzero(r), 1)
    if name == "grpo_passk":
        top = np.sort(r)[:, ::-1]
        gap = (top[:, 0] - top[:, 1]) / (r.std(1, ddof=1) + 1e-6 if scale else 1.0)
        return np.where(r == top[:, :1], gap[:, None], 0.0)
    if name.startswith("rloo"):
        return ORACLE["rloo_advantages"](r)
    if name == "opo":
        return ORACLE["opo_advantages"](r, lengths)
    return ORACLE["grpo_advantages"](r, scale="group" if scale else "none", eps=1e-6)


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("name", ["grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg"])
def test_verl_takes_the_penalty_off_the_reward(name, scale):
    r = R - COST.sum(-1)
    close(run(VerlAdvantage(name, scale)), spread(per_answer(name, scale, r, MASK.sum(-1))))
    close(run(VerlAdvantage(name, scale), cost=NOTHING), spread(per_answer(name, scale, R, MASK.sum(-1))))


@pytest.mark.parametrize("scale", [True, False])
def test_verl_reinforce_plus_plus(scale):
    returns = ORACLE["discounted_returns"](last(R) - COST, MASK, gamma=0.8)
    close(run(VerlAdvantage("reinforce_plus_plus", scale, 0.8)), ORACLE["whiten"](returns, MASK))
    returns = ORACLE["discounted_returns"](last(R) - COST, MASK)
    close(run(VerlAdvantage("reinforce_plus_plus", scale)), ORACLE["whiten"](returns, MASK))
    r = R - COST.sum(-1)
    centred = spread(r - r.mean(1, keepdims=True))
    close(run(VerlAdvantage("reinforce_plus_plus_baseline", scale)), ORACLE["whiten"](centred, MASK))


def test_verl_with_one_answer():
    one = np.random.default_rng(0).normal(size=(64, 1)).astype(np.float32)
    mask, cost = np.ones((64, 1, 1), bool), np.zeros((64, 1, 1))

    def of(name, scale=True):
        return run(VerlAdvantage(name, scale), one, mask, cost)[..., 0]

    divided = one / (np.float32(1.0) + np.float32(1e-6))
    for name in ("grpo", "grpo_vectorized"):
        np.testing.assert_array_equal(of(name), divided)
        np.testing.assert_array_equal(of(name, False), one)
    assert not np.array_equal(divided, one)
    for name in ("rloo", "opo", "gpg"):
        np.testing.assert_array_equal(of(name), one)
    assert not of("rloo_vectorized").any()
    with pytest.raises(ValueError, match="groups of at least 2"):
        of("grpo_passk")


def test_verl_best_only_in_small():
    """A group of two has a best and a second; rewards ±1e-4 have the standard deviation √2·1e-4."""
    mask, cost = np.ones((1, 2, 1), bool), np.zeros((1, 2, 1))
    got = run(VerlAdvantage("grpo_passk"), np.array([[1e-4, -1e-4]]), mask, cost)[0, :, 0]
    np.testing.assert_allclose(got, [2e-4 / (np.sqrt(2.0) * 1e-4 + 1e-6), 0.0], rtol=1e-5)
    # Groups of three in batches of one and two.
    stack = np.array([[[1.0, 4.0, 2.0], [7.0, 2.0, 6.0]]])
    arrays = stack, np.ones((1, 2, 3, 1), bool), np.zeros((1, 2, 3, 1))
    gaps = np.array([[[0.0, 2.0, 0.0], [1.0, 0.0, 0.0]]])
    np.testing.assert_array_equal(run(VerlAdvantage("grpo_passk", False), *arrays)[..., 0], gaps)
    scaled = gaps / (stack.std(-1, ddof=1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(run(VerlAdvantage("grpo_passk"), *arrays)[..., 0], scaled, rtol=1e-5)


def test_gpg_with_one_reward_that_is_not_zero():
    rewards = np.array([[2.0, 0.0], [0.0, 0.0]])
    got = run(VerlAdvantage("gpg"), rewards, np.ones((2, 2, 1), bool), np.zeros((2, 2, 1)))
    np.testing.assert_array_equal(got[..., 0], [[4.0, -4.0], [0.0, 0.0]])


@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize(
    "name", ["reinforce", "flash_reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo"]
)
def test_openrlhf_clips_before_the_penalty(name, divide):
    baseline = {
        "reinforce": R,
        "flash_reinforce": R - R.mean(),
        "rloo": ORACLE["rloo_advantages"](R),
        "group_norm": ORACLE["grpo_advantages"](R, eps=1e-9),
    }.get(name, R - R.mean(1, keepdims=True))
    token = last(np.clip(baseline, -1.0, 1.2)) - COST
    assert ((baseline > 1.2) & MASK.any(-1)).any() and ((baseline < -1.0) & MASK.any(-1)).any()
    returns = ORACLE["discounted_returns"](token, EVERYWHERE, gamma=0.8 if name == "reinforce" else 1.0)
    expected = np.where(MASK, returns, 0.0)
    if name in ("reinforce", "reinforce_baseline"):
        expected = population(returns) if divide else np.where(MASK, returns - returns[MASK].mean(), 0.0)
    close(run(OpenRLHFAdvantage(name, 0.8, divide, (-1.0, 1.2))), expected)


def test_openrlhf_defaults_and_a_group_of_one():
    far = np.array([[20.0, -20.0, 0.0, 0.0]])
    got = run(OpenRLHFAdvantage("dr_grpo"), far, np.ones((1, 4, 1), bool), np.zeros((1, 4, 1)))
    np.testing.assert_array_equal(got[..., 0], [[10.0, -10.0, 0.0, 0.0]])
    returns = ORACLE["discounted_returns"](last(R) - COST, EVERYWHERE)
    close(run(OpenRLHFAdvantage("reinforce")), population(returns))
    for name in ("rloo", "reinforce_baseline", "group_norm", "dr_grpo"):
        with pytest.raises(ValueError, match="n_samples_per_prompt > 1"):
            run(OpenRLHFAdvantage(name), R[:, :1], MASK[:, :1], COST[:, :1])
    for name in ("reinforce", "flash_reinforce"):
        assert run(OpenRLHFAdvantage(name), R[:, :1], MASK[:, :1], COST[:, :1]).any()
    assert run(OpenRLHFAdvantage("rloo"), R[:, :2], MASK[:, :2], COST[:, :2]).any()


@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("carry", [True, False])
def test_a_critic_normalised_by_the_population(carry, divide):
    rewards, values = RNG.normal(size=(2, *MASK.shape))
    through = MASK if carry else EVERYWHERE
    clean = [np.where(MASK, x, 0.0) for x in (rewards, values)]
    advantages, returns = ORACLE["gae"](*clean, through, gamma=0.9, lam=0.8)
    r, v = (jnp.asarray(np.where(MASK, x, np.nan), jnp.float32) for x in (rewards, values))
    out = BiasedGAE(0.9, 0.8, True, carry, divide).estimate(r, v, jnp.asarray(MASK), None)
    expected = population(advantages) if divide else np.where(MASK, advantages - advantages[MASK].mean(), 0.0)
    close(out.advantages, expected)
    close(out.returns, np.where(MASK, returns, 0.0))
    plain = BiasedGAE(0.9, 0.8, False, carry, divide).estimate(r, v, jnp.asarray(MASK), None)
    close(plain.advantages, np.where(MASK, advantages, 0.0))
    close(plain.returns, np.where(MASK, returns, 0.0))


def test_a_critic_by_default_carries_and_divides():
    rewards, values = (jnp.asarray(x, jnp.float32) for x in RNG.normal(size=(2, *MASK.shape)))
    default, explicit = (
        piece.estimate(rewards, values, jnp.asarray(MASK), None)
        for piece in (BiasedGAE(), BiasedGAE(1.0, 0.95, True, True, True))
    )
    np.testing.assert_array_equal(default.advantages, explicit.advantages)


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("leave_out", [True, False])
def test_nemo_rl_divides_by_the_spread_of_the_others(leave_out, scale):
    rewards = np.concatenate([R, [[0.5, 0.5, 0.5, 1.5]]])
    mask = np.ones((4, 4, 2), bool)
    expected = np.zeros(rewards.shape)
    for p, i in np.ndindex(rewards.shape):
        others = np.delete(rewards[p], i) if leave_out else rewards[p]
        std = others.std(ddof=1)
        expected[p, i] = (rewards[p, i] - others.mean()) / (std + 1e-6 if scale and std > 0 else 1.0)
    close(run(NeMoRLAdvantage("grpo", scale, leave_out), rewards, mask, np.zeros(mask.shape)), spread(expected, mask))
    one = run(NeMoRLAdvantage("grpo", scale, leave_out), rewards[:, :1], mask[:, :1], mask[:, :1] * 0.0)
    assert one.shape == (4, 1, 2) and not one.any()


def test_nemo_rl_adds_1e_6_to_the_spread():
    """Rewards ±1e-4 and 0: the spread of the others, √½·1e-4 for the ends and √2·1e-4 for the middle."""
    rewards = np.array([[1e-4, 0.0, -1e-4]])
    got = run(NeMoRLAdvantage(), rewards, np.ones((1, 3, 1), bool), np.zeros((1, 3, 1)))[0, :, 0]
    end = 1.5e-4 / (np.sqrt(0.5) * 1e-4 + 1e-6)
    np.testing.assert_allclose(got, [end, 0.0, -end], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("minus", [True, False])
def test_nemo_rl_reinforce_plus_plus(minus):
    r = R - R.mean(1, keepdims=True) if minus else R
    close(run(NeMoRLAdvantage("reinforce_plus_plus", minus_baseline=minus)), population(spread(r) - COST))
    default = run(NeMoRLAdvantage("reinforce_plus_plus"))
    close(default, population(spread(R - R.mean(1, keepdims=True)) - COST))


def test_tunix_groups():
    close(run(TunixGroup(), cost=None), spread(ORACLE["grpo_advantages"](R, eps=1e-6)))
    close(run(TunixGroup("rloo"), cost=None), spread(ORACLE["rloo_advantages"](R)))
    close(run(TunixGroup("drgrpo"), cost=None), spread(R - R.mean(1, keepdims=True)))
    small = run(TunixGroup(), np.array([[1e-4, -1e-4]]), np.ones((1, 2, 1), bool), None)
    np.testing.assert_allclose(small[0, 0, 0], 1e-4 / (np.sqrt(2.0) * 1e-4 + 1e-6), rtol=1e-4)
    assert run(TunixGroup(), R[:, :2], MASK[:, :2], None).shape == (3, 2, 6)
    with pytest.raises(ValueError, match="num_generations > 1"):
        run(TunixGroup(), R[:, :1], MASK[:, :1], None)


def test_a_threshold_is_an_upper_bound_or_two_bounds():
    assert bounds(3.0) == (0.0, 3.0) and bounds([0.3]) == (0.0, 0.3) and bounds((0.5, 2.0)) == (0.5, 2.0)
    bad: list[Any] = [[], [1.0, 2.0, 3.0], float("nan"), [0.5, float("nan")]]
    for threshold in bad:
        with pytest.raises(ValueError, match="need HIGH or LOW, HIGH"):
            bounds(threshold)
