"""Where arguments are equal, as policies are on a first step, the gradient is the function's slope.

A formula written with |x| or max has its kink there, and automatic differentiation takes one side of it: DPO written
with log(1 + e^{−|x|}) had no gradient at all while the policy was its reference.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rl_fn
from tests.rl_fn.jumps import JUMPS, RANKED
from tests.rl_fn.laws import evaluate, split, surrogate
from tests.rl_fn.registry import CASES

STEP = 1e-2
TRIED = [
    (key, constant)
    for key, case in CASES.items()
    for constant in (False, True)
    if case.differentiable and not case.random and case.name not in RANKED and not (constant and case.name in JUMPS)
]


def weighted(leaves):
    """What is cut off, −inf, is so on both sides."""
    floats = [np.where(np.isinf(x), 0.0, x) for x in leaves if x.dtype.kind == "f"]
    return sum(float(np.sum(np.cos(np.arange(x.size)).reshape(x.shape) * x)) for x in floats)


def test_the_exceptions_are_functions():
    assert {case.name for case in CASES.values()} >= JUMPS | RANKED


def test_dpo_learns_from_its_first_pair():
    """At equal policies dL/d(log π_chosen) = −β σ(0) = −β/2."""
    same = jnp.array([-3.0])
    slope = jax.grad(lambda chosen: jnp.sum(rl_fn.dpo(chosen, same, same, same, beta=0.1)))(same)
    np.testing.assert_allclose(slope, [-0.05], rtol=1e-6)


@pytest.mark.parametrize(("key", "constant"), TRIED)
def test_slope_where_arguments_are_equal(key, constant):
    case = CASES[key]
    arrays = split(*case.make(3))[0]
    first = arrays[case.differentiable[0]]
    tied = np.full_like(first, -0.5) if constant else first
    arrays = [tied if x.dtype == np.float32 and x.shape == first.shape else x for x in map(np.asarray, arrays)]
    _, gradients = evaluate(key, arrays)
    rng = np.random.default_rng(0)
    for position, gradient in zip(case.differentiable, gradients, strict=True):
        direction = rng.normal(size=gradient.shape).astype(np.float32)

        def moved(step, at=position, direction=direction):
            return [x + np.float32(step) * direction if i == at else x for i, x in enumerate(arrays)]

        if case.surrogate is None:
            up, down = (weighted(evaluate(key, moved(step))[0]) for step in (STEP, -STEP))
        else:
            up, down = (weighted([surrogate(key, moved(step), arrays)]) for step in (STEP, -STEP))
        slope = (up - down) / (2 * STEP)
        found = float(np.sum(gradient.astype(np.float64) * direction))
        assert found == pytest.approx(slope, rel=2e-2, abs=2e-2), f"argument {position}"
