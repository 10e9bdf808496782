"""Laws that every public function obeys, generated over the registry."""

import jax
import numpy as np
import pytest

from tests.rl_fn.laws import (
    DETERMINISTIC,
    MASKED,
    both,
    clean,
    close,
    evaluate,
    every_seed,
    function_of_arrays,
    optimising_jit,
    quick_jit,
    run,
    split,
    under_mask,
    value_and_gradient,
    values,
    with_junk,
)
from tests.rl_fn.registry import CASES, T

ONE_CASE_EACH = sorted({CASES[key].name: key for key in DETERMINISTIC}.values())
# Eager code compiles every operation by itself: the plainest case, whose shapes the others fraction, is enough.
PLAINEST = sorted({CASES[key].name: key for key in reversed(DETERMINISTIC)}.values())


@pytest.mark.parametrize("key", MASKED)
@every_seed
def test_masked_positions_reach_neither_value_nor_gradient(key, seed):
    args, kwargs = CASES[key].make(seed)
    mask = args[CASES[key].mask]
    (value, gradient), (dirty, dirty_gradient) = clean(key, seed), both(key, *with_junk(key, args, kwargs, seed))
    for a, b in zip(value, dirty, strict=True):
        np.testing.assert_array_equal(a, b)
    for position, a, b in zip(CASES[key].differentiable, gradient, dirty_gradient, strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.isfinite(b).all()
        if position in CASES[key].masked and b.shape[: mask.ndim] == mask.shape:
            assert (b[~mask] == 0).all()


@pytest.mark.parametrize("key", MASKED)
def test_every_array_under_the_mask_is_declared_so(key):
    args, _ = CASES[key].make(0)
    mask = args[CASES[key].mask]
    assert {i for i, x in enumerate(args) if under_mask(x, mask)} <= set(CASES[key].masked)


@pytest.mark.parametrize("key", MASKED)
@pytest.mark.parametrize("counted", ["nothing", "one"])
def test_nothing_or_one_counted_is_finite(key, counted):
    args, kwargs = CASES[key].make(3)
    mask = np.zeros_like(args[CASES[key].mask])
    mask.flat[2] = counted == "one"
    args = tuple(mask if i == CASES[key].mask else x for i, x in enumerate(args))
    leaves, gradients = both(key, *with_junk(key, args, kwargs, 3))
    assert all(np.isfinite(x).all() for x in (*leaves, *gradients))
    if counted == "nothing":
        assert all((x == 0).all() for x in leaves)


@pytest.mark.parametrize("key", PLAINEST)
def test_jit_and_eager_agree(key):
    args, kwargs = CASES[key].make(5)
    arrays, _ = split(args, kwargs)
    optimised = jax.tree.leaves(optimising_jit(function_of_arrays(key))(*arrays))
    close(optimised, jax.tree.leaves(CASES[key].function(*args, **kwargs)))
    close(optimised, run(key, args, kwargs))


@pytest.mark.slow  # the gradient is of what is traced in eager code too; the value that is not is compared above
@pytest.mark.parametrize("key", [key for key in PLAINEST if CASES[key].differentiable])
def test_jit_and_eager_agree_in_the_gradient(key):
    arrays = split(*CASES[key].make(5))[0]
    close(evaluate(key, arrays)[1], list(value_and_gradient(key)(np.float32(1.0), *arrays)[1]))


@pytest.mark.parametrize("key", ONE_CASE_EACH)
def test_vmap_is_a_loop(key):
    calls = [split(*CASES[key].make(seed))[0] for seed in (11, 12, 13)]
    stacked = jax.tree.map(lambda *x: np.stack(x), *calls)
    mapped = jax.tree.leaves(quick_jit(jax.vmap(function_of_arrays(key)))(*stacked))
    for i, arrays in enumerate(calls):
        close([leaf[i] for leaf in mapped], evaluate(key, arrays)[0])


def _paddable(key: str) -> bool:
    args, kwargs = CASES[key].make(0)
    return args[CASES[key].mask].shape[-1] == T and kwargs.get("axis") is None


@pytest.mark.parametrize("key", [key for key in MASKED if _paddable(key)])
@every_seed
def test_padding_changes_nothing(key, seed):
    args, kwargs = CASES[key].make(seed)
    shape = args[CASES[key].mask].shape

    def pad(x, fill):
        return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 3)], constant_values=fill)

    def padded(i, x):
        return pad(x, False if i == CASES[key].mask else np.nan) if np.shape(x) == shape else x

    wide_args = tuple(padded(i, x) for i, x in enumerate(args))
    wide_kwargs = {k: pad(x, 99) if k == "segment_ids" else padded(k, x) for k, x in kwargs.items()}
    wide = values(key)(*split(wide_args, wide_kwargs)[0])
    for a, b in zip(clean(key, seed)[0], map(np.asarray, jax.tree.leaves(wide)), strict=True):
        if a.shape == b.shape:
            close([b], [a])
        else:
            close([b[..., :T]], [a])
            assert not b[..., T:].any()


@pytest.mark.parametrize("key", MASKED)
@every_seed
def test_order_of_rows_does_not_matter(key, seed):
    args, kwargs = CASES[key].make(seed)
    rows = args[CASES[key].mask].shape[0]
    order = np.random.default_rng(seed).permutation(rows)

    def permuted(x):
        return x[order] if isinstance(x, np.ndarray) and x.ndim and x.shape[0] == rows else x

    shuffled = run(key, tuple(map(permuted, args)), {k: permuted(x) for k, x in kwargs.items()})
    close(shuffled, [permuted(leaf) for leaf in clean(key, seed)[0]])
