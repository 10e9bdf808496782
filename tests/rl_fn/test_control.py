"""Controllers: equal to plain loops, settling in closed loop, no wind-up, schedules that end where they should."""

import functools
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rl_fn
from experiments.controllers import (
    BAND,
    CONTROLLERS,
    OUT,
    PLANTS,
    TARGET,
    markdown,
    overshoot,
    settling_time,
    simulate,
    table,
)
from tests.oracle.lookup import ORACLE

MEASURED = st.lists(st.floats(0.0, 5.0, width=32) | st.just(float("nan")), min_size=1, max_size=12)
EXPONENTIAL = {"up": 1.2, "down": 0.9, "low": 0.05, "high": 0.6}
PID = {"kp": 0.2, "ki": 0.05, "kd": 0.1, "low": 0.1, "high": 0.9}
ENTROPY = {"step": 0.02, "low": 0.01, "high": 0.06}
ADAPTIVE = ["exponential_kl", "linear_kl", "pid_kl"]
EACH = [
    rl_fn.fixed_kl(0.2),
    rl_fn.exponential_kl(0.1),
    rl_fn.linear_kl(0.1),
    rl_fn.pid_kl(0.1),
    rl_fn.adaptive_entropy(0.2),
    rl_fn.scheduled_kl("cosine", start=1.0, end=0.1, steps=3),
]


def coefs(controller, measured):
    state, out = controller.init(), []
    for x in measured:
        state = controller.update(state, float(x))
        out.append(float(state.coef))
    return out


@given(measured=MEASURED)
def test_controllers_equal_plain_loops(measured):
    pairs = [
        (
            rl_fn.exponential_kl(1.0, 0.3, **EXPONENTIAL),
            ORACLE["exponential_kl"](measured, 1.0, 0.3, **EXPONENTIAL),
        ),
        (
            rl_fn.linear_kl(1.0, 0.3, horizon=10, samples=4, clip=0.5),
            ORACLE["linear_kl"](measured, 1.0, 0.3, horizon=10, samples=4, clip=0.5),
        ),
        (rl_fn.pid_kl(1.0, 0.3, **PID), ORACLE["pid_kl"](measured, 1.0, 0.3, **PID)),
        (
            rl_fn.adaptive_entropy(1.0, 0.03, **ENTROPY),
            ORACLE["adaptive_entropy"](measured, 1.0, 0.03, **ENTROPY),
        ),
    ]
    for controller, expected in pairs:
        np.testing.assert_allclose(coefs(controller, measured), expected, rtol=1e-4, atol=1e-5)


@functools.cache
def measured_rows():
    return table()


@pytest.mark.parametrize("name", ADAPTIVE)
def test_every_adaptive_controller_settles(name):
    rows = [row for row in measured_rows() if row["controller"] == name]
    assert [row["plant"] for row in rows] == list(PLANTS)
    for row in rows:
        assert row["settling_updates"] is not None and row["settling_updates"] <= 300
        assert row["overshoot"] <= 0.15
        assert abs(row["final_coef"] / row["coef_at_target"] - 1.0) < 0.05


def test_a_fixed_coefficient_does_not_settle():
    assert [row["settling_updates"] for row in measured_rows() if row["controller"] == "fixed_kl"] == [None] * 4


def test_settling_and_overshoot_of_known_curves():
    kls = TARGET * np.array([0.0, 2.0, 1.1, 0.7, 0.9, 1.0])
    assert settling_time(kls) == 4
    assert overshoot(kls) == pytest.approx(0.3)
    assert settling_time(kls[:4]) is None
    assert overshoot(TARGET * np.array([0.2, 0.5])) == 0.0


@pytest.mark.parametrize("name", ADAPTIVE)
def test_noise_is_not_amplified(name):
    kls, _ = simulate(CONTROLLERS[name], PLANTS["inert"], noise=0.05, seed=3)
    # An open loop at the right coefficient has 0.05 / √(1 − 0.9²) = 0.115 of noise.
    assert np.sqrt(np.mean((kls[500:] / TARGET - 1.0) ** 2)) < 0.16


def test_committed_table_is_what_the_script_computes():
    committed = json.loads((OUT / "settling.json").read_text(encoding="utf-8"))
    assert committed["band"] == BAND
    for old, new in zip(committed["rows"], measured_rows(), strict=True):
        assert (old["plant"], old["controller"]) == (new["plant"], new["controller"])
        assert (old["settling_updates"] is None) == (new["settling_updates"] is None)
        assert abs((old["settling_updates"] or 0) - (new["settling_updates"] or 0)) <= 2
        for name in ("peak_over_target", "overshoot", "final_coef", "rms_error_with_noise"):
            assert old[name] == pytest.approx(new[name], rel=0.02, abs=0.005)
    page = Path(__file__).parents[2] / "docs" / "controllers.md"
    assert markdown(committed["rows"]) in page.read_text(encoding="utf-8")


@pytest.mark.long
@pytest.mark.parametrize(("pushing", "turned", "limit"), [(5.0, 0.5, 1.0), (0.0, 1.5, 0.0)])
def test_pid_does_not_wind_up(pushing, turned, limit):
    controller = rl_fn.pid_kl(1.0, 0.5, kp=0.1, ki=0.1, low=0.0, high=1.0)
    held = coefs(controller, [pushing] * 500)
    assert held[-1] == limit
    # 500 updates at the limit, then one measurement on the other side: the coefficient leaves the limit at once.
    after = coefs(controller, [pushing] * 500 + [turned] * 2)[-2:]
    assert abs(after[0] - limit) >= 0.05 and abs(after[1] - limit) > abs(after[0] - limit)


def test_pid_survives_an_infinite_kl():
    controller = rl_fn.pid_kl(1.0, 0.5, kd=0.1)
    out = coefs(controller, [float("inf"), float("inf"), 1.0, 1.0])
    assert np.isfinite(out).all() and out[0] == 10.0
    assert out[-1] == pytest.approx(0.5)


def test_pid_has_no_derivative_kick_at_the_start():
    controller = rl_fn.pid_kl(1.0, 0.5, kp=0.0, ki=0.0, kd=1.0)
    assert coefs(controller, [4.0, 4.0, 4.5]) == pytest.approx([0.5, 0.5, 1.0])


@pytest.mark.parametrize("kind", ["cosine", "linear", "exponential", "warmup_cosine"])
@pytest.mark.parametrize(("start", "end"), [(0.3, 0.1), (0.1, 0.7), (1e-3, 3.3)])
def test_schedules_reach_their_ends_exactly(kind, start, end):
    warmup = 3 if kind == "warmup_cosine" else 0
    controller = rl_fn.scheduled_kl(kind, start=start, end=end, steps=11, warmup=warmup)
    out = [float(controller.init().coef), *coefs(controller, [float("nan")] * 14)]
    assert out[warmup] == np.float32(start)
    assert out[11:] == [np.float32(end)] * 4
    expected = [ORACLE["scheduled_kl"](kind, t, start=start, end=end, steps=11, warmup=warmup) for t in range(15)]
    np.testing.assert_allclose(out, expected, rtol=2e-6, atol=1e-7)
    between = out[warmup:12]
    assert all((b - a) * (end - start) > 0 for a, b in itertools.pairwise(between))


def test_a_schedule_may_end_at_zero():
    for kind in ("cosine", "linear"):
        assert coefs(rl_fn.scheduled_kl(kind, start=0.3, end=0.0, steps=4), [0.0] * 4)[-1] == 0.0


@pytest.mark.parametrize("controller", EACH)
def test_state_is_a_stable_pytree(controller):
    """One structure, shape and dtype for ever: it can be carried by scan and restored from a checkpoint."""
    state = controller.init()
    new = controller.update(state, 0.3)
    assert jax.tree.structure(state) == jax.tree.structure(new)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(new), strict=True):
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)
    restored = jax.tree.unflatten(jax.tree.structure(new), [np.asarray(x) for x in jax.tree.leaves(new)])
    for x, y in zip(
        jax.tree.leaves(jax.jit(controller.update)(restored, jnp.asarray(0.4))),
        jax.tree.leaves(controller.update(new, 0.4)),
        strict=True,
    ):
        np.testing.assert_allclose(x, y, rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rl_fn.fixed_kl(-0.1), "-0.1"),
        (lambda: rl_fn.exponential_kl(0.0), "target"),
        (lambda: rl_fn.exponential_kl(1.0, up=0.9), "up=0.9"),
        (lambda: rl_fn.exponential_kl(1.0, low=0.0), "low"),
        (lambda: rl_fn.exponential_kl(1.0, 0.2, high=0.1), "high=0.1"),
        (lambda: rl_fn.linear_kl(1.0, horizon=0), "horizon"),
        (lambda: rl_fn.linear_kl(1.0, clip=1.5), "1.5"),
        (lambda: rl_fn.linear_kl(1.0, horizon=10, samples=100), "samples"),
        (lambda: rl_fn.pid_kl(1.0, kp=-1.0), "gains"),
        (lambda: rl_fn.pid_kl(1.0, high=float("inf")), "finite high"),
        (lambda: rl_fn.adaptive_entropy(0.2, step=0.0), "step"),
        (lambda: rl_fn.scheduled_kl("quadratic", start=1.0, end=0.0, steps=3), "quadratic"),
        (lambda: rl_fn.scheduled_kl("exponential", start=1.0, end=0.0, steps=3), "exponential"),
        (lambda: rl_fn.scheduled_kl("linear", start=1.0, end=0.0, steps=0), "steps"),
        (lambda: rl_fn.scheduled_kl("linear", start=1.0, end=0.0, steps=9, warmup=2), "warmup"),
        (lambda: rl_fn.scheduled_kl("warmup_cosine", start=1.0, end=0.0, steps=9, warmup=9), "warmup"),
    ],
)
def test_bad_arguments_raise_with_their_values(call, message):
    with pytest.raises(ValueError, match=message):
        call()
