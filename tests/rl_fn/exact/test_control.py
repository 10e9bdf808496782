"""Controllers, schedules, multipliers and archives, a step at a time."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

import rl_fn


def after(controller, *measured):
    state = controller.init()
    for x in measured:
        state = controller.update(state, x)
    return state


def test_on_the_target_nothing_moves():
    assert float(after(rl_fn.exponential_kl(0.5, 0.25, up=2.0, down=0.5), 0.5).coef) == 0.25
    assert float(after(rl_fn.exponential_kl(0.5, 0.25, up=2.0, down=0.5), 0.75).coef) == 0.5
    assert float(after(rl_fn.exponential_kl(0.5, 0.25, up=2.0, down=0.5), 0.25).coef) == 0.125
    assert float(after(rl_fn.exponential_kl(0.5, 0.25, up=2.0, down=0.5, high=0.3), 0.75).coef) == np.float32(0.3)
    assert float(after(rl_fn.linear_kl(0.5, 0.25), 0.5).coef) == 0.25


def test_linear_moves_by_the_clipped_error():
    controller = rl_fn.linear_kl(0.5, 1.0, horizon=10, samples=5, clip=0.25)
    # Errors of 0.2, 1 → ¼ and −1 → −¼, times 5/10.
    for kl, coef in ((0.6, 1.1), (1.0, 1.125), (0.0, 0.875)):
        np.testing.assert_allclose(after(controller, kl).coef, coef, rtol=1e-6)
    assert float(after(controller, math.nan).coef) == 1.0
    np.testing.assert_allclose(after(rl_fn.linear_kl(0.5, 1.0, horizon=1, clip=1.0, low=0.5), 0.0).coef, 0.5)


def test_pid_adds_its_three_terms():
    controller = rl_fn.pid_kl(1.0, 1.0, kp=0.5, ki=0.25, kd=2.0)
    # Error 1: 1 + ½ + ¼, without a slope at first; then error 1.5: integral 0.25 + 0.375, slope ½.
    first = after(controller, 2.0)
    assert (float(first.coef), float(first.integral), float(first.error), int(first.step)) == (1.75, 0.25, 1.0, 1)
    second = controller.update(first, 2.5)
    assert (float(second.coef), float(second.integral)) == (1.0 + 0.75 + 0.625 + 1.0, 0.625)
    assert int(controller.update(second, math.nan).step) == 2


def test_pid_does_not_wind_up():
    controller = rl_fn.pid_kl(1.0, 1.0, kp=0.0, ki=0.5, high=1.75, low=0.5)
    # Error 1 a step: integrals ½, then no more than ¾; one step back is at once below the bound.
    state = after(controller, 2.0, 2.0, 2.0)
    assert (float(state.coef), float(state.integral)) == (1.75, 0.75)
    assert float(controller.update(state, 0.5).coef) == 1.5
    state = after(controller, 0.0, 0.0, 0.0)
    assert (float(state.coef), float(state.integral)) == (0.5, -0.5)
    assert float(controller.update(state, 1.5).coef) == 0.75


def test_entropy_bonus_is_on_up_to_the_target():
    controller = rl_fn.adaptive_entropy(0.5, 0.25, step=0.125, high=0.5)
    for entropy, coef, level in ((0.25, 0.375, 0.375), (0.5, 0.25, 0.25), (0.75, 0.0, 0.125)):
        state = after(controller, entropy)
        assert (float(state.coef), float(state.level)) == (coef, level), entropy
    assert float(controller.init().coef) == 0.0
    assert float(after(controller, 0.0, 0.0, 0.0).level) == 0.5


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("linear", [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        # ½(1 + cos(πs)) at s = 0, ¼, ½, ¾, 1.
        ("cosine", [1.0, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125), 0.0, 0.0]),
    ],
)
def test_schedules_at_every_step(kind, values):
    controller = rl_fn.scheduled_kl(kind, start=1.0, end=0.0, steps=4)
    got = [float(after(controller, *[0.0] * n).coef) for n in range(6)]
    np.testing.assert_allclose(got, values, atol=1e-6)
    assert int(after(controller, *[0.0] * 6).step) == 4


def test_exponential_and_warm_schedules():
    controller = rl_fn.scheduled_kl("exponential", start=4.0, end=1.0, steps=2)
    np.testing.assert_allclose([float(after(controller, *[0.0] * n).coef) for n in range(4)], [4, 2, 1, 1], rtol=1e-6)
    controller = rl_fn.scheduled_kl("warmup_cosine", start=2.0, end=1.0, steps=4, warmup=2)
    # Up to 2 in two steps, then half a cosine of two steps down to 1.
    got = [float(after(controller, *[0.0] * n).coef) for n in range(6)]
    np.testing.assert_allclose(got, [0.0, 1.0, 2.0, 1.5, 1.0, 1.0], atol=1e-6)


def test_multipliers_move_with_the_violation():
    terms = rl_fn.lagrangian([1.0, 1.0], directions=["<=", ">="], lr=0.5, penalty=4.0, start=1.0, high=1.5)
    g = jnp.array([1.5, 3.0])
    assert terms.violations(g).tolist() == [0.5, -2.0]
    state = terms.update(terms.init(), g)
    assert state.multipliers.tolist() == [1.25, 0.0]
    assert terms.update(state, g + 9.0).multipliers.tolist() == [1.5, 0.0]
    assert terms.update(state, jnp.array([math.nan, 0.0])).multipliers.tolist() == [1.25, 0.5]
    # 10 + 1.25 · ½ + ½ · 4 · ½²; the satisfied constraint adds nothing.
    assert float(terms.loss(state, jnp.array(10.0), g)) == 10.0 + 0.625 + 0.5
    # A multiplier of 0 silences even an infinite slack.
    assert float(terms.loss(state, jnp.array(10.0), jnp.array([1.5, math.inf]))) == 11.125
    plain = rl_fn.lagrangian([1.0], directions=["<="], lr=0.5, start=1.0)
    assert float(plain.loss(plain.init(), jnp.array(10.0), jnp.array([1.5]))) == 10.5


def test_what_a_lagrangian_refuses_later():
    terms = rl_fn.lagrangian([1.0, 1.0], directions=["<=", ">="], lr=0.5)
    with pytest.raises(ValueError, match="constraints must have shape"):
        terms.violations(jnp.zeros(3))
    with pytest.raises(ValueError, match="objective must be a scalar"):
        terms.loss(terms.init(), jnp.zeros(2), jnp.zeros(2))
    with pytest.raises(ValueError, match="limits must not be empty"):
        rl_fn.lagrangian([], directions=[], lr=0.5)


def test_an_archive_keeps_the_front():
    archive = rl_fn.pareto_archive(2, 2, maximize=True)
    state = archive.init()
    assert not state.points.any() and not state.tags.any() and not state.used.any()
    for tag, point in enumerate(([1.0, 1.0], [1.0, 1.0], [0.0, 0.5], [math.nan, 9.0], [2.0, 0.0])):
        state = archive.insert(state, jnp.array(point), tag + 1)
    # A repetition, a dominated point and a NaN are not welcome.
    kept = dict(zip(state.tags.tolist(), state.points.tolist(), strict=True))
    assert kept == {1: [1.0, 1.0], 5: [2.0, 0.0]} and state.used.all()
    state = archive.insert(state, jnp.array([3.0, 3.0]), 9)
    assert state.used.tolist() == [True, False]
    assert state.points.tolist() == [[3.0, 3.0], [0.0, 0.0]] and state.tags.tolist() == [9, 0]
    with pytest.raises(ValueError, match="point must have shape"):
        archive.insert(state, jnp.zeros(3), 1)


def test_a_full_archive_drops_the_most_crowded():
    archive = rl_fn.pareto_archive(3, 2, maximize=True)
    state = archive.init()
    for tag, x in enumerate((0.0, 1.0, 4.0, 3.0)):
        state = archive.insert(state, jnp.array([x, 4.0 - x]), tag)
    # Gaps around 1: (3 − 0)/4, around 3: (4 − 1)/4: equal in both objectives, so the first of them goes.
    assert sorted(state.points[:, 0].tolist()) == [0.0, 3.0, 4.0]


def test_fronts_distances_and_scalarisations():
    points = jnp.array([[1.0, 3.0], [2.0, 2.0], [2.0, 2.0], [1.0, 2.0], [3.0, 1.0], [math.nan, 9.0]])
    assert rl_fn.pareto_mask(points, maximize=True).tolist() == [True, True, True, False, True, False]
    assert rl_fn.pareto_mask(points[:5], maximize=False).tolist() == [False, False, False, True, True]
    assert rl_fn.pareto_mask(points[:5], maximize=[True, False]).tolist() == [False, False, False, False, True]
    # Sorted 0, 1, 4: the middle one has (4 − 0)/4 in both objectives.
    got = rl_fn.crowding_distance(jnp.array([[4.0, 0.0], [0.0, 4.0], [1.0, 3.0]]))
    assert got.tolist() == [math.inf, math.inf, 2.0]
    assert rl_fn.crowding_distance(jnp.array([[1.0, 1.0]])).tolist() == [0.0]
    f, w = jnp.array([1.0, 2.0]), jnp.array([0.5, 2.0])
    assert float(rl_fn.weighted_sum(f, w, maximize=[True, False])) == -0.5 + 4.0
    # Shortfalls 2 and 2 from (3, 0) up and down: max(1, 4) + 0.5 · 4.
    assert float(rl_fn.tchebycheff(f, w, jnp.array([3.0, 0.0]), maximize=[True, False], rho=0.5)) == 6.0
