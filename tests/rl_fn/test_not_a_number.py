"""A NaN in what counts is not hidden: no selection takes it for the other side of a comparison, for 0 or for nothing.

The core's side of "masked NaN is harmless": a run that goes wrong must be seen to go wrong.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import rl_fn
from tests.rl_fn.laws import DIFFERENTIABLE, evaluate, split
from tests.rl_fn.registry import CASES


def spoiled(arrays, position, at):
    """The arrays with NaN at one place of one of them."""
    changed = np.array(arrays[position])
    changed[at] = np.nan
    return [changed if i == position else x for i, x in enumerate(arrays)]


@pytest.mark.parametrize("key", DIFFERENTIABLE)
def test_not_a_number_where_the_result_depends_on_it_is_in_the_result(key):
    for seed in range(3):
        arrays = split(*CASES[key].make(seed))[0]
        gradients = evaluate(key, arrays)[1]
        for position, gradient in zip(CASES[key].differentiable, gradients, strict=True):
            moving = np.argwhere(gradient != 0)
            if len(moving):
                leaves = evaluate(key, spoiled(arrays, position, tuple(moving[seed % len(moving)])))[0]
                assert any(np.isnan(x.astype(np.float64)).any() for x in leaves), f"argument {position}, seed {seed}"


@pytest.mark.parametrize("name", ["logits_logprobs", "linear_logprobs"])
def test_not_a_number_in_logits_stays_in_its_row(name):
    logits = jnp.array([[0.0, 1.0, 2.0], [0.0, jnp.nan, 2.0], [jnp.nan, -jnp.inf, 1.0]])
    arguments = (logits,) if name == "logits_logprobs" else (logits, jnp.eye(3))
    for out in getattr(rl_fn, name)(*arguments, jnp.array([0, 0, 2])):
        assert jnp.isnan(out).tolist() == [False, True, True]
