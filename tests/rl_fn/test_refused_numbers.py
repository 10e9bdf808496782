"""Laws of numbers that are not legal, generated over every signature: each is refused with its value."""

import math
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import rl_fn
from tests.rl_fn.hyper_parameters import COUNTS, TRACED, WITH_NUMBERS, call_of, numeric_of
from tests.rl_fn.ranges import BESIDE, BUILT, RANGES, SAMPLING

# Refused by a function that this one calls, or together with the parameter that ranges.py has a range for.
PASSED_ON = {
    "adaptive_entropy.high": -0.1,
    "aggregate.max_completion_length": 0.0,
    "aggregate_parts.max_completion_length": 0.0,
    "clip_cov.clip_high": -0.01,
    "clip_cov.clip_low": -0.01,
    "exponential_kl.high": 0.1,
    "lagrangian.high": 0.1,
    "linear_kl.high": 0.1,
    "masked_importance_weights.high": 0.3,
    "optimal_token_baseline_advantages.gamma": 1.5,
    "overlong_penalty.max_length": -1.0,
    "reinforce_pp_advantages.eps": -0.1,
    "reinforce_pp_advantages.gamma": 1.5,
    "reinforce_pp_baseline_advantages.eps": -0.1,
    "sample.min_p": 1.5,
    "sample.temperature": -1.0,
    "sample.top_k": 0,
    "sample.top_p": 0.0,
    "step_group_advantages.gamma": 1.5,
}


def _refused() -> list[Any]:
    """Every number that is refused somewhere: the function, its parameter, the number, the other arguments."""
    rows = [(name, p, value, None) for name, p, legal, _ in RANGES for value in legal[0]]
    rows += [(name, p, value, others) for name, others, p, legal, _ in BUILT for value in legal[0]]
    rows += [(name, list(numeric_of(name))[-1], value, None) for name in SAMPLING for value in SAMPLING[name][1]]
    rows += [(*place.split("."), value, None) for place, value in PASSED_ON.items()]
    return [row for row in rows if isinstance(row[2], float | int) and (row[0], row[1]) in TRACED]


def _with(name: str, parameter: str, value: Any, others: dict[str, Any] | None) -> Any:
    if others is not None:
        return getattr(rl_fn, name)(**{**others, parameter: value})
    call, own, rest = call_of(name)
    key = (name, parameter)
    return call(**{**rest, **own, **BESIDE.get(key, {}), parameter: value})


REFUSED = _refused()


@pytest.mark.parametrize("name", sorted({row[0] for row in REFUSED}))
def test_numpy_and_array_numbers_are_refused_as_python_numbers_are(name):
    for _, parameter, value, others in (row for row in REFUSED if row[0] == name):
        kinds: list[Any] = [np.int64, np.int32] if isinstance(value, int) else [np.float64, np.float32]
        for kind in (*kinds, np.array, jnp.asarray):
            with pytest.raises(ValueError) as raised:
                _with(name, parameter, kind(value), others)
            named = [float(x) for x in re.findall(r"-?[0-9.]*[0-9](?:e-?[0-9]+)?|inf", str(raised.value))]
            assert np.isclose(named, value).any(), str(raised.value)


@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_not_a_number_is_refused(name):
    call, own, rest = call_of(name)
    for p in own:
        for nan in (math.nan, np.float32("nan"), np.float64("nan")):
            if (name, p) not in COUNTS:
                with pytest.raises(ValueError, match="nan"):
                    call(**{**rest, **own, p: nan})


# Any number is legal.
UNBOUNDED = {
    "aggregate.denominator",
    "bco.delta",
    "bradley_terry.margin",
    "clip_cov.cov_high",
    "gae.bootstrap",
    "group_filter.high",
    "kto.kl",
    "length_adaptive_lambda.minimum",
    "linear_recurrence.decay",
    "linear_recurrence.init",
    "n_step.bootstrap",
    "off_policy_sequence_mask.threshold",
    "retrace.bootstrap",
    "row_state.start",
    "simpo.gamma",
    "step_group_advantages.weight",
    "td_lambda.bootstrap",
    "tpo.gamma",
    "vtrace.bootstrap",
}


def test_every_number_has_a_range_or_is_listed_as_unbounded():
    ranged = {f"{name}.{p}" for name, p, _, _ in REFUSED}
    missing = {".".join(key) for key in TRACED} - ranged - UNBOUNDED
    assert missing == set()
    assert ranged & UNBOUNDED == set()
