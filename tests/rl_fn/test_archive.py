"""The Pareto archive: the front of all that was inserted, thinned where it is crowded, in a fixed shape."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rl_fn

ROOMY = rl_fn.pareto_archive(16, 3, maximize=(True, False, True))
SMALL = rl_fn.pareto_archive(7, 2, maximize=True)
fill_roomy, fill_small = (
    jax.jit(
        lambda points, archive=archive: jax.lax.scan(
            lambda state, item: (archive.insert(state, *item), None),
            archive.init(),
            (points, jnp.arange(points.shape[0])),
        )[0]
    )
    for archive in (ROOMY, SMALL)
)

insert_small = jax.jit(SMALL.insert)


@given(seed=st.integers(0, 2**32 - 1))
def test_keeps_the_front_of_everything_inserted(seed):
    points = np.random.default_rng(seed).integers(0, 3, (16, 3)).astype(np.float32)
    state = fill_roomy(points)
    gains = points * np.array([1, -1, 1], np.float32)
    older = [i for i, p in enumerate(gains) if not (gains[:i] == p).all(axis=1).any()]
    front = [i for i in older if not ((gains >= gains[i]).all(axis=1) & (gains > gains[i]).any(axis=1)).any()]
    assert state.tags[state.used].tolist() == front
    np.testing.assert_array_equal(state.points[state.used], points[front])
    assert not np.asarray(state.points)[~np.asarray(state.used)].any()


@given(seed=st.integers(0, 2**32 - 1))
def test_a_full_archive_keeps_the_ends_and_drops_the_crowded(seed):
    x = np.sort(np.random.default_rng(seed).permutation(200)[:30]).astype(np.float32)
    order = np.random.default_rng(seed).permutation(30)
    front = np.stack([x, 200.0 - x], axis=-1)
    state = fill_small(front[order])
    kept = np.sort(np.asarray(state.points)[:, 0])
    assert np.asarray(state.used).all()
    assert set(kept.tolist()) <= set(x.tolist())
    assert (kept[0], kept[-1]) == (x[0], x[-1])


def test_the_most_crowded_point_goes():
    state = SMALL.init()
    for i, x in enumerate([0.0, 10.0, 2.0, 4.0, 6.0, 8.0, 5.0]):
        state = insert_small(state, jnp.array([x, 10.0 - x]), i)
    assert np.asarray(state.used).all()
    # Between 4 and 5 the newcomer is the most crowded; between 8 and 10 it is as crowded as 5, and the older goes.
    refused, accepted = (insert_small(state, jnp.array([x, 10.0 - x]), 7) for x in (4.5, 9.0))
    assert refused.tags.tolist() == state.tags.tolist()
    assert sorted(np.asarray(accepted.points)[:, 0].tolist()) == [0.0, 2.0, 4.0, 6.0, 8.0, 9.0, 10.0]


def test_repeated_dominated_and_unknown_points_change_nothing():
    state = insert_small(SMALL.init(), jnp.array([1.0, 2.0]), 5)
    for point in ([1.0, 2.0], [1.0, 1.0], [np.nan, 9.0], [np.inf, 9.0]):
        after = insert_small(state, jnp.array(point), 6)
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
            np.testing.assert_array_equal(a, b)
    assert int(insert_small(state, jnp.array([2.0, 2.0]), 7).used.sum()) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rl_fn.pareto_archive(0, 2, maximize=True), "capacity"),
        (lambda: rl_fn.pareto_archive(4, 2, maximize=[True]), "one of 2"),
        (lambda: SMALL.insert(SMALL.init(), jnp.zeros(3), 0), r"\(3,\)"),
    ],
)
def test_bad_arguments_raise_with_their_values(call, message):
    with pytest.raises(ValueError, match=message):
        call()
