"""Laws of hyper-parameters, generated over every signature: each may be traced, mapped and differentiated."""

import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rl_fn
from tests.rl_fn.hyper_parameters import COUNTS, NUMERIC, STATIC, WITH_NUMBERS, call_of, other_value
from tests.rl_fn.laws import close, is_array, quick_jit, weights
from tests.rl_fn.registry import CONSTRUCTORS

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


@pytest.mark.long
@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_traced_mapped_and_differentiated(name):
    """One program: settings under vmap, their gradients, and the same settings as constants."""
    with jax.enable_x64(True):
        call, own, others = call_of(name)
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
            {p: other_value(name, p, x) for p, x in own.items()},
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


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bfloat16", "int32"])
@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_each_alone_in_any_dtype_changes_no_dtype(name, dtype):
    call, own, others = call_of(name)
    arrays = {p: x for p, x in others.items() if is_array(x)}
    rest = {p: x for p, x in others.items() if p not in arrays}
    expected = jax.eval_shape(lambda a: call(**a, **rest, **own), arrays)
    for p in own:
        if (name, p) in COUNTS and dtype != "int32":
            continue
        left = {q: x for q, x in own.items() if q != p}
        one = jax.ShapeDtypeStruct((), jnp.dtype(dtype))
        assert jax.eval_shape(lambda a, x: call(**a, **rest, **left, **{p: x}), arrays, one) == expected, p  # noqa: B023
