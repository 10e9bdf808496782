"""Arguments that a formula holds fixed (its sg[·]) have no gradient, though the result depends on them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rl_fn

MASK = jnp.array([[True, True, True, False]])
A = jnp.array([[1.0, -0.5, 2.0, 0.0]])
B = jnp.array([[-0.25, -1.0, -0.5, -1.0]])
C = jnp.array([[-1.0, -0.75, -0.125, -1.0]])
X, Y = jnp.array([-1.0, -2.0]), jnp.array([-1.5, -1.0])
GOOD = jnp.array([True, False])
# A function of the argument that must stay without gradient, and a point to look at.
FIXED = {
    "cispo, old policy": (lambda x: rl_fn.cispo(B, x, A, clip_high=2.0, clip_low=0.9), C),
    "decoupled_ppo, rollout policy": (lambda x: rl_fn.decoupled_ppo(B, C, x, A), C + 0.25),
    "truncated_importance_weights": (lambda x: rl_fn.truncated_importance_weights(x, MASK, cap=5.0), B),
    "masked_importance_weights": (lambda x: rl_fn.masked_importance_weights(x, MASK, low=0.1, high=5.0), B),
    "topr, old policy": (lambda x: rl_fn.topr(B, x, A, MASK), C + 1.0),
    "vespo, old policy": (lambda x: rl_fn.vespo(B, x, A, MASK), C),
    "vtrace, log-ratios": (lambda x: jnp.stack(rl_fn.vtrace(A, B, x, MASK, rho_clip=3.0, c_clip=3.0)), C),
    "retrace, log-ratios": (lambda x: jnp.stack(rl_fn.retrace(A, B, x, MASK, c_clip=3.0)), C),
    "clipped_importance_advantages, log-ratios": (
        lambda x: rl_fn.clipped_importance_advantages(A, B, x, MASK, clip_low=0.99, clip_high=9.0)[0],
        C,
    ),
    "kto, kl": (lambda x: rl_fn.kto(X, Y, GOOD, x), jnp.array(0.25)),
    "kto_kl": (lambda x: rl_fn.kto_kl(x, Y - 1.0), X),
    "bco, delta": (lambda x: rl_fn.bco(X, Y, Y, X, delta=x), jnp.array(0.25)),
    "distillation_advantages": (lambda x: rl_fn.distillation_advantages(x, C), B),
    "on_policy_distillation, teacher": (lambda x: rl_fn.on_policy_distillation(B, x), C),
    "mismatch_metrics": (lambda x: jnp.stack(rl_fn.mismatch_metrics(x, C, MASK)), B),
    "wpo_weights": (lambda x: rl_fn.wpo_weights(x), B),
    "preference_metrics": (lambda x: jnp.stack(rl_fn.preference_metrics(x, X, Y, Y)), Y),
    "optimal_token_baseline, policy": (
        lambda x: rl_fn.optimal_token_baseline_advantages(
            jnp.stack([A, B], 1), jnp.stack([x, C], 1), jnp.full((1, 2, 4), 0.5), jnp.stack([MASK, MASK], 1)
        ),
        B,
    ),
    "clip_cov through the covariance": (
        lambda x: rl_fn.clip_cov(B, B, x, MASK, fraction=0.0) * 0.0 + rl_fn.kl_cov(B, B, A, MASK, fraction=1.0),
        A,
    ),
}


@pytest.mark.parametrize("name", FIXED)
def test_it_is_held_fixed(name):
    function, point = FIXED[name]
    assert not np.asarray(jax.jit(jax.grad(lambda x: function(x).sum()))(point)).any()


@pytest.mark.parametrize("name", [name for name in FIXED if "covariance" not in name])
def test_but_the_result_depends_on_it(name):
    """Or the test above would say nothing."""
    function, point = FIXED[name]
    assert jax.jit(lambda x: jnp.abs(function(x + 0.05) - function(x)).max())(point) > 1e-4


def test_gspo_token_has_the_ratio_of_the_sequence_and_the_gradient_of_the_token():
    # Log-ratio of the sequence: (0.25 + 0.75)/2 = ½ ; the loss of a token is −e^½ A, and so is its slope, in it alone.
    new, old, a = jnp.array([-0.75, -0.25]), jnp.array([-1.0, -1.0]), jnp.array([1.0, -2.0])
    mask = jnp.ones(2, bool)
    clips: dict[str, Any] = {"clip_low": 0.9, "clip_high": 9.0}
    rows = jax.jacobian(lambda x: rl_fn.gspo_token(x, old, a, mask, **clips))(new)
    expected = np.exp(0.5) * np.array([[-1.0, 0.0], [0.0, 2.0]])
    np.testing.assert_allclose(rows, expected, rtol=1e-6)
    # GSPO's own gradient spreads over the sequence: ½ each.
    rows = jax.jacobian(lambda x: rl_fn.gspo(x, old, a, mask, **clips))(new)
    np.testing.assert_allclose(rows, np.exp(0.5) * np.array([[-0.5, -0.5], [1.0, 1.0]]), rtol=1e-6)


def test_a_lagrangian_does_not_learn_its_multipliers_by_gradient():
    terms = rl_fn.lagrangian([1.0], directions=["<="], lr=0.1, start=2.0)
    state, objective, g = terms.init(), jnp.array(3.0), jnp.array([1.5])
    assert float(terms.loss(state, objective, g)) == 4.0  # 3 + 2 · (1.5 − 1)
    slope = jax.grad(lambda m: terms.loss(rl_fn.LagrangianState(m), objective, g))(state.multipliers)
    assert slope.tolist() == [0.0]
    # update: 2 + 0.1 · 0.5, without gradient in what was measured.
    assert jax.grad(lambda x: terms.update(state, x).multipliers.sum())(g).tolist() == [0.0]


def test_kl_straight_through_and_dppos_cap():
    v, g = jnp.array([2.0]), jnp.array([3.0])
    slopes = jax.grad(lambda v, g: rl_fn.kl_straight_through(v, g).sum(), (0, 1))(v, g)
    assert rl_fn.kl_straight_through(v, g).tolist() == [2.0]
    assert [s.tolist() for s in slopes] == [[0.0], [1.0]]
    # Ratio e held at 2: value −2 and gradient −2 in the policy.
    new, old, one = jnp.array([-1.0]), jnp.array([-2.0]), jnp.ones(1)
    value, slope = jax.value_and_grad(lambda x: rl_fn.dppo(x, old, one, threshold=1.0, ratio_cap=2.0).sum())(new)
    np.testing.assert_allclose([value, slope[0]], [-2.0, -2.0], rtol=1e-6)
