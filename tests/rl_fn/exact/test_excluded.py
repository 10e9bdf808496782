"""Tokens that one distribution excludes: a logit of −∞, a probability that underflows, a tail with nothing in it."""

import jax
import jax.numpy as jnp
import pytest

import rl_fn

INF = jnp.inf


def test_what_underflows_costs_nothing_even_where_it_is_excluded():
    assert rl_fn.gkd(jnp.array([0.0, -INF]), jnp.array([0.0, -200.0]), beta=0.0) == 0.0
    assert rl_fn.gkd(jnp.array([0.0, -INF]), jnp.array([0.0, 1.0]), beta=0.0) == INF


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_divergences_of_disjoint_rows_have_finite_gradients(beta):
    student, teacher = jnp.array([0.0, -INF, 1.0]), jnp.array([-INF, 0.0, 1.0])
    for first, second in ((student, teacher), (teacher, student)):
        assert jnp.isfinite(jax.grad(lambda s, t=second: rl_fn.gkd(s, t, beta=beta))(first)).all()
        assert jnp.isfinite(jax.grad(lambda t, s=first: rl_fn.gkd(s, t, beta=beta))(second)).all()


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_tail_with_nothing_in_it(beta):
    """Equal halves on the reported tokens and nothing beside them, for student and teacher: no divergence."""
    student, half = jnp.array([0.0, 0.0, -INF]), jnp.log(jnp.array([0.5, 0.5]))

    def loss(s):
        return rl_fn.top_k_distillation(s, half, jnp.array([0, 1]), beta=beta)

    value, gradient = jax.value_and_grad(loss)(student)
    assert abs(float(value)) < 1e-7 and jnp.isfinite(gradient).all()


def test_top_k_of_one_row_and_of_a_stack():
    student = jnp.array([[[0.5, 1.0, -1.0, 0.0], [0.0, 2.0, 1.0, -1.0]]])
    ids = jnp.array([[[1, 3], [0, 2]]])
    teacher = jnp.log(jnp.array([[[0.5, 0.25], [0.5, 0.125]]]))
    stacked = rl_fn.top_k_distillation(student, teacher, ids)
    rows = [rl_fn.top_k_distillation(student[0, i], teacher[0, i], ids[0, i]) for i in range(2)]
    assert jnp.allclose(stacked[0], jnp.array(rows), rtol=1e-6) and stacked.shape == (1, 2)
