"""Scalarisations find what they should on known fronts; the front and its crowding under ties, NaN and reordering."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rl_fn

SEEDS = st.integers(0, 2**32 - 1)


def test_tchebycheff_finds_the_concave_front_that_a_weighted_sum_misses():
    """Minimise both on the front (cos θ, sin θ), which bulges away from the ideal: sums find its ends alone."""
    angles = np.linspace(0.0, np.pi / 2, 501)
    front = jnp.asarray(np.stack([np.cos(angles), np.sin(angles)], axis=-1), jnp.float32)
    for share in (0.2, 0.5, 0.8):
        weights = jnp.array([share, 1.0 - share])
        linear = int(jnp.argmin(rl_fn.weighted_sum(front, weights, maximize=False)))
        assert linear in (0, 500)
        chosen = int(jnp.argmin(rl_fn.tchebycheff(front, weights, jnp.zeros(2), maximize=False, rho=1e-3)))
        # On the ray w₁ f₁ = w₂ f₂.
        assert angles[chosen] == pytest.approx(np.arctan(share / (1.0 - share)), abs=0.01)


def test_the_augmentation_excludes_weakly_optimal_points():
    points, weights, ideal = jnp.array([[1.0, 1.0], [1.0, 0.0]]), jnp.ones(2), jnp.zeros(2)
    assert jnp.ptp(rl_fn.tchebycheff(points, weights, ideal, maximize=False, rho=0.0)) == 0.0
    assert int(jnp.argmin(rl_fn.tchebycheff(points, weights, ideal, maximize=False))) == 1


@given(seed=SEEDS)
def test_directions_are_a_change_of_sign(seed):
    rng = np.random.default_rng(seed)
    f, w, z = (rng.normal(size=shape).astype(np.float32) for shape in ((6, 3), (3,), (3,)))
    flip = np.array([1, -1, 1], np.float32)
    for function in (
        lambda f, z, maximize: rl_fn.weighted_sum(f, w, maximize=maximize),
        lambda f, z, maximize: rl_fn.tchebycheff(f, w, z, maximize=maximize),
        lambda f, z, maximize: rl_fn.pareto_mask(f, maximize=maximize),
    ):
        np.testing.assert_array_equal(function(f, z, True), function(f * flip, z * flip, [True, False, True]))


@given(seed=SEEDS, count=st.sampled_from([1, 4, 8]))
def test_the_front_is_sound_and_complete(seed, count):
    points = np.random.default_rng(seed).integers(0, 4, (count, 3)).astype(np.float32)
    kept = np.asarray(rl_fn.pareto_mask(points, maximize=True))
    assert kept.any()
    dominates = (points[:, None] >= points).all(-1) & (points[:, None] > points).any(-1)
    assert not dominates[:, kept].any()
    assert dominates[kept][:, ~kept].any(axis=0).all()
    order = np.random.default_rng(seed).permutation(count)
    np.testing.assert_array_equal(rl_fn.pareto_mask(points[order], maximize=True), kept[order])


def test_equal_points_stay_and_nan_neither_stays_nor_dominates():
    points = jnp.array([[1.0, 1.0], [1.0, 1.0], [np.nan, 9.0], [0.0, np.inf], [0.0, 1.0]])
    assert rl_fn.pareto_mask(points, maximize=True).tolist() == [True, True, False, True, False]


def test_crowding_of_known_points():
    points = jnp.array([[0.0, 10.0], [1.0, 6.0], [5.0, 5.0], [10.0, 0.0]])
    np.testing.assert_allclose(rl_fn.crowding_distance(points), [np.inf, 0.5 + 0.5, 0.9 + 0.6, np.inf], rtol=1e-6)
    assert rl_fn.crowding_distance(jnp.array([[1.0, 0.0], [1.0, 1.0], [1.0, 3.0]])).tolist() == [np.inf, 1.0, np.inf]
    assert rl_fn.crowding_distance(jnp.ones((1, 2))).tolist() == [0.0]


def test_gradient_of_tchebycheff_pulls_the_worst_objective():
    f, w, z = jnp.array([0.5, 0.9]), jnp.ones(2), jnp.ones(2)
    gradient = jax.grad(lambda f: rl_fn.tchebycheff(f, w, z, maximize=True, rho=0.1))(f)
    np.testing.assert_allclose(gradient, [-1.1, -0.1], rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rl_fn.pareto_mask(jnp.ones((2, 3)), maximize=[True]), "one of 3"),
        (lambda: rl_fn.weighted_sum(jnp.ones(3), jnp.ones(3), maximize=[True, False]), "one of 3"),
        (lambda: rl_fn.tchebycheff(jnp.ones(3), jnp.ones(3), jnp.ones(3), maximize=True, rho=-1.0), "rho"),
        (lambda: rl_fn.crowding_distance(jnp.ones((0, 2))), r"\(0, 2\)"),
    ],
)
def test_bad_arguments_raise_with_their_values(call, message):
    with pytest.raises(ValueError, match=message):
        call()
