"""Law of shapes, generated over every case: an array of another shape raises ValueError, and never broadcasts.

Installed users have no annotations checked and NumPy's promotion; the functions run here as they do there.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import rl_fn
from tests.rl_fn.hyper_parameters import CONTROLLERS, COUNTS, NUMERIC, TRACED, call_of
from tests.rl_fn.registry import CASES

# Where another shape is legal in a case without other arrays of that axis: the axis, and what may become of it.
EVERY = ("one", "dropped", "longer")
SIZE = ("one", "longer")
FREE: dict[str, dict[int, tuple[str, ...]]] = {
    # The size of the vocabulary.
    "linear_logprobs.weight": {0: SIZE},
    "logits_logprobs.logits": {-1: SIZE},
    "min_p.logits": {-1: SIZE},
    "row_state.logits": {-1: SIZE},
    "temperature.logits": {-1: SIZE},
    "top_k.logits": {-1: SIZE},
    "top_k_distillation.student_logits": {-1: SIZE},
    "top_p.logits": {-1: SIZE},
    # Axes that only this argument has: the group, batches, tokens of the mask, channels.
    "gdpo_advantages.rewards": {0: EVERY, -1: SIZE},
    "reinforce_pp_baseline_advantages.mask": {-1: SIZE},
    "smooth_scales.weight": {0: SIZE},
    # Of three points with three objectives, what is left may be a point.
    "tchebycheff.objectives": {0: EVERY, -1: ("dropped",)},
    "weighted_sum.objectives": {0: EVERY, -1: ("dropped",)},
    # Documented as one greedy answer a group, or one for each answer.
    "remax_advantages.greedy_rewards": {-1: ("dropped",)},
    "remax_advantages.rewards": {-1: EVERY},
    # Documented as `*batch V` or `V`.
    "logits_logprobs.allowed_tokens": {0: ("dropped",)},
    "row_state.allowed_tokens": {0: ("dropped",)},
    # Documented as one per row or one per token.
    "linear_recurrence.decay": {-1: ("dropped",)},
    # Documented as 1 where it repeats, or a channel or a block shares a scale.
    "bradley_terry.margin": {0: ("one",)},
    "dequantize.scale": {0: ("one",)},
    "dequantize.values": {0: ("longer",), -1: SIZE},
    "sppo.chosen_win_rate": {0: ("one",)},
    "sppo.rejected_win_rate": {0: ("one",)},
}
WITHOUT_MEASURE = {"fixed_kl", "scheduled_kl"}  # what is measured does not matter to them


@pytest.fixture
def as_installed() -> Iterator[None]:
    """Nothing but rl_fn itself raises."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def test_the_fixture_leaves_nothing_checked(as_installed):
    assert rl_fn.entropy(jnp.zeros(2, jnp.int32)) > 0
    assert (jnp.ones((2, 3)) + jnp.ones(3, jnp.int32)).shape == (2, 3)


def _changed(x: np.ndarray) -> Iterator[tuple[int, str, np.ndarray]]:
    """Every axis made one, dropped, or longer by one entry."""
    for axis in range(x.ndim):
        if x.shape[axis] != 1:
            yield axis, "one", np.take(x, [0], axis)
        yield axis, "dropped", np.take(x, 0, axis)
        yield axis, "longer", np.concatenate([x, np.take(x, [0], axis)], axis)


def _bound(key: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays of a case, a state's fields by their names, and its other arguments."""
    args, kwargs = CASES[key].make(11)
    bound = dict(inspect.signature(CASES[key].function).bind(*args, **kwargs).arguments)
    if CASES[key].random:
        bound["key"] = jax.random.key(bound["key"])
    arrays: dict[str, np.ndarray] = {}
    for name, x in bound.items():
        if isinstance(x, rl_fn.RowState):
            arrays.update({f"{name}.{field}": np.asarray(y) for field, y in x._asdict().items()})
        elif isinstance(x, np.ndarray) and x.ndim:
            arrays[name] = x
    rest = {name: x for name, x in bound.items() if name not in arrays and not isinstance(x, rl_fn.RowState)}
    return arrays, rest


def _trace(key: str, arrays: dict[str, np.ndarray], rest: dict[str, Any]) -> None:
    def call(arrays: dict[str, Any]) -> Any:
        states = {name.split(".")[0] for name in arrays if "." in name}
        made = {s: rl_fn.RowState(*(arrays[f"{s}.{field}"] for field in rl_fn.RowState._fields)) for s in states}
        plain = {name: x for name, x in arrays.items() if "." not in name}
        return CASES[key].function(**plain, **made, **rest)

    jax.eval_shape(call, arrays)


def _is_free(place: str, x: np.ndarray, axis: int, kind: str, changed: np.ndarray) -> bool:
    """One number in place of one per row is legal too."""
    free = FREE.get(place, {})
    listed = kind in free.get(axis, ()) or kind in free.get(axis - x.ndim, ())
    return listed or (changed.ndim == 0 and tuple(place.split(".")) in NUMERIC)


def _cases() -> dict[str, list[str]]:
    """By function, the cases of several arrays; one of those whose arrays have the same names and shapes."""
    found: dict[str, dict[Any, str]] = {}
    for key in sorted(CASES):
        arrays, _ = _bound(key)
        shapes = tuple(sorted((name, x.shape) for name, x in arrays.items()))
        if len(arrays) > 1:
            found.setdefault(CASES[key].name, {}).setdefault(shapes, key)
    return {name: list(keys.values()) for name, keys in found.items()}


SEVERAL = _cases()


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(SEVERAL))
def test_another_shape_is_refused(name, as_installed):
    accepted, free = [], set()
    for key in SEVERAL[name]:
        arrays, rest = _bound(key)
        _trace(key, arrays, rest)
        for argument, x in arrays.items():
            place = f"{name}.{argument}"
            for axis, kind, changed in _changed(x):
                try:
                    _trace(key, {**arrays, argument: changed}, rest)
                except ValueError as error:
                    said = ("must", "needs", "belong", "vocabulary of")
                    assert any(word in str(error) for word in said), (key, argument, kind, error)
                else:
                    if _is_free(place, x, axis, kind, changed):
                        free.add(place)
                    else:
                        accepted.append(f"{key}: {argument} {x.shape} as {changed.shape}")
    assert accepted == []
    # The list of exceptions cannot outlive their reasons.
    assert {place for place in FREE if place.startswith(f"{name}.")} <= free


@pytest.mark.parametrize("name", sorted({name for name, _ in TRACED}))
def test_a_number_is_no_array(name, as_installed):
    """Seventeen of them belong to no row."""
    call, own, others = call_of(name)
    for p in own:
        many = np.ones(17, np.int32 if (name, p) in COUNTS else np.float32)
        with pytest.raises(ValueError, match="must be a number"):
            call(**{**others, **own, p: many})


@pytest.mark.parametrize("name", sorted(set(CONTROLLERS) - {"lagrangian", *WITHOUT_MEASURE}))
def test_what_is_measured_is_one_number(name, as_installed):
    controller = getattr(rl_fn, name)(**CONTROLLERS[name])
    with pytest.raises(ValueError, match="measured must be one number"):
        controller.update(controller.init(), jnp.ones(2))


def test_a_mask_that_would_repeat_is_refused(as_installed):
    with pytest.raises(ValueError, match=r"mask must have the shape of x, \(2, 3\), got \(2, 1\)"):
        rl_fn.aggregate(jnp.ones((2, 3)), jnp.ones((2, 1), bool), "token-mean")
