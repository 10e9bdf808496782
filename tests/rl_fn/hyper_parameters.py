"""Every numeric hyper-parameter by signature, and a call of each function in which they can be varied.

A parameter is numeric if its annotation takes a float or an int. One that takes no array is static, is listed here with
its reason, and says so in its docstring.
"""

import inspect
import types
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rl_fn
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


def numeric_of(name: str) -> dict[str, list[Any]]:
    parameters = inspect.signature(getattr(rl_fn, name)).parameters
    found = {p: _members(x.annotation) for p, x in parameters.items()}
    return {p: members for p, members in found.items() if float in members or int in members}


NUMERIC = {(name, p): members for name in FUNCTIONS for p, members in numeric_of(name).items()}
TRACED = sorted(key for key in NUMERIC if ".".join(key) not in STATIC)
COUNTS = {key for key, members in NUMERIC.items() if float not in members}

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


def call_of(name: str) -> tuple[Any, dict[str, Any], dict[str, Any]]:
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


def other_value(name: str, parameter: str, value: float) -> float:
    if parameter in OTHER and (name, parameter) != ("lagrangian", "start"):
        return OTHER[parameter]
    return 0.1 if value == 0 else 0.9 * value


WITH_NUMBERS = sorted({name for name, _ in TRACED})
