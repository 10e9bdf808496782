"""Sets have no order: packing, fronts and volumes know their members, not the places of members or objectives."""

import numpy as np
import pytest

import rl_fn
from tests.rl_fn.laws import every_seed
from tests.rl_fn.permutations import CAPACITY, PERMUTED, M


def called(name, call):
    result = getattr(rl_fn, name)(*call[0], **call[1])
    return PERMUTED[name].seen(call, result)


def compare(a, b):
    if isinstance(a, list):
        assert a == b
    else:
        np.testing.assert_allclose(a, b, rtol=1e-9)


@pytest.mark.parametrize("name", PERMUTED)
@every_seed
def test_members_may_change_places(name, seed):
    law, rng = PERMUTED[name], np.random.default_rng(seed)
    call = law.draw(rng)
    (members, *rest), options = call
    order = rng.permutation(members.shape[law.axis])
    moved = ((np.take(members, order, axis=law.axis), *rest), options)
    compare(called(name, moved), law.expected(call, called(name, call), order))


OF_OBJECTIVES = ["hypervolume", "hypervolume_contribution", "pareto_mask", "crowding_distance"]


@pytest.mark.parametrize("name", OF_OBJECTIVES)
@every_seed
def test_objectives_may_change_places(name, seed):
    rng = np.random.default_rng(seed)
    (points, *rest), options = PERMUTED[name].draw(rng)
    order = rng.permutation(M)
    moved = {k: tuple(np.asarray(v)[order].tolist()) for k, v in options.items()}
    result = called(name, ((points[..., order], *(x[order] for x in rest)), moved))
    np.testing.assert_allclose(result, called(name, ((points, *rest), options)), rtol=1e-6)


@pytest.mark.parametrize("name", [name for name in OF_OBJECTIVES if name != "crowding_distance"])
@every_seed
def test_larger_is_better_is_smaller_is_better_of_the_negative(name, seed):
    (points, *rest), options = PERMUTED[name].draw(np.random.default_rng(seed))
    turned = {"maximize": tuple(not up for up in options["maximize"])}
    result = called(name, ((-points, *(-x for x in rest)), turned))
    np.testing.assert_allclose(result, called(name, ((points, *rest), options)), rtol=1e-9)


@every_seed
def test_bins_hold_their_capacity_and_no_two_fit_into_one(seed):
    (lengths, capacity), _ = PERMUTED["pack"].draw(np.random.default_rng(seed))
    loads = sorted(int(lengths[part].sum()) for part in rl_fn.pack(lengths, capacity))
    assert max(loads) <= CAPACITY
    assert len(loads) < 2 or loads[0] + loads[1] > CAPACITY


@every_seed
def test_gather_undoes_split_and_split_undoes_gather(seed):
    (whole, ranks), options = PERMUTED["zigzag_split"].draw(np.random.default_rng(seed))
    shards = rl_fn.zigzag_split(whole, ranks, **options)
    assert sorted(shards.ravel().tolist()) == sorted(whole.ravel().tolist())
    np.testing.assert_array_equal(rl_fn.zigzag_gather(shards, **options), whole)
