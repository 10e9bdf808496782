"""Every element-wise primitive against JAX, values and gradients, at ties and zeros too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from rl_bridge.functional import from_jax
from tests.bridge.functional.both import ANY, POSITIVE, UNIT, Family, check, draw

# Few shapes and seeds, so that JAX compiles a few programs and their results are computed once.
SHAPES = st.sampled_from([(), (2, 1, 4), (2, 0)])
SEEDS = st.integers(0, 3)


def _unsigned(x, y):
    """torch has hardly any arithmetic for these dtypes; results wrap around."""
    one, odd = x.dtype.type(1), x.dtype.type(40503)
    arithmetic = (x + y, x - y, x * odd, lax.div(x, y | one), lax.rem(x, y | one), lax.max(x, y), ~x, x ^ y)
    shifts = (x << one, lax.shift_right_logical(x, one), lax.population_count(x), lax.clz(y))
    return *arithmetic, *shifts, x < y, x == y, jnp.where(x > y, x, one), x.astype(jnp.float32)


UNARY = {
    "exp": (jnp.exp, ANY),
    "exp2": (jnp.exp2, ANY),
    "expm1": (jnp.expm1, ANY),
    "log": (jnp.log, POSITIVE),
    "log1p": (jnp.log1p, POSITIVE),
    "logistic": (jax.nn.sigmoid, ANY),
    "log_sigmoid": (jax.nn.log_sigmoid, ANY),
    "softplus": (jax.nn.softplus, ANY),
    "relu": (jax.nn.relu, ANY),
    "gelu": (jax.nn.gelu, ANY),
    "silu": (jax.nn.silu, ANY),
    "tanh": (jnp.tanh, ANY),
    "sin": (jnp.sin, ANY),
    "cos": (jnp.cos, ANY),
    "tan": (jnp.tan, UNIT),
    "asin": (jnp.arcsin, UNIT),
    "acos": (jnp.arccos, UNIT),
    "atan": (jnp.arctan, ANY),
    "sinh": (jnp.sinh, ANY),
    "cosh": (jnp.cosh, ANY),
    "asinh": (jnp.arcsinh, ANY),
    "acosh": (lambda x: jnp.arccosh(x + 1.0), POSITIVE),
    "atanh": (jnp.arctanh, UNIT),
    "sqrt": (jnp.sqrt, POSITIVE),
    "rsqrt": (lax.rsqrt, POSITIVE),
    "cbrt": (jnp.cbrt, POSITIVE),
    "square": (jnp.square, ANY),
    "integer_pow": (lambda x: x**3, ANY),
    "reciprocal": (lambda x: 1.0 / x, POSITIVE),
    "power": (lambda x: x**0.3, POSITIVE),
    "base": (lambda x: jnp.power(2.0, x), ANY),
    "erf": (lax.erf, ANY),
    "erfc": (lax.erfc, ANY),
    "erf_inv": (lax.erf_inv, UNIT),
    "lgamma": (lax.lgamma, POSITIVE),
    "digamma": (lax.digamma, POSITIVE),
    "sign": (jnp.sign, ANY),
    "abs": (jnp.abs, ANY),
    "neg": (jnp.negative, ANY),
    "floor": (jnp.floor, ANY),
    "ceil": (jnp.ceil, ANY),
    "round": (jnp.round, ANY),
    "round_away": (lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO), ANY),
    "is_finite": (jnp.isfinite, ANY),
    "clip": (lambda x: jnp.clip(x, -0.5, 1.0), ANY),
    "clamp": (lambda x: lax.clamp(-0.5, x, 1.0), ANY),
    "maximum_number": (lambda x: jnp.maximum(x, 0.5), ANY),
    "minimum_number": (lambda x: jnp.minimum(0.5, x), ANY),
    "where_number": (lambda x: jnp.where(x > 0.0, x, 2.0), ANY),
    "where_numbers": (lambda x: x * jnp.where(x > 0.0, 0.8, 1.2), ANY),
    "nan_to_num": (jnp.nan_to_num, ANY),
    "bfloat16": (lambda x: x.astype(jnp.bfloat16), ANY),
    "integer": (lambda x: x.astype(jnp.int32), ANY),
    "boolean": (lambda x: x.astype(bool), ANY),
    "through_half": (lambda x: lax.reduce_precision(x, 5, 10), ANY),
    "zeros_like": (lambda x: x + jnp.zeros_like(x), ANY),
    "constant_result": (lambda x: (jnp.ones_like(x), 2.0 * x), ANY),
    "bitcast": (lambda x: lax.bitcast_convert_type(x, jnp.int32), ANY),
}
BINARY = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "div": lambda x, y: x / (jnp.abs(y) + 0.5),
    "rem": lambda x, y: lax.rem(x, jnp.abs(y) + 0.5),
    "max": jnp.maximum,
    "min": jnp.minimum,
    "pow": lambda x, y: jnp.power(jnp.abs(x) + 0.5, y),
    "atan2": lambda x, y: jnp.arctan2(x, jnp.abs(y) + 0.5),
    "logaddexp": jnp.logaddexp,
    "where": lambda x, y: jnp.where(x > y, x, y),
    "comparisons": lambda x, y: (x == y, x != y, x < y, x <= y, x > y, x >= y),
    "clamp_tensors": lambda x, y: lax.clamp(y, x, y + 1.0),
    "squared_error": lambda x, y: jnp.square(x - y),
}
INTEGER = {
    "div": lax.div,
    "floor_div": lambda x, y: x // jnp.where(y == 0, 1, y),
    "rem": lax.rem,
    "mod": lambda x, y: x % jnp.where(y == 0, 1, y),
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "not": lambda x, y: (~x, ~(x > y)),
    "shift_left": lambda x, y: x << jnp.abs(y),
    "shift_right": lambda x, y: x >> jnp.abs(y),
    "shift_right_logical": lambda x, y: (
        lax.shift_right_logical(x, jnp.abs(y)),
        lax.shift_right_logical(x, y + 32),
        lax.shift_right_logical(x.astype(jnp.int8), jnp.int8(1)),
    ),
    "bit_counts": lambda x, y: (lax.population_count(x), lax.clz(y), lax.population_count(x.astype(jnp.uint8))),
    "uint32": lambda x, y: _unsigned(x.astype(jnp.uint32), y.astype(jnp.uint32)),
    "uint16": lambda x, y: _unsigned(x.astype(jnp.uint16), y.astype(jnp.uint16)),
    "bools": lambda x, y: ((x > 0) & (y > 0), (x > 0) | (y > 0), (x > 0) ^ (y > 0)),
    "max": jnp.maximum,
    "by_number": lambda x, y: (lax.div(x, np.int32(3)), lax.rem(y, np.int32(2)), x * 5, 7 - y),
    "abs": lambda x, y: (jnp.abs(x), jnp.sign(y), -x),
    "select": lambda x, y: lax.select_n(jnp.clip(x, 0, 2), x, y, x + y),
    "convert": lambda x, y: (x.astype(jnp.float32) * 0.5, y.astype(jnp.int8)),
}


def draw_integers(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).integers(-4, 5, shape), np.int32)


FAMILIES = {
    "unary": Family(
        {name: function for name, (function, _) in UNARY.items()},
        lambda name, shape, seed: [draw(seed, shape, UNARY[name][1])],
    ),
    "binary": Family(BINARY, lambda name, shape, seed: [draw(seed, shape), draw(seed + 1, shape)]),
    "integer": Family(INTEGER, lambda name, shape, seed: [draw_integers(seed, shape), draw_integers(seed + 1, shape)]),
}


@pytest.mark.long
@pytest.mark.parametrize(("family", "name"), [(f, name) for f, family in FAMILIES.items() for name in family.functions])
@given(shape=SHAPES, seed=SEEDS)
def test_as_in_jax(family, name, shape, seed):
    FAMILIES[family].check(name, shape, seed)


@pytest.mark.parametrize("name", ["add", "max", "where", "clamp_tensors"])
def test_nan_and_infinity_as_in_jax(name):
    x = np.array([np.nan, np.inf, -np.inf, 1.0, np.nan], np.float32)
    y = np.array([1.0, np.nan, np.inf, -np.inf, np.nan], np.float32)
    check(BINARY[name], x, y, places=())


@pytest.mark.parametrize("name", ["sign", "abs", "clip", "maximum_number", "round", "is_finite", "nan_to_num", "exp"])
def test_special_values_as_in_jax(name):
    check(UNARY[name][0], np.array([np.nan, np.inf, -np.inf, -0.0, 0.5, -2.5], np.float32), places=())


def test_nextafter():
    check(jnp.nextafter, np.array([0.0, 1.0, 2.0], np.float32), np.array([1.0, 0.0, 2.0], np.float32), places=())


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16])
def test_half_precision_stays_half(dtype):
    x = jnp.linspace(-2.0, 2.0, 9).astype(dtype)
    function = lambda x: (x * 0.1 + 1, jnp.where(x > 0, 0.8, 1.2).astype(x.dtype) * x, jnp.maximum(x, 0.3))  # noqa: E731
    result = from_jax(function)(torch.tensor(x.astype(np.float32).tolist()).to(getattr(torch, jnp.dtype(dtype).name)))
    for actual, expected in zip(result, function(x), strict=True):
        assert str(actual.dtype) == f"torch.{expected.dtype}"
        np.testing.assert_allclose(actual.float().numpy(), np.asarray(expected, np.float32), rtol=1e-2, atol=1e-2)


BEYOND = [3e9, -3e9, np.nan, np.inf, -np.inf, 300.5, -300.5, -1.5, -0.5, 2.0**31, -(2.0**31), 2.0**63, -(2.0**63)]
BEYOND += [1.5 * 2.0**63, 2.0**64, 2.0**31 - 1, 2.0**24 + 2, 65504.0, 255.0, 256.0, 127.0, 128.0]
INTEGERS = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("of", ["float16", "bfloat16", "float32", "float64"])
def test_numbers_that_an_integer_cannot_hold_saturate(of, dtype):
    """XLA takes the nearest integer that there is, and 0 for NaN; a cast of torch on the CPU wraps round."""
    with jax.enable_x64(True):
        with np.errstate(over="ignore"):  # float16 has no number beyond 65504
            x = np.asarray(BEYOND).astype(jnp.dtype(of))

        def convert(x):
            return lax.convert_element_type(x, jnp.dtype(dtype))

        expected = np.asarray(jax.jit(convert)(x)).tolist()
        exact = torch.tensor(x.astype(np.float64)).to(getattr(torch, of))
        assert from_jax(convert)(exact).tolist() == expected


# torch fills no tensor with a uint64 beyond int64, and says so.
@pytest.mark.parametrize("dtype", INTEGERS[:-1])
def test_constants_that_an_integer_cannot_hold_saturate(dtype):
    with jax.enable_x64(True):

        def convert(y):
            # A number given to a traced function is a literal of its program; elsewhere NumPy would convert it.
            inner = jax.jit(lambda x: lax.convert_element_type(x, jnp.dtype(dtype)))
            return [jnp.broadcast_to(inner(one), y.shape) for one in BEYOND]

        expected = [int(x) for x in jax.jit(convert)(np.zeros((), np.float32))]
        assert [int(x) for x in from_jax(convert)(torch.zeros(()))] == expected
