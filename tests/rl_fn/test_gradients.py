"""What a gradient is: the slope of the value, or of the surrogate that a function with a stopped gradient declares.

And who has one: no function that a gradient flows through escapes these laws by declaring nothing.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.rl_fn.laws import (
    DETERMINISTIC,
    DIFFERENTIABLE,
    close,
    evaluate,
    function_of_arrays,
    is_array,
    split,
    surrogate,
    weighted,
    weights,
    wide_program,
    widened,
)
from tests.rl_fn.registry import CASES

STEP = 1e-6
SMOOTH = [key for key in DIFFERENTIABLE if CASES[key].surrogate is None]
STOPPED = [key for key in DIFFERENTIABLE if CASES[key].surrogate is not None]


def assert_slope(key, value, arrays):
    """The gradient in a random direction in each argument is the quotient of differences, in float64."""
    rng, positions, program = np.random.default_rng(0), CASES[key].differentiable, wide_program(key)
    still = [np.zeros(arrays[i].shape) for i in positions]
    gradients = program(arrays, still, 0.0)[1]
    for number, (position, got) in enumerate(zip(positions, gradients, strict=True)):
        direction = rng.normal(size=arrays[position].shape)
        up, down = (
            value([direction if i == number else zero for i, zero in enumerate(still)], step) for step in (STEP, -STEP)
        )
        expected = (up - down) / (2 * STEP)
        np.testing.assert_allclose(np.vdot(np.asarray(got), direction), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.long
@pytest.mark.parametrize("key", SMOOTH)
def test_gradient_is_the_difference_quotient(key):
    with jax.enable_x64(True):
        arrays = widened(split(*CASES[key].make(17))[0])
        assert_slope(key, lambda direction, step: wide_program(key)(arrays, direction, step)[0], arrays)


@pytest.mark.parametrize("key", STOPPED)
def test_gradient_is_the_difference_quotient_of_the_surrogate(key):
    with jax.enable_x64(True):
        arrays = widened(split(*CASES[key].make(17))[0])

        def value(direction, step):
            moved = list(arrays)
            for i, x in zip(CASES[key].differentiable, direction, strict=True):
                moved[i] = moved[i] + step * x
            return float(weighted([jnp.asarray(surrogate(key, moved, arrays))]))

        assert_slope(key, value, arrays)


@pytest.mark.parametrize("key", STOPPED)
def test_the_surrogate_has_the_functions_value(key):
    arrays = split(*CASES[key].make(23))[0]
    close(evaluate(key, arrays)[0], [surrogate(key, arrays, arrays)], rtol=5e-5, atol=1e-5)


# A gradient flows through these, and nobody trains through them: what was measured, counted or set.
DATA = {"advantages", "old_logprobs", "proximal_logprobs", "returns", "old_values", "lengths", "margin", "denominator"}
DATA |= {"chosen_lengths", "rejected_lengths", "teacher_logprobs", "chosen_win_rate", "rejected_win_rate"}
DATA |= {"temperature", "t", "p", "penalty", "bias", "lam", "bootstrap", "decay"}
# The maximum in a row's state is held, so the log-probability made of the states alone has a gradient
# (test_logprobs.py); rounding has no slope.
WITHOUT_SLOPE = {("row_state", "logits"), ("quantize_int8", "weight"), ("quantize_fp8", "weight")}
# Another case has the gradient: of distances that do not tie, and of rewards without the mask's dimensions.
ELSEWHERE = {"crowding_distance[ties]", "gdpo_advantages[mask]", "reinforce_pp_baseline_advantages[mask]"}


def undeclared(key):
    """Places among a case's arrays, and names, of the float arrays whose gradient the case does not declare."""
    args, kwargs = CASES[key].make(17)
    parameters = list(inspect.signature(CASES[key].function).parameters)
    declared = {parameters[i] for i in CASES[key].differentiable}
    names = [parameters[i] for i, x in enumerate(args) if is_array(x)] + [k for k, x in kwargs.items() if is_array(x)]
    return {
        i: name
        for i, (name, x) in enumerate(zip(names, split(args, kwargs)[0], strict=True))
        if isinstance(x, np.ndarray) and x.dtype == np.float32
        if name not in DATA | declared and (CASES[key].name, name) not in WITHOUT_SLOPE
    }


@pytest.mark.parametrize("key", [key for key in DETERMINISTIC if key not in ELSEWHERE and undeclared(key)])
def test_what_is_not_declared_has_no_gradient(key):
    """A loss that stops a gradient, and is declared without any, would escape every law about gradients."""
    arrays, call, places = split(*CASES[key].make(17))[0], function_of_arrays(key), undeclared(key)

    def floats_of(*active):
        filled = [active[list(places).index(i)] if i in places else x for i, x in enumerate(arrays)]
        return [x for x in jax.tree.leaves(call(*filled)) if jnp.issubdtype(x.dtype, jnp.floating)]

    floats, pull = jax.vjp(floats_of, *(jnp.asarray(arrays[i]) for i in places))
    for name, gradient in zip(places.values(), pull([weights(x) for x in floats]), strict=True):
        assert not np.asarray(gradient).any(), f"{CASES[key].name} has a gradient in {name}: declare it in the case"


def test_the_exceptions_are_there():
    assert {case.name for case in CASES.values()} >= {name for name, _ in WITHOUT_SLOPE}
    assert set(CASES) >= ELSEWHERE
    named = {p for case in CASES.values() for p in inspect.signature(case.function).parameters}
    assert named >= DATA
