"""Packed is padded, over every function with segment_ids, also where one of the sequences holds NaN or infinity.

A sequence that went wrong is seen to have gone wrong, and its neighbours in the row know nothing of it.
"""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rl_fn
from rl_fn.aggregation import MODES
from rl_fn.importance.ratios import LEVELS
from rl_fn.importance.rejection import REJECTION_LEVELS, STATISTICS
from rl_fn.policy_losses.regularised import SQUARES
from tests.rl_fn.laws import is_array, quick_jit
from tests.rl_fn.registry import CASES, HOST, B, T

# Every keyword that chooses among words, with all its words. A prompt's completions are not packed: prompt-mean raises.
_OF_MODE = {"mode": [mode for mode in MODES if mode != "prompt-mean"]}
WORDS = {
    "log_ratio": {"level": LEVELS},
    "truncated_importance_weights": {"level": LEVELS},
    "masked_importance_weights": {"level": LEVELS},
    "topr": {"level": LEVELS},
    "dro": {"level": SQUARES},
    "kimi": {"level": SQUARES},
    "rejection_mask": {"level": REJECTION_LEVELS, "statistic": STATISTICS},
    "aggregate": _OF_MODE,
    "aggregate_parts": _OF_MODE,
}
PACKED = sorted(
    name
    for name in rl_fn.__all__
    if inspect.isfunction(function := getattr(rl_fn, name))
    and "segment_ids" in inspect.signature(function).parameters
    and name not in HOST
)
COMBINATIONS = [
    (name, *dict(zip(WORDS.get(name, {}), words, strict=True)).items())
    for name in PACKED
    for words in itertools.product(*WORDS.get(name, {}).values())
]
IDS = np.repeat(np.array([5, 2, 9], np.int32), T)[None]


@pytest.mark.parametrize("name", PACKED)
def test_every_choice_of_a_word_is_tried(name):
    parameters = inspect.signature(getattr(rl_fn, name)).parameters.values()
    assert {p.name for p in parameters if p.annotation is str} == set(WORDS.get(name, {}))


def case_of(name):
    """The first case of the function in which the mask is one of tokens."""
    named = (case for _, case in sorted(CASES.items()) if case.name == name and case.mask is not None)
    return next(case for case in named if case.make(0)[0][case.mask].shape == (B, T))


def call_of(name, words):
    """Arguments of the function's first case without words of its own, and the function of arrays per token alone."""
    case = case_of(name)

    def number(x):
        # One number for all rows: a packed row has one place for what padded rows have one of each.
        return x.reshape(-1)[:1].reshape(()) if is_array(x) and x.ndim < 2 else x

    def arguments(seed):
        args, kwargs = case.make(seed)
        fixed = {k: number(v) for k, v in kwargs.items() if k not in ("segment_ids", "max_completion_length")}
        normed = {"max_completion_length": T} if ("mode", "seq-mean-token-sum-norm") in words else {}
        return [number(x) for x in args if not isinstance(x, str)], fixed | normed | dict(words)

    args, _ = arguments(0)
    per_token = [i for i, x in enumerate(args) if np.shape(x) == (B, T)]
    floats = [i for i in per_token if args[i].dtype == np.float32]
    return getattr(rl_fn, name), arguments, per_token, floats


def _fitting(cotangents, x):
    """Uneven weights of the results; of a sequence's number the sum of its tokens'; 1 of a number of the batch."""
    if x.shape == (B,):
        return jnp.sum(cotangents, axis=-1)
    return cotangents.reshape(x.shape) if x.ndim else jnp.ones_like(x)


@functools.lru_cache(maxsize=4)
def programs(name, words):
    """Result and gradient, of padded rows and of one packed row."""
    function, arguments, per_token, floats = call_of(name, words)

    def both(ids, cotangents, *args):
        kwargs = {k: v for k, v in arguments(0)[1].items() if not is_array(v)}

        def leaves_of(*active):
            filled = list(args)
            for i, x in zip(floats, active, strict=True):
                filled[i] = x
            leaves = jax.tree.leaves(function(*filled, **kwargs, segment_ids=ids))
            return [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)], leaves

        values, pull, leaves = jax.vjp(leaves_of, *(args[i] for i in floats), has_aux=True)
        return leaves, pull([jnp.broadcast_to(_fitting(cotangents, x), x.shape) for x in values])

    return quick_jit(functools.partial(both, None)), quick_jit(both), per_token, floats


def spoil(args, mask, floats, value, seed):
    """The value at some counted places of the middle sequence, in every array or in one of them."""
    rng, spoiled = np.random.default_rng(seed), list(args)
    for i in floats if seed % 2 else [floats[seed // 2 % len(floats)]]:
        at = rng.random((B, T)) < 0.4
        at[[0, 2]] = False
        spoiled[i] = np.where(at & mask, np.float32(value), args[i])
    return spoiled


@pytest.mark.long
@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda c: "-".join([c[0], *(word for _, word in c[1:])]))
def test_packed_is_padded_beside_what_is_not_finite(combination):
    name, *words = combination
    words = tuple(words)
    padded, packed, per_token, floats = programs(name, words)
    _, arguments, *_ = call_of(name, words)
    for seed, value in enumerate([0.0, np.nan, np.inf, -np.inf] * 4):
        args, _ = arguments(seed)
        mask = np.random.default_rng(seed).random((B, T)) < 0.8
        args[case_of(name).mask] = mask
        args = spoil(args, mask, floats, value, seed)
        cotangents = np.where(mask, np.random.default_rng(seed).normal(size=(B, T)), 0.0).astype(np.float32)
        row = [x.reshape(1, -1) if i in per_token else x for i, x in enumerate(args)]
        with np.errstate(all="ignore"):
            expected, slopes = padded(cotangents, *args)
            found, found_slopes = packed(IDS, cotangents, *row)
        for a, b in zip([*expected, *slopes], [*found, *found_slopes], strict=True):
            # A number of each sequence stands, packed, at each of its counted tokens.
            a = np.where(mask, np.asarray(a)[:, None], 0) if a.shape == (B,) else np.asarray(a)
            a, b = a.reshape(-1), np.asarray(b).reshape(-1)
            np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b), err_msg=f"{value} in {seed}")
            inside = np.isfinite(a)
            np.testing.assert_allclose(b[inside], a[inside], rtol=2e-5, atol=2e-6, err_msg=f"{value} in {seed}")
