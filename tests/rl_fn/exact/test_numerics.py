"""What every module is built on, where the plain operation would be infinite, undefined or inexact."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_fn._groups import peers, within
from rl_fn._numerics import (
    AT_LEAST_ONE,
    POSITIVE,
    as_float,
    as_ids,
    as_mask,
    deviations,
    divide,
    exp,
    exp_limit,
    expm1,
    keep,
    log,
    numbers,
    per_row,
    repeating,
    sqrt,
    variance,
)
from rl_fn._pairs import per_token, smoothed_logistic, softplus


def test_divide_by_nothing_is_nothing_with_no_gradient():
    numerator, denominator = jnp.array([1.0, 2.0]), jnp.array([0.0, 4.0])
    assert divide(numerator, denominator).tolist() == [0.0, 0.5]
    slopes = jax.grad(lambda n, d: divide(n, d).sum(), (0, 1))(numerator, denominator)
    # 1/4 and −2/4².
    assert slopes[0].tolist() == [0.0, 0.25]
    assert slopes[1].tolist() == [0.0, -0.125]


def test_sqrt_is_flat_at_zero():
    x = jnp.array([0.0, 4.0, 0.25, -1.0])
    assert sqrt(x).tolist() == [0.0, 2.0, 0.5, 0.0]
    assert jax.grad(lambda y: sqrt(y).sum())(x).tolist() == [0.0, 0.25, 1.0, 0.0]


@pytest.mark.parametrize("wide", [False, True])
def test_exponentials_go_on_as_their_tangents(wide):
    with jax.enable_x64(wide):
        dtype = jnp.float64 if wide else jnp.float32
        c = exp_limit(jnp.dtype(dtype))
        assert c == (690.0 if wide else 64.0)
        x = jnp.array([c + 1.0, c, c - 1.0, 0.0], dtype)
        top = np.exp(np.float64(c))
        expected = [2 * top, top, top / np.e, 1.0]
        np.testing.assert_allclose(exp(x), expected, rtol=2e-5)
        np.testing.assert_allclose(jax.grad(lambda y: exp(y).sum())(x), [top, top, top / np.e, 1.0], rtol=2e-5)
        np.testing.assert_allclose(expm1(x), [2 * top, top, top / np.e, 0.0], rtol=2e-5)
        np.testing.assert_allclose(jax.grad(lambda y: expm1(y).sum())(x), [top, top, top / np.e, 1.0], rtol=2e-5)
        # e^1e-4 − 1 = 1e-4 + 5e-9; the plain difference would be off in the fourth digit.
        np.testing.assert_allclose(expm1(jnp.array([1e-4], dtype)), [1.00005e-4], rtol=1e-6)


def test_deviations_of_three_of_one_and_of_none():
    x = jnp.array([[1.0, 2.0, 6.0], [5.0, 9.0, 9.0], [7.0, 7.0, 7.0]])
    mask = jnp.array([[True, True, True], [True, False, False], [False, False, False]])
    mean, deviation, count = deviations(x, mask, axis=-1)
    assert mean.tolist() == [[3.0], [5.0], [0.0]]
    assert deviation.tolist() == [[-2.0, -1.0, 3.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert count.tolist() == [[3.0], [1.0], [0.0]]
    # (4 + 1 + 9)/2, and nothing where no degree of freedom is left.
    assert variance(deviation, count, -1).tolist() == [[7.0], [0.0], [0.0]]
    assert variance(deviation, count, -1, 3).tolist() == [[0.0], [0.0], [0.0]]
    # Over everything: 1, 2, 6, 5 have mean 3.5.
    assert deviations(x, mask)[0].tolist() == [[3.5]]


def test_deviations_have_the_gradient_of_a_mean():
    x, mask = jnp.array([1.0, 2.0, 6.0]), jnp.array([True, True, False])
    assert jax.grad(lambda y: deviations(y, mask)[0].sum())(x).tolist() == [0.5, 0.5, 0.0]
    assert jax.grad(lambda y: deviations(y, mask)[1][0])(x).tolist() == [0.5, -0.5, 0.0]


def test_one_dtype_for_all():
    with jax.enable_x64(True):
        wide, number = as_float(jnp.zeros(1, jnp.float64), 1.0)
        assert wide.dtype == number.dtype == jnp.float64
        # A Python number is not a reason for float64.
        assert [x.dtype for x in as_float(jnp.zeros(1, jnp.float32), 1.0)] == [jnp.float32, jnp.float32]
        assert [x.dtype for x in as_float(jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.float64))] == [jnp.float64] * 2


def test_masks_are_boolean_and_keep_is_exact():
    with pytest.raises(ValueError, match="mask must be boolean"):
        as_mask(jnp.ones(2, jnp.int32))
    x = jnp.array([jnp.nan, 2.0])
    assert keep(x, jnp.array([False, True])).tolist() == [0.0, 2.0]
    assert keep(x, None) is x
    assert jax.grad(lambda y: keep(y, jnp.array([False, True])).sum())(x).tolist() == [0.0, 1.0]


def test_softplus_and_the_smoothed_logistic():
    # log 2 at 0; slopes are sigmoids; far out it is x and 0 without overflow.
    np.testing.assert_allclose(softplus(jnp.array([0.0, 100.0, -100.0])), [np.log(2.0), 100.0, 0.0], atol=1e-7)
    # −(1 − ε) log σ(z) − ε log σ(−z) = softplus(−z) + εz; at z = 0 it is log 2, at 2 with ε = 1/4: log(1 + e⁻²) + 1/2.
    got = smoothed_logistic(jnp.array([0.0, 2.0]), 0.25)
    np.testing.assert_allclose(got, [np.log(2.0), np.log1p(np.exp(-2.0)) + 0.5], rtol=1e-6)


def test_per_token_of_an_empty_answer_is_zero():
    got = per_token(jnp.array([6.0, 6.0, jnp.nan]), jnp.array([3, 0, 5]), jnp.array([True, True, False]))
    assert got.tolist()[:2] == [2.0, 0.0]


def test_within_dense_and_ragged_groups():
    x, valid = jnp.array([1.0, 3.0, 10.0, 8.0]), jnp.array([True, True, True, False])
    dense = within(x, valid, None)
    # 1, 3, 10: mean 14/3; Σ d² = (121 + 25 + 256)/9, over 2.
    np.testing.assert_allclose(dense.mean, [14 / 3] * 4, rtol=1e-6)
    np.testing.assert_allclose(dense.variance, [402 / 18] * 4, rtol=1e-6)
    assert np.asarray(dense[2]).tolist() == [3.0] * 4
    ragged = within(x, valid, jnp.array([0, 0, 1, 1], jnp.int32))
    assert ragged.mean.tolist() == [2.0, 2.0, 10.0, 10.0]
    assert ragged.deviation.tolist() == [-1.0, 1.0, 0.0, 0.0]
    assert np.asarray(ragged[2]).tolist() == [2.0, 2.0, 1.0, 1.0]
    assert ragged.variance.tolist() == [2.0, 2.0, 0.0, 0.0]
    expected = [[True, True, False, False]] * 2 + [[False, False, True, False]] * 2
    assert peers(valid, jnp.array([0, 0, 1, 1], jnp.int32)).tolist() == expected


def test_numbers_are_named_alone_or_under_a_label():
    with pytest.raises(ValueError, match=r"^a must be positive, got -1.0$"):
        numbers(jnp.dtype("float32"), POSITIVE, a=-1.0, b=2.0)
    with pytest.raises(ValueError, match=r"^clips must be positive, got a=2.0, b=-1.0$"):
        numbers(jnp.dtype("float32"), POSITIVE, "clips", a=2.0, b=-1.0)
    (one,) = numbers(jnp.dtype("float32"), POSITIVE, a=jnp.array(1, jnp.int32))
    assert one.dtype == jnp.float32 and numbers(jnp.dtype("float32"), POSITIVE, a=np.float64(2.0)) == [2.0]
    assert numbers(jnp.dtype("int32"), AT_LEAST_ONE, k=1) == [1]
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        numbers(jnp.dtype("int32"), AT_LEAST_ONE, k=0)


def test_arrays_of_parameters_are_not_read():
    (rows,) = per_row((1,), POSITIVE, t=jnp.array([-1.0]))
    assert rows.tolist() == [-1.0]
    for fits in (jnp.ones((2, 1)), jnp.ones((1, 3)), jnp.array(1.0)):
        assert repeating((2, 3), delta=fits)[0].shape == fits.shape
    for wrong in (jnp.ones(3), jnp.ones((2, 2)), jnp.ones((1, 2, 3))):
        with pytest.raises(ValueError, match="1 where an axis repeats"):
            repeating((2, 3), delta=wrong)


def test_the_logarithm_of_a_known_number_is_pythons():
    assert type(log(2.0)) is float and log(2.0) == float(np.log(2.0))
    np.testing.assert_allclose(jax.jit(log)(2.0), np.log(2.0), rtol=1e-6)


def test_ids_at_the_ends_of_int32():
    ends = np.array([-(2**31), 2**31 - 1], np.int64)
    assert as_ids(ends).tolist() == ends.tolist()
    for beyond in (ends[:1] - 1, ends[1:] + 1):
        with pytest.raises(ValueError, match="must fit into int32"):
            as_ids(beyond)


def test_unsigned_ids_of_every_width_fit_where_the_message_says_that_they_do():
    """CORE-13: x64 is the remedy that is named; with it the largest of 32 bits stays what it is."""
    for dtype in (np.uint8, np.uint16, np.uint32):
        largest = np.array([0, np.iinfo(dtype).max], dtype)
        with jax.enable_x64(True):
            assert as_ids(largest).tolist() == as_ids(jnp.asarray(largest)).tolist() == largest.tolist()
    with pytest.raises(ValueError, match="int64 with jax_enable_x64"):
        as_ids(largest)
