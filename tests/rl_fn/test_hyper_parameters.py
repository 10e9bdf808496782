"""Laws of hyper-parameters, generated over every signature: each may be traced, or is refused when it is not legal.

A parameter is numeric if its annotation takes a float or an int. One that takes no array is static, is listed here with
its reason, and says so in its docstring.
"""

import inspect
import math
import re
import types
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rl_fn
from tests.rl_fn.exact.test_arguments import BESIDE, BUILT, RANGES, SAMPLING
from tests.rl_fn.laws import close, is_array, quick_jit, weights
from tests.rl_fn.registry import CASES, CONSTRUCTORS, HOST

FUNCTIONS = sorted(n for n in rl_fn.__all__ if inspect.isfunction(getattr(rl_fn, n)) and n not in HOST)
STATIC = {
    "n_step.n": "the number of compositions that are written out",
    "passk_analytic_advantages.k": "the number of factors of a product, and the size that a group must have",
    "pass_at_k.k": "the number of factors of a product",
    "linear_logprobs.chunk": "the shape of a tile",
    "quantize_fp8.block": "the shape of a block",
    "dequantize.block": "the shape of a block",
    "quantize_int8.axis": "an axis",
    "masked_sum.axis": "an axis",
    "masked_mean.axis": "an axis",
    "masked_var.axis": "an axis",
    "pareto_archive.capacity": "the shape of the state",
    "pareto_archive.objectives": "the shape of the state",
}


def _members(annotation: Any) -> list[Any]:
    inner = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return [m for part in typing.get_args(annotation) for m in _members(part)] if inner else [annotation]


def _numeric(name: str) -> dict[str, list[Any]]:
    parameters = inspect.signature(getattr(rl_fn, name)).parameters
    found = {p: _members(x.annotation) for p, x in parameters.items()}
    return {p: members for p, members in found.items() if float in members or int in members}


NUMERIC = {(name, p): members for name in FUNCTIONS for p, members in _numeric(name).items()}
TRACED = sorted(key for key in NUMERIC if ".".join(key) not in STATIC)
COUNTS = {key for key, members in NUMERIC.items() if float not in members}


def test_what_takes_no_array_is_listed_and_says_so():
    takes_none = {
        ".".join(key) for key, members in NUMERIC.items() if not any(hasattr(m, "array_type") for m in members)
    }
    assert takes_none == set(STATIC)
    for place in STATIC:
        name, parameter = place.split(".")
        lines = (inspect.getdoc(getattr(rl_fn, name)) or "").split("Args:")[1].split("Returns:")[0].splitlines()
        at = next(i for i, line in enumerate(lines) if line.strip().startswith(f"{parameter}:"))
        entry = " ".join([lines[at], *(x for x in lines[at + 1 : at + 3] if x.startswith(" " * 8))])
        assert "static" in entry, place


# -- traced equals concrete ----------------------------------------------------------------------------------------

# Where a parameter is None by default and no case sets it, or the other value of the law is not 9/10 of it.
VALUES = {
    "dual_clip": 3.0,
    "weight_cap": 1.2,
    "clip_low": 0.2,
    "ratio_cap": 1.5,
    "log_clip": 1.5,
    "clip": 0.5,
    "softcap": 5.0,
    "minimum": 0.1,
    "denominator": 40.0,
    "max_completion_length": 16.0,
}
OTHER = {"up": 1.1, "half_range": 127.25, "top_k": 5, "k": 3, "start": 2, "steps": 12, "warmup": 4, "penalty": 0.8}
BASE = {
    "aggregate": "aggregate[seq-mean-token-sum-norm]",
    "aggregate_parts": "aggregate_parts[seq-mean-token-sum-norm]",
    "f_dpo": "f_dpo[alpha]",
    "kl_cov": "kl_cov[fraction]",
    "clip_cov": "clip_cov[fraction]",
    "length_adaptive_lambda": "length_adaptive_lambda[bounded]",
    "overlong_penalty": "overlong_penalty[real]",
}
# Branches and limits that the values of the cases do not reach.
ENDS: dict[str, list[dict[str, float]]] = {
    "gkd": [{"beta": 0.0}, {"beta": 1.0}],
    "top_k_distillation": [{"beta": 0.0}, {"beta": 1.0}],
    "f_dpo": [{"alpha": 0.0}, {"alpha": 1e-4}, {"alpha": 1.0}],
    "overlong_penalty": [{"buffer": 0.0}],
    "clip_cov": [{"fraction": 0.0}],
    "kl_cov": [{"fraction": 0.0}, {"fraction": 1.0}],
    "vtrace": [{"lam": 1.0, "rho_clip": 1.0, "c_clip": 1.0}],
    "whiten": [{"eps": 0.0}],
    "grpo_advantages": [{"eps": 0.0}],
    "lagrangian": [{"penalty": 0.0}],
    "temperature": [{"t": 0.0}],
    "top_p": [{"p": 1.0}],
    "min_p": [{"p": 0.0}],
    "masked_var": [{"ddof": 0}],
}
# A weight without gradient by its paper has none with respect to its constants either: finite is all that is asked.
STOPPED = {
    "bco": {"delta"},
    "cispo": {"clip_high", "clip_low"},
    "clipped_importance_advantages": {"clip_low", "clip_high"},
    "decoupled_ppo": {"weight_cap"},
    "kto": {"kl"},
    "masked_importance_weights": {"low", "high"},
    "retrace": {"lam", "c_clip"},
    "truncated_importance_weights": {"cap"},
    "vespo": {"k_pos", "lambda_pos", "k_neg", "lambda_neg"},
}
NO_QUOTIENT = {
    "quantize_int8": "its arithmetic is float32's",
    "row_state": "the maximum is held constant: the final log-probability alone has a gradient",
    **dict.fromkeys(CONSTRUCTORS, "their states are float32"),
}
SMALL = 1e-6
CONTROLLERS: dict[str, dict[str, Any]] = {
    "fixed_kl": {"coef": 0.2},
    "exponential_kl": {"target": 0.1},
    "linear_kl": {"target": 0.1, "horizon": 10.0, "samples": 2.0},
    "pid_kl": {"target": 0.1, "kd": 0.05},
    "adaptive_entropy": {"target": 0.1, "coef": 0.3},
    "scheduled_kl": {"kind": "warmup_cosine", "start": 0.4, "end": 0.1, "steps": 8, "warmup": 2},
    "lagrangian": {"limits": (0.1, 0.3), "directions": ("<=", ">="), "lr": 0.5, "penalty": 0.7, "start": 0.2},
}
MEASURED = (0.3, 0.02, 0.11, 0.4)


def _controlled(name: str, **arguments: Any) -> list[Any]:
    """What a controller becomes: its states under a few measurements."""
    made = getattr(rl_fn, name)(**arguments)
    state = made.init()
    states = [state]
    for measured in MEASURED:
        if name == "lagrangian":
            constraints = jnp.array([measured, 0.25], jnp.float32)
            states.append(made.loss(state, jnp.float32(1.0), constraints))
            state = made.update(state, constraints)
        else:
            state = made.update(state, jnp.float32(measured))
        states.append(state)
    return states


def _call(name: str) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The function by keywords, its numeric parameters that may be traced, and its other arguments."""
    function = getattr(rl_fn, name)
    numeric = [p for n, p in TRACED if n == name]
    if name in CONSTRUCTORS:
        bound: dict[str, Any] = dict(CONTROLLERS[name])

        def call(**arguments: Any) -> Any:
            return _controlled(name, **arguments)

    else:
        keys = [key for key in CASES if CASES[key].name == name and "packed" not in key]
        set_by = {key: len(set(numeric) & set(CASES[key].make(0)[1])) for key in keys}
        args, kwargs = CASES[BASE.get(name, max(keys, key=lambda key: set_by[key]))].make(7)
        bound = dict(inspect.signature(function).bind(*args, **kwargs).arguments)
        if CASES[keys[0]].random:
            bound["key"] = jax.random.key(bound["key"])
        call = function
    defaults = {p: x.default for p, x in inspect.signature(function).parameters.items()}
    own = {}
    for p in numeric:
        value = bound.get(p, defaults[p])
        value = VALUES[p] if value is None else value
        own[p] = VALUES.get(p, 0.3) if np.ndim(value) else np.asarray(value).item()
    return call, own, {p: x for p, x in bound.items() if p not in own}


def _other(name: str, parameter: str, value: float) -> float:
    if parameter in OTHER and (name, parameter) != ("lagrangian", "start"):
        return OTHER[parameter]
    return 0.1 if value == 0 else 0.9 * value


WITH_NUMBERS = sorted({name for name, _ in TRACED})


@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_traced_mapped_and_differentiated(name):
    """One program: settings under vmap, their gradients, and the same settings as constants."""
    with jax.enable_x64(True):
        call, own, others = _call(name)
        wide = {
            p: jnp.asarray(x, jnp.float64) if getattr(x, "dtype", None) == np.float32 or p == "lengths" else x
            for p, x in others.items()
        }
        real = [p for p in own if (name, p) not in COUNTS and p not in STOPPED.get(name, ())]
        directions = dict(zip(real, np.cos(np.arange(len(real))), strict=True))
        moved = [
            {p: x + sign * SMALL * x * directions.get(p, 0.0) if math.isfinite(x) else x for p, x in own.items()}
            for sign in (1, -1)
        ]
        concrete = [
            own,
            {p: _other(name, p, x) for p, x in own.items()},
            *({**own, **end} for end in ENDS.get(name, [])),
        ]
        settings = [*concrete, *moved]
        stacked = {p: np.array([s[p] for s in settings], np.int32 if (name, p) in COUNTS else np.float64) for p in own}

        def floats(parameters: dict[str, Any], counts: dict[str, Any]) -> tuple[Any, Any]:
            leaves = jax.tree.leaves(call(**wide, **parameters, **counts))
            smooth = [jnp.where(jnp.isfinite(x), x, 0.0) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
            total = [jnp.sum(weights(x) * x) for x in smooth]
            return sum((x.astype(jnp.float64) for x in total), jnp.zeros((), jnp.float64)), leaves

        def program(stacked: dict[str, Any]) -> Any:
            counts = {p: x for p, x in stacked.items() if (name, p) in COUNTS}
            reals = {p: x for p, x in stacked.items() if p not in counts}
            traced = jax.vmap(jax.value_and_grad(floats, has_aux=True))(reals, counts)
            return traced, [jax.tree.leaves(call(**wide, **setting)) for setting in concrete]

        ((totals, leaves), gradients), constants = jax.tree.map(np.asarray, quick_jit(program)(stacked))
    tolerance = {"rtol": 2e-5, "atol": 1e-6} if name in CONSTRUCTORS else {"rtol": 1e-9, "atol": 1e-10}
    for i, expected in enumerate(constants):
        assert [x.dtype for x in leaves] == [x.dtype for x in expected]
        close([x[i] for x in leaves], expected, **tolerance)
    for p, gradient in gradients.items():
        finite = np.isfinite(stacked[p])
        assert np.isfinite(np.asarray(gradient)[finite]).all(), (p, gradient)
    if name not in NO_QUOTIENT:
        slope = sum(gradients[p][0] * own[p] * directions[p] for p in real if math.isfinite(own[p]))
        quotient = (totals[-2] - totals[-1]) / (2 * SMALL)
        np.testing.assert_allclose(slope, quotient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", ["bfloat16", "int32"])
@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_each_alone_in_any_dtype_changes_no_dtype(name, dtype):
    call, own, others = _call(name)
    arrays = {p: x for p, x in others.items() if is_array(x)}
    rest = {p: x for p, x in others.items() if p not in arrays}
    expected = jax.eval_shape(lambda a: call(**a, **rest, **own), arrays)
    for p in own:
        if (name, p) in COUNTS and dtype != "int32":
            continue
        left = {q: x for q, x in own.items() if q != p}
        one = jax.ShapeDtypeStruct((), jnp.dtype(dtype))
        assert jax.eval_shape(lambda a, x: call(**a, **rest, **left, **{p: x}), arrays, one) == expected, p  # noqa: B023


# -- refused -------------------------------------------------------------------------------------------------------


# Refused by a function that this one calls, or together with the parameter that exact/test_arguments.py varies.
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
    rows += [(name, list(_numeric(name))[-1], value, None) for name in SAMPLING for value in SAMPLING[name][1]]
    rows += [(*place.split("."), value, None) for place, value in PASSED_ON.items()]
    return [row for row in rows if isinstance(row[2], float | int) and (row[0], row[1]) in TRACED]


def _with(name: str, parameter: str, value: Any, others: dict[str, Any] | None) -> Any:
    if others is not None:
        return getattr(rl_fn, name)(**{**others, parameter: value})
    call, own, rest = _call(name)
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
    call, own, rest = _call(name)
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
    "sppo.chosen_win_rate",
    "sppo.rejected_win_rate",
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
