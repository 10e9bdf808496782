"""Joined groups keep what is known of each part: the seed, the weights that drew it, and how it was scored."""

from dataclasses import replace

import pytest

import rl_fn
from rl_bridge import AdamW, Groups, Policy, Rollout, SamplingParams
from rl_bridge.algorithms.policy_setup import ScalarOptions

OBJECTIVE = rl_fn.recipes.grpo().replace(kl=None)
PROMPTS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]
SAMPLING = SamplingParams(n=2, max_new_tokens=3, seed=1)


def reward(completion, row):
    return completion.count("1") - len(completion)


def other_reward(completion, row):
    return completion.count("2")


@pytest.fixture
def rollout(model):
    with Rollout(model) as rollout:
        yield rollout


@pytest.fixture
def policy(model):
    with Policy(model, OBJECTIVE, AdamW(1e-3)) as policy:
        yield policy


def drawn(rollout, seed, **options):
    return rollout.generate(PROMPTS[:2], replace(SAMPLING, seed=seed)).score(reward, **options)


def update(policy, *parts):
    return policy.update(Groups.joined(parts).batch().with_advantages(OBJECTIVE))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_no_part_has_the_seed_of_an_earlier_step(place, policy, rollout):
    """Wherever the part with the seed stands, in the earlier step and in this one."""
    for earlier in range(3):
        policy.sync_weights(rollout)
        first = 10 * earlier + 100 * place
        update(policy, *(drawn(rollout, first + part) for part in range(3)))
        policy.sync_weights(rollout)
        parts = [drawn(rollout, first + 5 + part) for part in range(2)]
        parts.insert(place, drawn(rollout, first + earlier))
        with pytest.raises(ValueError, match=f"an earlier step were drawn by the seed {first + earlier}, too"):
            update(policy, *parts)


@pytest.mark.parametrize("place", [0, 1])
def test_every_part_is_of_the_policy_s_own_weights(place, model, policy, rollout):
    """Of a policy in lockstep, whose versions are the same, and of the policy's own older weights."""
    with Policy(model, OBJECTIVE, AdamW(1e-1)) as other, Rollout(model) as rollout_of_other:
        for number, (one, its_rollout) in enumerate([(policy, rollout), (other, rollout_of_other)]):
            one.sync_weights(its_rollout)
            update(one, drawn(its_rollout, number))
            one.sync_weights(its_rollout)
        parts = [drawn(rollout, 3), drawn(rollout_of_other, 4)]
        with pytest.raises(ValueError, match="drawn by the weights of another policy"):
            update(policy, *parts[:: 1 if place else -1])
    older = drawn(rollout, 5)
    update(policy, drawn(rollout, 6))
    policy.sync_weights(rollout)
    newer = drawn(rollout, 7)
    parts = [older, newer][:: 1 if place else -1]
    with pytest.raises(ValueError, match="by weights of version 1, when the policy had version 2:"):
        update(policy, *parts)
    # A part of which nothing is left decides nothing.
    of_older = slice(0, 2) if place else slice(2, 4)
    assert set(Groups.joined(parts).draw_of[of_older]) == set(older.draw_of)
    left = [2, 3] if place else [0, 1]
    for groups in (Groups.joined([older.select([]), newer]), Groups.joined(parts).select(left)):
        batch = groups.batch().with_advantages(OBJECTIVE)
        assert [one for one, _ in groups.draws] == [*{*newer.draw_of}]
        policy._require_own_draw(batch.groups, stale=False)


def test_parts_of_parts_are_parts(policy, rollout):
    """A completion counts once, and a seed draws once, however deep the part lies."""
    policy.sync_weights(rollout)
    one, two, three = (drawn(rollout, seed) for seed in range(1, 4))
    whole = Groups.joined([one, two])
    assert len(Groups.joined([whole, three]).rewards) == 6
    assert len(Groups.joined([whole.select([0, 1]), two.select([1])]).rewards) == 3
    with pytest.raises(ValueError, match="2 completions stand in two of the joined groups"):
        Groups.joined([whole, two.select([1])])
    with pytest.raises(ValueError, match="2 of the joined groups have the seed 2"):
        Groups.joined([whole, three, drawn(rollout, 2)])


def test_greedy_parts_have_one_seed_and_are_told_apart(rollout):
    greedy = SamplingParams(n=2, max_new_tokens=3, temperature=0.0)
    one, two = (rollout.generate(PROMPTS[:2], greedy).score(reward) for _ in range(2))
    whole = Groups.joined([one, two])
    assert len(Groups.joined([whole.select([0, 1]), two.select([0])]).rewards) == 3
    with pytest.raises(ValueError, match="2 completions stand in two of the joined groups"):
        Groups.joined([whole.select([0, 2]), two.select([0])])


def test_parts_are_scored_alike(rollout):
    """With the same weights of several rewards, and all with a greedy baseline or none."""
    several = [reward, other_reward]
    parts = [
        rollout.generate(PROMPTS[:2], replace(SAMPLING, seed=seed)).score(several, weights=weights)
        for seed, weights in enumerate([(1.0, 0.0), (0.0, 1.0), (1.0, 0.0)])
    ]
    assert len(Groups.joined(parts[::2]).rewards) == 4
    with pytest.raises(
        ValueError, match=r"scored alike, got \{'weights': \(1.0, 0.0\)\} and \{'weights': \(0.0, 1.0\)\}"
    ):
        Groups.joined(parts)
    # The same sum in other words: weights of the rewards or of the scalar, and None where no reward returned it.
    alike = {
        "scalar": {"scalar": ScalarOptions(weights=(1.0, 0.0))},
        "none": {"weights": (1.0, 0.0), "none": "leave-out"},
    }
    for number, options in enumerate(alike.values(), 3):
        part = rollout.generate(PROMPTS[:2], replace(SAMPLING, seed=number)).score(several, **options)
        assert len(Groups.joined([parts[0], part]).rewards) == 4
    greedy = rollout.generate(PROMPTS[:2], SamplingParams(max_new_tokens=3, temperature=0.0))
    based = [drawn(rollout, seed, greedy=greedy) for seed in (11, 12)]
    baseline = Groups.joined(based).scored.greedy_rewards
    assert baseline is not None and baseline.shape == (4,)
    for parts in ([based[0], drawn(rollout, 13)], [drawn(rollout, 13), based[0]]):
        with pytest.raises(ValueError, match=r"1 of the 2 joined groups have no greedy rewards.*rollout\.generate"):
            Groups.joined(parts)
