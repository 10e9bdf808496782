"""Hypervolume: fronts whose volume is known, inclusion and exclusion, a Monte Carlo bracket."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rl_fn
from tests.oracle.lookup import ORACLE

SEEDS = st.integers(0, 2**32 - 1)


def staircase(size: int, objectives: int) -> np.ndarray:
    """All positive integer points on a diagonal; they dominate C(size + M − 1, M) unit cells."""
    grid = itertools.product(range(1, size + 1), repeat=objectives)
    return np.array([p for p in grid if sum(p) == size + objectives - 1], np.float64)


@pytest.mark.parametrize(("objectives", "size"), [(1, 5), (2, 40), (3, 9), (4, 6), (5, 4)])
@pytest.mark.parametrize("maximize", [True, False])
def test_staircase_is_exact(objectives, size, maximize):
    points = staircase(size, objectives) * (1.0 if maximize else -1.0)
    got = rl_fn.hypervolume(points, np.zeros(objectives), maximize=maximize)
    assert got == math.comb(size + objectives - 1, objectives)


@pytest.mark.parametrize("objectives", [2, 3, 4])
def test_one_point_is_a_box_and_what_is_not_past_the_reference_is_nothing(objectives):
    point = np.arange(2.0, 2.0 + objectives)[None]
    assert rl_fn.hypervolume(point, np.ones(objectives), maximize=True) == math.factorial(objectives)
    on_the_edge = point.copy()
    on_the_edge[0, -1] = 1.0
    assert rl_fn.hypervolume(on_the_edge, np.ones(objectives), maximize=True) == 0.0
    assert rl_fn.hypervolume(point[:0], np.ones(objectives), maximize=True) == 0.0


@pytest.mark.parametrize("objectives", [1, 2, 3, 4])
@given(seed=SEEDS, count=st.integers(0, 7))
def test_equals_inclusion_and_exclusion(objectives, seed, count):
    rng = np.random.default_rng(seed)
    # Few distinct values: ties, repeated and dominated points, points not past the reference.
    points = rng.integers(-1, 5, (count, objectives)).astype(np.float64)
    reference, maximize = np.zeros(objectives), rng.random(objectives) < 0.5
    points = np.where(maximize, points, -points)
    got = rl_fn.hypervolume(points, reference, maximize=maximize.tolist())
    assert got == ORACLE["hypervolume"](points, reference, maximize=maximize)
    own = rl_fn.hypervolume_contribution(points, reference, maximize=maximize.tolist())
    assert own.tolist() == ORACLE["hypervolume_contribution"](points, reference, maximize=maximize)


@given(seed=SEEDS)
def test_mixed_directions_are_a_change_of_sign(seed):
    points = np.random.default_rng(seed).random((12, 3))
    mixed = rl_fn.hypervolume(points * [1, -1, 1], np.zeros(3), maximize=[True, False, True])
    np.testing.assert_allclose(mixed, rl_fn.hypervolume(points, np.zeros(3), maximize=True), rtol=1e-13)


@pytest.mark.parametrize("objectives", [3, 5])
def test_monte_carlo_brackets_it(objectives):
    rng = np.random.default_rng(objectives)
    directions = np.abs(rng.normal(size=(25, objectives)))
    points = directions / np.linalg.norm(directions, axis=1, keepdims=True)
    draws = rng.random((40_000, objectives))
    share = (draws[:, None, :] <= points[None]).all(axis=-1).any(axis=-1).mean()
    spread = math.sqrt(share * (1 - share) / draws.shape[0])
    assert abs(rl_fn.hypervolume(points, np.zeros(objectives), maximize=True) - share) < 4 * spread


def test_small_contribution_survives_a_large_total():
    points = np.array([[2.0**26, 2.0**26], [2.0**26 + 2.0**-20, 2.0**-20]])
    whole, without = (rl_fn.hypervolume(p, [0.0, 0.0], maximize=True) for p in (points, points[:1]))
    assert whole - without == 0.0
    assert rl_fn.hypervolume_contribution(points, [0.0, 0.0], maximize=True)[1] == 2.0**-40


@pytest.mark.parametrize(
    ("points", "reference", "maximize", "message"),
    [
        (np.zeros(3), [0.0], True, "N M"),
        (np.zeros((2, 3)), [0.0, 0.0], True, "reference must have shape"),
        (np.zeros((2, 2)), [0.0, 0.0], [True], "maximize"),
        (np.array([[np.nan, 1.0]]), [0.0, 0.0], True, "finite"),
        (np.array([[np.inf, 1.0]]), [0.0, 0.0], True, "finite"),
    ],
)
def test_what_is_undefined_raises(points, reference, maximize, message):
    with pytest.raises(ValueError, match=message):
        rl_fn.hypervolume(points, reference, maximize=maximize)
