"""The Lagrangian: equal to plain loops, at the KKT point of solved problems, with its gradient in the policy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rl_fn
from tests.oracle.control import lagrangian_loss, lagrangian_update

LIMITS, DIRECTIONS = [0.1, 2.0, -1.0], ["<=", ">=", "<="]


@given(seed=st.integers(0, 2**32 - 1), penalty=st.sampled_from([0.0, 3.0]))
def test_equals_plain_loops(seed, penalty):
    rng = np.random.default_rng(seed)
    constrained = rl_fn.lagrangian(LIMITS, directions=DIRECTIONS, lr=0.3, penalty=penalty, start=0.2, high=0.6)
    state, multipliers = constrained.init(), [0.2] * 3
    for _ in range(6):
        g = rng.normal(LIMITS).astype(np.float32)
        expected = lagrangian_loss(multipliers, 0.7, g.tolist(), LIMITS, DIRECTIONS, penalty)
        np.testing.assert_allclose(
            constrained.loss(state, jnp.float32(0.7), jnp.asarray(g)), expected, rtol=1e-5, atol=1e-6
        )
        g[rng.random(3) < 0.2] = np.nan
        state = constrained.update(state, jnp.asarray(g))
        multipliers = lagrangian_update(multipliers, g.tolist(), LIMITS, DIRECTIONS, 0.3, 0.6)
        np.testing.assert_allclose(state.multipliers, multipliers, rtol=1e-5, atol=1e-6)


def descend(constrained, objective, constraints, x, rate, steps):
    def step(carry, _):
        x, state = carry
        x = x - rate * jax.grad(lambda x: constrained.loss(state, objective(x), constraints(x)))(x)
        return (x, constrained.update(state, constraints(x))), None

    return jax.lax.scan(step, (x, constrained.init()), None, length=steps)[0]


@pytest.mark.parametrize("penalty", [0.0, 5.0])
def test_reaches_the_kkt_point_of_a_quadratic_problem(penalty):
    """min (x − 2)² + (y − 1)² + z²/2 under x ≤ 1, y ≥ 3 and z ≤ 5: x = 1, λ = 2; y = 3, λ = 4; z = 0, slack, λ = 0."""
    constrained = rl_fn.lagrangian([1.0, 3.0, 5.0], directions=["<=", ">=", "<="], lr=0.05, penalty=penalty, start=1.0)

    def objective(x):
        return (x[0] - 2) ** 2 + (x[1] - 1) ** 2 + x[2] ** 2 / 2

    x, state = descend(constrained, objective, lambda x: x, jnp.ones(3), 0.05, 2000)
    np.testing.assert_allclose(x, [1.0, 3.0, 0.0], atol=1e-4)
    np.testing.assert_allclose(state.multipliers, [2.0, 4.0, 0.0], atol=1e-3)


def test_reaches_the_kkt_point_of_a_policy_under_a_kl_limit():
    """max E_π[r] under KL(π‖π_ref) ≤ δ: π ∝ π_ref e^{r/λ} with λ such that the KL is δ, here found by bisection."""
    rewards, reference, limit = np.array([1.0, 0.3, -0.5, 0.0]), np.array([0.1, 0.2, 0.3, 0.4]), 0.2

    def tilted(multiplier):
        p = reference * np.exp(rewards / multiplier)
        return p / p.sum()

    low, high = 1e-2, 1e2
    for _ in range(100):
        middle = np.sqrt(low * high)
        p = tilted(middle)
        low, high = (middle, high) if np.sum(p * np.log(p / reference)) > limit else (low, middle)

    constrained = rl_fn.lagrangian([limit], directions=["<="], lr=0.1)
    r, ref = jnp.asarray(rewards, jnp.float32), jnp.log(jnp.asarray(reference, jnp.float32))

    def objective(logits):
        return -jnp.sum(jax.nn.softmax(logits) * r)

    def kl(logits):
        return jnp.sum(jax.nn.softmax(logits) * (jax.nn.log_softmax(logits) - ref))[None]

    logits, state = descend(constrained, objective, kl, ref, 0.5, 5000)
    np.testing.assert_allclose(state.multipliers, [low], rtol=1e-3)
    np.testing.assert_allclose(jax.nn.softmax(logits), tilted(low), atol=1e-4)


def test_gradient_flows_into_the_policy_and_not_into_the_multipliers():
    constrained = rl_fn.lagrangian([1.0, 1.0], directions=["<=", ">="], lr=0.1, penalty=2.0)
    state = rl_fn.LagrangianState(jnp.array([3.0, 4.0]))
    g = jnp.array([1.5, 0.5])
    to_state, to_objective, to_constraints = jax.grad(constrained.loss, argnums=(0, 1, 2))(state, jnp.array(1.0), g)
    assert to_state.multipliers.tolist() == [0.0, 0.0]
    assert float(to_objective) == 1.0
    # λ + penalty · v, against the direction of ≥.
    assert to_constraints.tolist() == [3.0 + 2.0 * 0.5, -(4.0 + 2.0 * 0.5)]
    assert constrained.violations(g).tolist() == [0.5, 0.5]


def test_a_constraint_that_cannot_be_met_stops_at_the_largest_multiplier():
    constrained = rl_fn.lagrangian([0.0], directions=["<="], lr=1.0, high=5.0)
    state = constrained.init()
    for _ in range(9):
        state = constrained.update(state, jnp.array([1.0]))
    assert state.multipliers.tolist() == [5.0]


def test_an_unused_constraint_cannot_spoil_the_loss():
    constrained = rl_fn.lagrangian([0.0], directions=["<="], lr=1.0)
    value, gradient = jax.value_and_grad(constrained.loss, argnums=2)(
        constrained.init(), jnp.array(1.0), jnp.array([np.inf])
    )
    assert (float(value), gradient.tolist()) == (1.0, [0.0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rl_fn.lagrangian([], directions=[], lr=0.1), "empty"),
        (lambda: rl_fn.lagrangian([1.0], directions=["<"], lr=0.1), "'<'"),
        (lambda: rl_fn.lagrangian([1.0], directions=["<=", "<="], lr=0.1), "1 limits"),
        (lambda: rl_fn.lagrangian([1.0], directions=["<="], lr=0.0), "lr"),
        (lambda: rl_fn.lagrangian([1.0], directions=["<="], lr=0.1, penalty=-1.0), "penalty"),
        (lambda: rl_fn.lagrangian([1.0], directions=["<="], lr=0.1, start=2.0, high=1.0), "high=1.0"),
        (lambda: rl_fn.lagrangian([1.0], directions=["<="], lr=0.1).violations(jnp.zeros(2)), r"\(2,\)"),
        (
            lambda: rl_fn.lagrangian([1.0], directions=["<="], lr=0.1).loss(
                rl_fn.LagrangianState(jnp.zeros(1)), jnp.zeros(3), jnp.zeros(1)
            ),
            "scalar",
        ),
    ],
)
def test_bad_arguments_raise_with_their_values(call, message):
    with pytest.raises(ValueError, match=message):
        call()
