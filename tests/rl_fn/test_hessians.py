"""Where arguments are equal, as policies are on a first step, second derivatives are those of the formula.

A softplus written with max(x, 0) and |x| may have the right slope at 0, and there a curvature of 0 instead of ¼.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rl_fn
from tests.rl_fn.jumps import JUMPS, RANKED
from tests.rl_fn.laws import split, wide_program, widened
from tests.rl_fn.registry import CASES

# |x| has a kink where its argument is 0; a spread of nothing has one too.
KINKS = {"kl_abs", "kl_cov", "total_variation", "tchebycheff"}
# Which arguments are set to which: the policy is its own reference, or both responses of a pair are one.
EQUAL = {
    "reference": {"ref_chosen": "chosen", "ref_rejected": "rejected", "ref_logprobs": "logprobs"},
    "pair": {"rejected": "chosen", "ref_rejected": "ref_chosen"},
}
TIES = ("all", "constant", *EQUAL)
# What goes by rank has a curvature where the ranks are clear.
CLEAR_RANKS = {("aot", "reference"), ("aot_unpaired", "pair")}


def _tied(key, how):
    """The arrays of a call in which equal arguments meet; None where no two arguments can be equal."""
    case = CASES[key]
    args, kwargs = case.make(3)
    if how in EQUAL:
        given = dict(zip(inspect.signature(case.function).parameters, args, strict=False))
        changed = {name: given.get(EQUAL[how].get(name, ""), x) for name, x in given.items()}
        same = all(changed[name] is x for name, x in given.items())
        return None if same else split(tuple(changed.values()), kwargs)[0]
    arrays = split(args, kwargs)[0]
    first = arrays[case.differentiable[0]]
    tied = np.full_like(first, -0.5) if how == "constant" else first
    return [tied if x.dtype == np.float32 and x.shape == first.shape else x for x in map(np.asarray, arrays)]


def _smooth_there(key, how):
    case = CASES[key]
    if not case.differentiable or case.random or case.surrogate is not None or case.name in KINKS:
        return False
    if case.name in RANKED:
        return (case.name, how) in CLEAR_RANKS
    return not (how == "constant" and case.name in JUMPS) and _tied(key, how) is not None


@pytest.mark.parametrize(("key", "how"), [(key, how) for key in CASES for how in TIES if _smooth_there(key, how)])
def test_the_curvature_where_arguments_are_equal(key, how):
    with jax.enable_x64(True):
        arrays = widened(_tied(key, how) or [])
        rng = np.random.default_rng(0)
        direction = [rng.normal(size=arrays[i].shape) for i in CASES[key].differentiable]
        program = wide_program(key)
        up, down = (program(arrays, direction, step)[1] for step in (1e-5, -1e-5))
        curvature = program(arrays, direction, 0.0)[2]
        for a, b, found in zip(up, down, curvature, strict=True):
            np.testing.assert_allclose(found, (a - b) / 2e-5, rtol=1e-4, atol=1e-5)


def test_the_exceptions_are_functions():
    assert {case.name for case in CASES.values()} >= KINKS


def test_dpo_is_curved_at_its_first_pair():
    """d²L/d(log π)² = β² σ(0) σ(0) = β²/4."""
    same = jnp.array(-3.0)
    curvature = jax.grad(jax.grad(lambda chosen: rl_fn.dpo(chosen, same, same, same, beta=0.1)))(same)
    np.testing.assert_allclose(curvature, 0.0025, rtol=1e-6)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: rl_fn.simpo(x, jnp.zeros(1), beta=2.0, gamma=1.0),
        lambda x: rl_fn.tpo(x, jnp.zeros(1), x, beta=2.0, gamma=1.0),
        lambda x: rl_fn.bradley_terry(2.0 * x, jnp.zeros(1), margin=1.0),
    ],
    ids=["simpo", "tpo", "bradley_terry"],
)
def test_at_the_margin_the_curvature_of_the_logistic_loss_is_a_quarter(loss):
    curvature = jax.grad(jax.grad(lambda x: jnp.sum(loss(x[None]))))(jnp.array(0.5))
    np.testing.assert_allclose(curvature, 4.0 * 0.25, rtol=1e-6)


def test_the_huber_loss_is_curved_at_its_minimum():
    curve = jax.grad(jax.grad(lambda v: jnp.sum(rl_fn.value_huber(v[None], jnp.zeros(1), delta=0.5))))
    assert [float(curve(jnp.array(v))) for v in (-1.0, 0.0, 0.3, 1.0)] == [0.0, 1.0, 1.0, 0.0]
