"""Every algorithm's advantages: an invalid completion changes nothing, and group_ids are the rows of a dense batch."""

import numpy as np
import pytest

import rl_fn
from tests.rl_fn.laws import close
from tests.rl_fn.recipe_batches import OBJECTIVES, advantages, rollouts, shape_of

PROMPTS, GROUP = 2, 5


def completions_axis(name, field):
    return 2 if field == "rewards" and shape_of(OBJECTIVES[name]) == "*batch R G" else 1


def mapped(name, read, change):
    """The rollouts with another array in every field that has one entry per completion, change(array, axis)."""
    fields = {field: x for field, x in read._asdict().items() if x is not None and field != "greedy_rewards"}
    return read._replace(**{field: change(x, completions_axis(name, field)) for field, x in fields.items()})


def one_invalid(seed):
    return np.arange(GROUP) != np.random.default_rng(seed).integers(GROUP, size=(PROMPTS, 1))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_invalid_completion_changes_nothing(name):
    objective = OBJECTIVES[name]
    for seed in range(3):
        read, valid = rollouts(objective, seed, group=GROUP), one_invalid(seed)

        def spoiled(x, axis, valid=valid):
            if x.dtype != np.float32:
                return x
            where = valid.reshape([PROMPTS, *[GROUP if i == axis else 1 for i in range(1, x.ndim)]])
            return np.where(where, x, np.float32(np.nan))

        def dropped(x, axis, valid=valid):
            return np.stack([np.compress(row, one, axis=axis - 1) for row, one in zip(valid, x, strict=True)])

        found = np.asarray(advantages(objective, read._replace(valid=valid)))
        junk = advantages(objective, mapped(name, read, spoiled)._replace(valid=valid))
        np.testing.assert_array_equal(found, junk)
        assert not found[~valid].any()
        without = advantages(objective, mapped(name, read, dropped))
        close([dropped(found, 1)], [without], rtol=1e-4, atol=1e-5)


# Recipes with the same estimator are one.
DROPPING = {(o.advantage, o.reward_kl): name for name, o in OBJECTIVES.items() if shape_of(o) == "*batch G"}


@pytest.mark.parametrize("name", DROPPING.values())
def test_a_group_that_dynamic_sampling_drops_changes_nothing(name):
    """MUS-4: statistics of the batch are those of the groups that are kept, as if the others had not been drawn."""
    objective = OBJECTIVES[name].replace(dynamic_sampling=rl_fn.components.DynamicSampling())
    read = rollouts(objective, 0, prompts=3, group=GROUP)
    read.rewards[1] = 2.0
    read.rewards[[0, 2], :2] = [0.0, 1.0]
    kept = read._replace(**{name: x[[0, 2]] for name, x in read._asdict().items() if x is not None})
    found = np.asarray(advantages(objective, read))
    assert not found[1].any()
    close([found[[0, 2]]], [advantages(objective, kept)], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_groups_told_by_their_ids_are_the_rows_of_a_dense_batch(name):
    objective = OBJECTIVES[name]
    read, valid = rollouts(objective, 1, group=GROUP), one_invalid(1)
    order = np.random.default_rng(1).permutation(PROMPTS * GROUP)

    def flat(x, axis=1):
        """One row of all completions, in another order."""
        joined = np.concatenate(list(x), axis=axis - 1)[None]
        return np.take(joined, order, axis=axis)

    dense = advantages(objective, read._replace(valid=valid))
    greedy = np.repeat(read.greedy_rewards[:, None], GROUP, axis=1)
    ids = np.repeat(np.arange(PROMPTS, dtype=np.int32)[:, None], GROUP, axis=1)
    ragged = mapped(name, read, flat)._replace(valid=flat(valid), group_ids=flat(ids), greedy_rewards=flat(greedy))
    close([advantages(objective, ragged)], [flat(np.asarray(dense))], rtol=1e-4, atol=1e-5)
