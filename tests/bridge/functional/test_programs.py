"""How many programs from_jax makes: one for all shapes, whatever the function, and what it does where it cannot."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import core

import rl_fn
from rl_bridge.functional import call, from_jax, trace
from rl_fn.recurrence import scan
from tests.bridge.functional.both import check
from tests.bridge.functional.sizes_of_cases import NAMES, REGISTRIES, arguments, value_and_gradient
from tests.rl_fn.registry import CASES


@pytest.fixture
def made(monkeypatch):
    """The names of the functions that programs were made of."""
    names = []

    class Recorded(call.Program):
        def __init__(self, traced, dtypes, name):
            names.append(name)
            super().__init__(traced, dtypes, name)

    monkeypatch.setattr(call, "Program", Recorded)
    return names


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_second_shape_makes_no_second_program_and_is_right(name, made):
    """The program for all shapes computes what a program that is traced for that very shape computes."""
    lowered, fixed = from_jax(CASES[name].function), from_jax(CASES[name].function, dynamic=False)
    for cases in REGISTRIES:
        tensors, filled = arguments(name, cases)
        filled(lowered, tensors)
    tensors, filled = arguments(name, REGISTRIES[2])
    actual = value_and_gradient(lowered, filled, tensors)
    assert len(made) == 1
    expected = value_and_gradient(fixed, filled, tensors)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = (x.float() if x.is_floating_point() else x for x in (a, b))  # of float8 nothing is compared
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("length", [2, 7, 8, 9, 16, 64, 65, 73, 129, 513])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_recurrence_of_any_length(length, reverse, made):
    rng = np.random.default_rng(length)
    decay, inputs = (rng.normal(0.0, 0.9, (2, length)).astype(np.float32) for _ in range(2))
    init = rng.normal(size=2).astype(np.float32)
    lowered = from_jax(lambda a, b, start: scan(a, b, start, reverse=reverse))
    lowered(*(torch.ones(2, 40), torch.ones(2, 40), torch.ones(2)))
    del made[:]
    check(lambda a, b, start: scan(a, b, start, reverse=reverse), decay, inputs, init, lowered=lowered)
    assert len(made) == (length == 2)  # as many tokens as rows: another pattern


def test_a_branch_on_a_size_is_a_program_for_each_side(made):
    lowered = from_jax(lambda x: x * 2.0 if x.shape[0] > 5 else x - 1.0)
    for size in (3, 7, 4, 9, 5, 6):
        x = torch.arange(float(size))
        torch.testing.assert_close(lowered(x), x * 2.0 if size > 5 else x - 1.0)
    assert len(made) == 2


def test_a_function_keeps_as_many_programs_as_the_limit(monkeypatch, made):
    monkeypatch.setattr(call, "_LIMIT", 2)
    lowered = from_jax(lambda x, factor: x * factor)
    for factor, count in ((1.0, 1), (2.0, 2), (1.0, 2), (2.0, 2), (3.0, 3), (1.0, 4)):  # the third empties the cache
        torch.testing.assert_close(lowered(torch.ones(3), factor), torch.full((3,), factor))
        assert len(made) == count


def test_an_abstract_array_of_a_symbol_is_never_that_of_a_number():
    """JAX's table of abstract arrays compares keys of different hashes: about one size in 300 was mistaken."""
    float32 = np.dtype(np.float32)
    for size in range(2, 3000):
        number = core.ShapedArray((size,), float32)
        with trace.symbolic(((-1,),), (size,)) as (shapes, verdicts):
            symbol = core.ShapedArray(shapes[0], float32)
            assert symbol is not number
            assert core.ShapedArray((size,), float32) is number
        assert not isinstance(symbol.shape[0], int)
        assert verdicts.conditions() == ()


@pytest.mark.long
def test_an_operation_on_a_symbol_is_never_found_as_that_on_a_number():
    """JAX's table of operations' result types is another such table: it made 1 program too many in a run of 1000."""

    def filled(size):
        return jax.make_jaxpr(lambda: jax.lax.broadcast(1.0, (size,)))().out_avals[0].shape[0]

    for size in range(2, 1500):
        assert filled(size) == size
        with trace.symbolic(((-1,),), (size,)) as (shapes, verdicts):
            made = filled(shapes[0][0])
        assert not isinstance(made, int)
        assert verdicts.conditions() == ()


def test_a_question_of_inequality_is_answered_too(made):
    lowered = from_jax(lambda x: x * 2.0 if x.shape[0] != 5 else x - 1.0)
    for size in (3, 5, 4):
        x = torch.arange(float(size))
        torch.testing.assert_close(lowered(x), x * 2.0 if size != 5 else x - 1.0)
    assert len(made) == 2


def test_sizes_that_depend_on_each_other(made):
    def halves(x, y):
        if y.shape[0] != -(-x.shape[0] // 2):
            raise ValueError(f"y must be half of x, got {y.shape[0]} for {x.shape[0]}")
        return jnp.pad(x, (0, 2 * y.shape[0] - x.shape[0])).reshape(-1, 2).sum(-1) + y

    lowered = from_jax(halves)
    for size in (5, 8, 11):
        x, y = torch.arange(float(size)), torch.ones((size + 1) // 2)
        torch.testing.assert_close(lowered(x, y), torch.nn.functional.pad(x, (0, size % 2)).reshape(-1, 2).sum(-1) + y)
    assert len(made) <= 2
    with pytest.raises(ValueError, match="got 9 for 11"):
        lowered(torch.ones(11), torch.ones(9))


def test_what_is_not_a_number_is_kept_by_a_mask_as_in_jax():
    drift, mask = np.array([0.1, np.nan, 3.0, -0.1], np.float32), np.array([True, True, True, False])
    kept = from_jax(rl_fn.second_moment_mask)(torch.tensor(drift), torch.tensor(mask), threshold=0.04)
    assert kept.tolist() == rl_fn.second_moment_mask(drift, mask, threshold=0.04).tolist() == [True, True, False, False]


@pytest.mark.parametrize("confidence", [1.0, 22.0])
def test_a_confident_teacher_s_bucket_is_as_in_jax(confidence):
    student = np.linspace(-2.0, 2.0, 6, dtype=np.float32)[None]
    reported = np.asarray(jax.nn.log_softmax(jnp.linspace(0.0, 1.0, 6).at[0].add(confidence)))[None, :3]
    losses = functools.partial(rl_fn.top_k_distillation, beta=1.0)
    check(lambda s, t: losses(s, t, np.arange(3)[None]), student, reported)


def test_an_error_has_the_sizes_at_hand_in_its_message():
    with pytest.raises(ValueError, match=r"between 1 and the group's size, got 7 for \(2, 5\)"):
        from_jax(rl_fn.passk_analytic_advantages)(torch.ones(2, 5), k=7)


def test_an_error_that_only_symbolic_sizes_have_is_not_swallowed():
    def fussy(x):
        if not isinstance(x.shape[0], int):
            raise RuntimeError("a number, please")
        return x

    with pytest.raises(RuntimeError, match="a number, please") as caught:
        from_jax(fussy)(torch.ones(3))
    assert any("dynamic=False" in note for note in caught.value.__notes__)
    assert from_jax(fussy, dynamic=False)(torch.ones(3)).shape == (3,)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: sum(x[i] for i in range(x.shape[0])),
        lambda x: jnp.sum(x) * float(x.shape[0]) / x.shape[0],
        lambda x: jnp.sum(x) + 0 * int(x.shape[0]),
    ],
)
def test_a_size_that_python_needs_as_a_number_makes_a_program_a_shape_and_says_so(function, made):
    lowered = from_jax(function)
    with pytest.warns(UserWarning, match=r"from_jax\(.*\) is traced for every new shape: .*s0"):
        torch.testing.assert_close(lowered(torch.arange(3.0)), torch.tensor(3.0))
    torch.testing.assert_close(lowered(torch.arange(4.0)), torch.tensor(6.0))  # warned once
    assert len(made) == 2
