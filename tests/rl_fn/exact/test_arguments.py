"""Which hyper-parameters are refused, and that the ones on the boundary of what is legal are not."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rl_fn
from tests.rl_fn.ranges import BESIDE, BUILT, RANGES, SAMPLING
from tests.rl_fn.registry import CASES, CONSTRUCTORS

FIRST_CASE = {case.name: key for key, case in reversed(CASES.items())}


def _calls(refused: bool) -> list[Any]:
    rows = [
        pytest.param(name, argument, value, message, id=f"{name}-{argument}-{value}")
        for name, argument, legal, message in RANGES
        for value in legal[0 if refused else 1]
    ]
    return rows


def _call(name: str, argument: str, value: Any) -> Any:
    args, kwargs = CASES[FIRST_CASE[name]].make(0)
    return getattr(rl_fn, name)(*args, **{**kwargs, **BESIDE.get((name, argument), {}), argument: value})


@pytest.mark.parametrize(("name", "argument", "value", "message"), _calls(refused=True))
def test_refused(name, argument, value, message):
    with pytest.raises(ValueError, match=message):
        _call(name, argument, value)


@pytest.mark.parametrize(("name", "argument", "value", "message"), _calls(refused=False))
def test_on_the_boundary_is_accepted(name, argument, value, message):
    """Traced, not computed: what is refused is refused before anything is."""
    assert jax.tree.leaves(jax.eval_shape(lambda: _call(name, argument, value)))


@pytest.mark.parametrize(("name", "others", "argument", "legal", "message"), BUILT)
def test_constructor(name, others, argument, legal, message):
    assert name in CONSTRUCTORS
    for value in legal[0]:
        with pytest.raises(ValueError, match=message):
            getattr(rl_fn, name)(**{**others, argument: value})
    for value in legal[1]:
        assert getattr(rl_fn, name)(**{**others, argument: value}) is not None


ROW = jnp.array([1.0, 0.0, -1.0])


@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_parameter(name):
    others, refused, accepted = SAMPLING[name]
    for value in refused:
        with pytest.raises(ValueError, match="must"):
            getattr(rl_fn, name)(ROW, *others, value)
    for value in accepted:
        assert getattr(rl_fn, name)(ROW, *others, value).shape == (3,)
    with pytest.raises(ValueError, match="one per row"):
        getattr(rl_fn, name)(ROW, *others, jnp.ones(2, jnp.int32 if name == "top_k" else jnp.float32))


def test_shapes_and_modes_are_refused():
    x, mask = jnp.ones((2, 3)), jnp.ones((2, 3), bool)
    with pytest.raises(ValueError, match="mode must be one of"):
        rl_fn.aggregate(x, mask, "mean")
    with pytest.raises(ValueError, match="max_completion_length goes with"):
        rl_fn.aggregate(x, mask, "token-mean", max_completion_length=3)
    with pytest.raises(ValueError, match="max_completion_length goes with"):
        rl_fn.aggregate(x, mask, "seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match="max_completion_length must be positive"):
        rl_fn.aggregate(x, mask, "seq-mean-token-sum-norm", max_completion_length=0)
    assert rl_fn.aggregate(x, mask, "seq-mean-token-sum-norm", max_completion_length=0.5) == 6.0
    with pytest.raises(ValueError, match="prompt-mean needs a group axis"):
        rl_fn.aggregate(x[0], mask[0], "prompt-mean")
    with pytest.raises(ValueError, match="not packed rows"):
        rl_fn.aggregate(x, mask, "prompt-mean", segment_ids=jnp.zeros((2, 3), jnp.int32))
    with pytest.raises(ValueError, match="at least 2"):
        rl_fn.rloo_advantages(x[:, :1])
    assert rl_fn.rloo_advantages(x[:, :2]).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    with pytest.raises(ValueError, match="crowding needs points"):
        rl_fn.crowding_distance(jnp.zeros((0, 2)))
    for maximize in ([True], [True, False, True]):
        with pytest.raises(ValueError, match="maximize must be one flag"):
            rl_fn.pareto_mask(jnp.zeros((3, 2)), maximize=maximize)
    with pytest.raises(ValueError, match="k must be at least 1"):
        rl_fn.pass_at_k(jnp.array([1]), jnp.array([3]), 0)
    for k in (0, 3):
        with pytest.raises(ValueError, match="k must be between 1"):
            rl_fn.passk_analytic_advantages(jnp.array([1.0, 0.0]), k=k)
    for k in (1, 2):
        assert rl_fn.passk_analytic_advantages(jnp.array([1.0, 0.0]), k=k).shape == (2,)
    with pytest.raises(ValueError, match="vocabulary of 2"):
        rl_fn.top_k_distillation(jnp.zeros(2), jnp.zeros(3), jnp.arange(3))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_an_empty_weight_has_no_scale(shape):
    for quantize in (rl_fn.quantize_int8, rl_fn.quantize_fp8):
        with pytest.raises(ValueError, match="weight must not be empty"):
            quantize(jnp.zeros(shape))


def test_an_integer_mask_is_refused():
    with pytest.raises((ValueError, TypeError)):
        rl_fn.masked_sum(jnp.ones(2), jnp.ones(2, jnp.int32))
