"""Ids and counts of any integer type give the numbers of int32: sizes never wrap around in a narrow type."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rl_fn
from tests.rl_fn.laws import close, function_of_arrays, quick_jit, split, values
from tests.rl_fn.narrow_types import computing_in
from tests.rl_fn.registry import CASES, HOST, Draw, G, T, V

NARROW = (np.int8, np.uint8, np.int16, np.uint16, np.uint32)
DTYPES = (*NARROW, np.int64, np.uint64)
# Axes longer than a narrow type can count: tokens and groups, and the vocabulary.
REPEATS = {T: 40, V: 25, 2 * G: 33}


def is_integer(x) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.kind in "iu"


def integer_places(key: str) -> tuple[int, ...]:
    return tuple(i for i, x in enumerate(split(*CASES[key].make(0))[0]) if is_integer(x))


def _one_case_for_every_parameter() -> list[str]:
    found = {}
    for key in sorted(CASES):
        if integer_places(key):
            names = tuple(sorted(k for k, x in CASES[key].make(0)[1].items() if is_integer(x)))
            found.setdefault((CASES[key].name, integer_places(key), names), key)
    return list(found.values())


TAKE_INTEGERS = _one_case_for_every_parameter()


def lengthened(x):
    for axis, size in enumerate(np.shape(x)):
        x = np.concatenate([x] * REPEATS.get(size, 1), axis=axis)
    return x


def retyped(arrays, places, dtype):
    return [x.astype(dtype) if i in places else x for i, x in enumerate(arrays)]


def types_that_hold(arrays, places, dtypes):
    ids = np.concatenate([arrays[i].ravel() for i in places])
    return [d for d in dtypes if np.iinfo(d).min <= ids.min() and ids.max() <= np.iinfo(d).max]


@pytest.mark.long
@pytest.mark.parametrize("key", TAKE_INTEGERS)
def test_nothing_is_computed_in_a_type_that_may_be_too_narrow(key):
    places, arrays = integer_places(key), split(*CASES[key].make(5))[0]
    for dtype in types_that_hold(arrays, places, NARROW):
        jaxpr = jax.make_jaxpr(function_of_arrays(key))(*retyped(arrays, places, dtype)).jaxpr
        assert computing_in(jaxpr, np.dtype(dtype)) == set()


@pytest.mark.slow  # what is computed in no narrow type (above) has the numbers of int32 on every axis
@pytest.mark.parametrize("key", TAKE_INTEGERS)
def test_bytes_on_axes_longer_than_a_byte_give_the_numbers_of_int32(key):
    places = integer_places(key)
    arrays = [lengthened(x) for x in split(*CASES[key].make(5))[0]]
    expected = jax.tree.leaves(values(key)(*arrays))
    for dtype in types_that_hold(arrays, places, (np.uint8, np.int8))[:1]:
        found = jax.tree.leaves(values(key)(*retyped(arrays, places, dtype)))
        for a, b in zip(expected, found, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.long
@pytest.mark.parametrize("key", TAKE_INTEGERS)
def test_wide_ids_with_x64_give_the_numbers_of_int32(key):
    places, arrays = integer_places(key), split(*CASES[key].make(5))[0]
    expected = jax.tree.leaves(values(key)(*arrays))
    with jax.enable_x64(True):
        call = quick_jit(function_of_arrays(key))
        for dtype in types_that_hold(arrays, places, (np.uint64, np.int64))[:1]:
            close([np.asarray(x) for x in expected], jax.tree.leaves(call(*retyped(arrays, places, dtype))))


def _takes_token_ids(name: str) -> bool:
    parameters = inspect.signature(getattr(rl_fn, name)).parameters.values()
    return any(p.name.endswith("tokens") and "Integer" in str(p.annotation) for p in parameters)


def _of_tokens(name: str, logits: np.ndarray, tokens: np.ndarray):
    match name:
        case "logits_logprobs":
            return rl_fn.logits_logprobs(logits, tokens)
        case "linear_logprobs":
            return rl_fn.linear_logprobs(np.ones((2, 1), np.float32), logits[0][:, None], tokens, chunk=1000)
        case "row_state":
            return rl_fn.row_state(logits[:, 50:], tokens, start=50)
        case "top_k_distillation":
            ids = np.stack([tokens, tokens + np.ones_like(tokens)], axis=-1)
            return rl_fn.top_k_distillation(logits, np.log(np.full((2, 2), 0.3, np.float32)), ids)
    raise AssertionError(f"{name} takes token ids and has no call here")


TAKE_TOKENS = sorted({case.name for case in CASES.values() if _takes_token_ids(case.name)})


def test_the_functions_of_token_ids_are_found():
    assert TAKE_TOKENS == ["linear_logprobs", "logits_logprobs", "row_state", "top_k_distillation"]


@pytest.mark.parametrize("dtype", [d for d in NARROW if np.iinfo(d).bits <= 16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("name", TAKE_TOKENS)
def test_a_vocabulary_beyond_what_the_type_of_the_tokens_counts(name, dtype):
    size = np.iinfo(dtype).max + 5
    logits = Draw(1).normal(2, size)
    tokens = np.array([5, np.iinfo(dtype).max - 1])
    expected = jax.tree.leaves(_of_tokens(name, logits, tokens.astype(np.int32)))
    for a, b in zip(expected, jax.tree.leaves(_of_tokens(name, logits, tokens.astype(dtype))), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_token_of_a_byte():
    found = rl_fn.logits_logprobs(jnp.zeros((1, 256)), np.array([5], np.uint8)).logprobs
    np.testing.assert_allclose(found, [-np.log(256.0)], rtol=1e-6)


@pytest.mark.parametrize("name", sorted(set(HOST) & {"balance", "pack", "segment_ids", "position_ids"}))
def test_lengths_of_any_integer_type_on_the_host(name):
    other = {"balance": (2,), "pack": (127,)}.get(name, ())
    lengths, function = np.array([120, 90, 0, 120]), getattr(rl_fn, name)
    for dtype in DTYPES:
        jax.tree.map(np.testing.assert_array_equal, function(lengths, *other), function(lengths.astype(dtype), *other))


@pytest.mark.parametrize(
    "call",
    [
        lambda ids: rl_fn.grpo_advantages(np.ones((1, 2), np.float32), group_ids=ids),
        lambda ids: rl_fn.discounted_returns(np.ones((1, 2), np.float32), np.ones((1, 2), bool), segment_ids=ids),
        lambda ids: rl_fn.step_group_advantages(np.ones((1, 2), np.float32), ids, np.ones((1, 2), bool)),
        lambda ids: rl_fn.logits_logprobs(np.ones((1, 2, 3), np.float32), ids),
    ],
)
@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_ids_that_do_not_fit_are_not_cut_off_in_silence(call, dtype):
    """Without x64 JAX keeps 32 of their 64 bits, and two ids that differ in the others would become one."""
    with pytest.raises(ValueError, match=str(2**32)):
        call(np.array([[0, 2**32]], dtype))
