"""A NaN in what counts is not hidden: no selection takes it for the other side of a comparison, for 0 or for nothing.

The core's side of "masked NaN is harmless": a run that goes wrong must be seen to go wrong.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import rl_fn
from rl_fn import components
from tests.rl_fn.laws import DETERMINISTIC, DIFFERENTIABLE, evaluate, split
from tests.rl_fn.registry import CASES


def replaced(arrays, position, at, value):
    """The arrays with another value at one place of one of them."""
    changed = np.array(arrays[position])
    changed[at] = value
    return [changed if i == position else x for i, x in enumerate(arrays)]


@pytest.mark.parametrize("key", DIFFERENTIABLE)
def test_not_a_number_where_the_result_depends_on_it_is_in_the_result(key):
    for seed in range(3):
        arrays = split(*CASES[key].make(seed))[0]
        gradients = evaluate(key, arrays)[1]
        for position, gradient in zip(CASES[key].differentiable, gradients, strict=True):
            moving = np.argwhere(gradient != 0)
            if len(moving):
                leaves = evaluate(key, replaced(arrays, position, tuple(moving[seed % len(moving)]), np.nan))[0]
                assert any(np.isnan(x.astype(np.float64)).any() for x in leaves), f"argument {position}, seed {seed}"


# True or False has no third value. Infinite where the student reaches what the teacher cannot, whatever else there is.
# Which tokens clip_cov leaves out, NaN decides as any number would.
OTHERWISE = {"high_entropy_mask", "group_filter", "pareto_mask", "rejection_mask", "top_k_distillation", "clip_cov"}
# Their own number, beside the logits: NaN cuts nothing off.
CUTOFF = {"min_p": 1, "top_p": 1}


@pytest.mark.parametrize("key", [key for key in DETERMINISTIC if CASES[key].name not in OTHERWISE])
def test_not_a_number_in_any_array_is_in_the_result_if_another_number_would_change_it(key):
    for seed in range(2):
        arrays = split(*CASES[key].make(seed))[0]
        rng, before = np.random.default_rng(seed), evaluate(key, arrays)[0]
        floats = [i for i, x in enumerate(arrays) if isinstance(x, np.ndarray) and x.dtype == np.float32 and x.size]
        for position in floats:
            if position == CUTOFF.get(CASES[key].name):
                continue
            at = tuple(rng.integers(size) for size in arrays[position].shape)
            after = evaluate(key, replaced(arrays, position, at, 1.3 * arrays[position][at] + 0.37))[0]
            if any(not np.array_equal(a, b, equal_nan=True) for a, b in zip(before, after, strict=True)):
                leaves = evaluate(key, replaced(arrays, position, at, np.nan))[0]
                assert any(np.isnan(x.astype(np.float64)).any() for x in leaves), f"argument {position}, seed {seed}"


CORRECTIONS = [
    components.TIS(),
    components.IcePop(),
    components.M2POMask(),
    components.Product((components.TIS(), components.M2POMask())),
    components.HighEntropyMask(0.0),
]


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda correction: type(correction).__name__)
@pytest.mark.parametrize("field", ["logprobs", "old_logprobs"])
def test_no_correction_drops_what_is_not_a_number_or_everything_for_it(correction, field):
    """Else the loss is 0, or that of the other tokens, and nothing is skipped."""
    ones = jnp.ones((2, 3))
    fields = {"logprobs": -1.1 * ones, "old_logprobs": -1.0 * ones, "rollout_logprobs": -1.0 * ones, "entropies": ones}
    fields[field] = fields[field].at[0, 1].set(jnp.nan)
    objective = rl_fn.recipes.dapo().replace(correction=correction)
    assert jnp.isnan(objective(rl_fn.Batch(advantages=ones, mask=ones > 0, **fields))[0])


@pytest.mark.parametrize("name", ["logits_logprobs", "linear_logprobs"])
def test_not_a_number_in_logits_stays_in_its_row(name):
    logits = jnp.array([[0.0, 1.0, 2.0], [0.0, jnp.nan, 2.0], [jnp.nan, -jnp.inf, 1.0]])
    arguments = (logits,) if name == "logits_logprobs" else (logits, jnp.eye(3))
    for out in getattr(rl_fn, name)(*arguments, jnp.array([0, 0, 2])):
        assert jnp.isnan(out).tolist() == [False, True, True]
