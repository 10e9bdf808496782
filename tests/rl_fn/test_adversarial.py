"""Extreme, degenerate and narrow arguments, generated over the registry: values and gradients stay finite."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rl_fn
from tests.rl_fn.extremes import extreme, kind, named
from tests.rl_fn.laws import DETERMINISTIC, DIFFERENTIABLE, evaluate, every_seed, function_of_arrays, quick_jit, split
from tests.rl_fn.narrow_types import computing_in
from tests.rl_fn.registry import CASES, B, G, T

ONE_CASE_EACH = sorted({CASES[key].name: key for key in DETERMINISTIC}.values())

# The paper's formula is a product of two unbounded ratios: finite with the clamps named here, as the docstring tells.
EXPLODES = {"decoupled_ppo": {"weight_cap": 10.0, "dual_clip": 3.0}, "kl_importance_corrected": {"log_clip": 20.0}}
# Infinite by what it returns: an entry cut off, the distance of a front's ends, a KL to what the teacher excludes.
INFINITE = {
    **dict.fromkeys(("crowding_distance", "top_k_distillation"), np.inf),
    **dict.fromkeys(("min_p", "repetition_penalty", "row_state", "temperature", "top_k", "top_p"), -np.inf),
}


@pytest.mark.parametrize("key", sorted(CASES))
def test_every_float_argument_has_extremes(key):
    """A parameter of a new name fails here until tests/rl_fn/extremes.py knows what it may hold."""
    assert [name for name in named(key, *CASES[key].make(0)).values() if kind(name) is None] == []


def finite(x: np.ndarray) -> np.ndarray:
    return np.isfinite(x.astype(np.float64))


@pytest.mark.parametrize("key", [key for key in DETERMINISTIC if CASES[key].name not in EXPLODES])
@every_seed
def test_extreme_arguments_give_finite_values_and_gradients(key, seed):
    leaves, gradients = evaluate(key, split(*extreme(key, seed))[0])
    for x in leaves:
        assert (finite(x) | (x == INFINITE.get(CASES[key].name, 0.0))).all()
    assert all(finite(g).all() for g in gradients)


@pytest.mark.parametrize("name", EXPLODES)
def test_what_explodes_is_documented_and_has_clamps(name):
    call = getattr(rl_fn, name)
    assert "overflow" in call.__doc__ and all(f"{clamp}:" in call.__doc__ for clamp in EXPLODES[name])
    calls = [split(*extreme(name, seed))[0] for seed in range(40)]

    def all_finite(**clamps):
        argnums = CASES[name].differentiable
        program = quick_jit(jax.value_and_grad(lambda *x: jnp.sum(call(*x, **clamps)), argnums=argnums))
        return all(np.isfinite(x).all() for arrays in calls for x in jax.tree.leaves(program(*arrays)))

    assert not all_finite()
    assert all_finite(**EXPLODES[name])


@pytest.mark.parametrize("key", DIFFERENTIABLE)
def test_a_huge_weight_upstream_scales_the_gradient(key):
    """No branch that is not taken turns the weight into ∞ · 0."""
    for seed in range(3):
        arrays = split(*CASES[key].make(seed))[0]
        ordinary, scaled = evaluate(key, arrays)[1], evaluate(key, arrays, 2.0**100)[1]
        for a, b in zip(ordinary, scaled, strict=True):
            np.testing.assert_allclose(b / np.float32(2.0**100), a, rtol=1e-4, atol=1e-6)


# A RowState is float32 by its making.
ROW_STATES = {"merge_row_states", "finalize_row_state"}


@pytest.mark.parametrize("narrow", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("key", [key for key in ONE_CASE_EACH if CASES[key].name not in ROW_STATES])
def test_narrow_input_is_widened_before_anything_is_computed(key, narrow):
    arrays, _ = split(*CASES[key].make(19))
    assert all(isinstance(x, np.ndarray | np.generic) for x in arrays)
    dtype = jnp.dtype(narrow)
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, dtype if x.dtype == np.float32 else x.dtype), arrays
    )
    closed, out = jax.make_jaxpr(function_of_arrays(key), return_shape=True)(*arguments)
    assert computing_in(closed.jaxpr, dtype) == set()
    assert all(x.dtype != dtype for x in jax.tree.leaves(out))


def test_the_search_for_narrow_arithmetic_finds_it():
    half = jnp.ones(3, jnp.float16)
    assert computing_in(jax.make_jaxpr(jax.jit(lambda x: x * x))(half).jaxpr, jnp.dtype(jnp.float16)) == {"mul"}
    byte, take = jnp.ones(3, jnp.uint8), lambda x, i: jax.lax.dynamic_index_in_dim(x, i, keepdims=False)
    assert computing_in(jax.make_jaxpr(take)(byte, 1).jaxpr, jnp.dtype(jnp.uint8)) == set()
    assert "dynamic_slice" in computing_in(jax.make_jaxpr(take)(half, jnp.uint8(1)).jaxpr, jnp.dtype(jnp.uint8))


# Sizes tell the axes apart. These have an axis of the same size that is another one.
NOT_A_BATCH = {"weights": {"weighted_sum", "tchebycheff"}, "ideal": {"tchebycheff"}}


def _cut(key: str, size: int, to: int):
    """The arrays of a call with every axis of one size cut down."""
    args, kwargs = CASES[key].make(29)
    parameters = list(inspect.signature(CASES[key].function).parameters)

    def shrink(x, name):
        if not isinstance(x, np.ndarray) or CASES[key].name in NOT_A_BATCH.get(name, ()):
            return x
        axes = [i for i, n in enumerate(x.shape) if n == size and (size != B or i == 0)]
        return x[tuple(slice(to) if i in axes else slice(None) for i in range(x.ndim))]

    args = tuple(shrink(x, name) for x, name in zip(args, parameters, strict=False))
    return split(args, {k: shrink(x, k) for k, x in kwargs.items()})[0]


def _has_axis(key: str, size: int) -> bool:
    return any(
        x.shape != y.shape for x, y in zip(_leaves(_cut(key, size, 1)), _leaves(_cut(key, size, size)), strict=True)
    )


_leaves = functools.partial(jax.tree.leaves)


EMPTY = {"no rows": B, "no tokens": T}


@pytest.mark.parametrize(
    ("key", "size"),
    [
        pytest.param(key, size, id=f"{key}-{name}")
        for key in ONE_CASE_EACH
        for name, size in EMPTY.items()
        if _has_axis(key, size)
    ],
)
def test_nothing_at_all_is_finite(key, size):
    leaves, gradients = evaluate(key, _cut(key, size, 0))
    assert all(finite(x).all() for x in (*leaves, *gradients))


GROUPED = [key for key in DETERMINISTIC if "rewards" in named(key, *CASES[key].make(0)).values() and _has_axis(key, G)]
# Leave-one-out of one answer, and the best of two of one, have no meaning.
NEED_TWO = {"rloo_advantages", "passk_analytic_advantages"}


@pytest.mark.parametrize("key", GROUPED)
def test_a_group_of_one_is_finite_or_refused(key):
    arrays = _cut(key, G, 1)
    if CASES[key].name in NEED_TWO and "[1]" not in key:
        with pytest.raises(ValueError, match="got"):
            evaluate(key, arrays)
    else:
        leaves, gradients = evaluate(key, arrays)
        assert all(finite(x).all() for x in (*leaves, *gradients))


# What becomes of advantages when all rewards are moved by the same number, and when all are multiplied by one: "same",
# "scaled", or "else" where the paper's formula is neither. With eps = 0, which is legal everywhere.
BEHAVIOUR = {
    "grpo_advantages": ("same", "same"),
    "leave_one_out_std_advantages": ("same", "same"),
    "whiten": ("same", "same"),
    "rloo_advantages": ("same", "scaled"),
    "opo_advantages": ("same", "scaled"),
    "gpg_advantages": ("same", "scaled"),
    "remax_advantages": ("same", "scaled"),
    "maxrl_advantages": ("else", "same"),
    "reinforce_pp_advantages": ("else", "same"),
    "reinforce_pp_baseline_advantages": ("same", "same"),
    "gdpo_advantages": ("same", "same"),
    "passk_advantages": ("same", "same"),
    "passk_analytic_advantages": ("same", "same"),
    "optimal_token_baseline_advantages": ("else", "scaled"),
    "step_group_advantages": ("else", "same"),
}
# Not of rewards alone: a critic, a teacher or importance weights come in.
OTHERS = {"clipped_importance_advantages", "distillation_advantages"}
FAR, SMALL = 1e4, 2.0**-10


def test_every_advantage_is_classified():
    names = {name for name in rl_fn.__all__ if name.endswith("_advantages")} | {"whiten"}
    assert names == OTHERS | set(BEHAVIOUR)


def _of_rewards(name, change):
    """The advantages of rewards that floats hold exactly, even far from 0, after a change; eps = 0."""
    args, kwargs = CASES[name].make(31)
    values = [np.arange(x.size).reshape(x.shape) > 0 if getattr(x, "dtype", None) == np.bool_ else x for x in args]
    for place, parameter in named(name, args, kwargs).items():
        if parameter == "x" or parameter.endswith("rewards"):
            values[place] = change(np.round(args[place] * 64) / np.float32(64)).astype(np.float32)
    call = CASES[name].function
    eps = {"eps": 0.0} if "eps" in inspect.signature(call).parameters else {}
    return jax.tree.leaves(jax.jit(functools.partial(call, **{**kwargs, **eps}))(*values))[0]


@pytest.mark.parametrize("name", BEHAVIOUR)
def test_normalised_advantages_know_neither_offset_nor_scale(name):
    """Float32 rounding is all that 10⁴ more, or a thousandth, may cost."""
    plain = _of_rewards(name, lambda r: r)
    moved, small = _of_rewards(name, lambda r: r + FAR), _of_rewards(name, lambda r: r * SMALL)
    shift, scale = BEHAVIOUR[name]
    assert np.abs(plain).max() > 0
    if shift == "same":
        np.testing.assert_allclose(moved, plain, rtol=1e-5, atol=1e-5)
    if scale == "same":
        np.testing.assert_allclose(small, plain, rtol=1e-5, atol=1e-5)
    if scale == "scaled":
        np.testing.assert_allclose(small / SMALL, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [name for name, (shift, _) in BEHAVIOUR.items() if shift == "same"])
def test_equal_rewards_have_no_advantage(name):
    assert (_of_rewards(name, lambda r: np.full_like(r, 0.7)) == 0).all()


# π has cut off a token that another policy sampled: its ratio is 0. (Where log π itself is the loss, it is infinite.)
EXCLUDED = ("ppo_clip", "clipped_tokens", "decoupled_ppo", "dppo[tv]", "dppo[kl]", "dppo[cap]", "sapo", "gspo_token")
EXCLUDED += ("truncated_importance_weights[token]", "masked_importance_weights[token]")


@pytest.mark.parametrize("key", EXCLUDED)
def test_a_token_that_the_policy_excludes_has_ratio_zero(key):
    args, kwargs = CASES[key].make(37)
    names = named(key, args, kwargs)
    place = min(p for p, n in names.items() if n in ("logprobs", "log_ratios"))
    values = [
        np.where(np.arange(T) == 2, -np.inf, x).astype(np.float32) if i == place else x for i, x in enumerate(args)
    ]
    leaves, gradients = evaluate(key, split(tuple(values), kwargs)[0])
    assert all(finite(g).all() for g in gradients)
    assert all(finite(x).all() for x in leaves)


@pytest.mark.parametrize("key", sorted(key for key in CASES if CASES[key].name in {"aggregate", "aggregate_parts"}))
def test_rows_of_no_tokens_aggregate_to_zero(key):
    """Every mode, packed too; the case of each function alone that has segments did not see this."""
    leaves, gradients = evaluate(key, _cut(key, T, 0))
    assert all(finite(x).all() for x in (*leaves, *gradients))
