"""Every primitive that from_jax lowers, in a case of its own: value and gradient at special values and empty arrays."""

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from rl_bridge.functional import from_jax
from rl_bridge.functional.emitter import RULES
from tests.bridge.functional.both import assert_same, jax_gradient, to_numpy, to_torch, torch_gradient

NAN, INF = np.nan, np.inf
FLOATS = np.array([NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.5, -2.5, 3.0, 1e-30, -80.0, 3e38], np.float32)
PAIRS = tuple(np.array(x, np.float32) for x in zip(*[(a, b) for a in FLOATS for b in FLOATS], strict=True))
FINITE = np.array([[1.0, 1.0, -2.0, 0.5], [0.25, -0.5, 0.25, 0.25], [-3.0, 2.0, 0.0, -0.0]], np.float32)
ROWS = np.array(
    [[1.0, NAN, 2.0, 2.0], [INF, 1.0, -INF, INF], [-INF, -INF, -INF, -INF], [3.0, 3.0, -0.0, 0.0]], np.float32
)
WHOLE = np.array([-(2**31), 2**31 - 1, 0, 1, -1, 7, -7, 31, 32], np.int32)
WHOLES = tuple(np.array(x, np.int32) for x in zip(*[(a, b) for a in WHOLE for b in WHOLE], strict=True))
SHIFTS = tuple(x[(WHOLES[1] >= 0) & (WHOLES[1] < 32)] for x in WHOLES)
POSITIVE = np.abs(FLOATS)
UNIT = np.array([NAN, 0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 0.99, 1e-30], np.float32)
HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
EMPTY = np.zeros((0, 3), np.float32)
AT = np.array([2, 0, 2], np.int32)
STEP = np.float32(0.3)
ONCE = np.array([2, 0, 1], np.int32)
# Rows of every length in which most entries are equal to another.
TIES = [np.random.default_rng(n).integers(0, 3, (4, n)).astype(np.float32) for n in (1, 2, 3, 5, 8, 9, 16)]


def unary(function, values=FLOATS):
    return [(function, values), (function, EMPTY)]


def binary(function):
    return [(function, *PAIRS), (function, EMPTY, EMPTY)]


def whole(function):
    return [(function, *WHOLES)]


@jax.custom_vjp
def _clipped(x):
    return x * 2.0


_clipped.defvjp(lambda x: (x * 2.0, x), lambda x, g: (jnp.where(x > 0, g, 3.0 * g),))


@jax.custom_jvp
def _odd(x):
    return x


_odd.defjvp(lambda primals, tangents: (primals[0], 5.0 * tangents[0]))


def _running(x, reverse):
    return lax.scan(lambda total, row: (total * 0.5 + row, (total, row[0])), x[0], x, reverse=reverse)


def _switched(x, which):
    return lax.switch(which, [lambda x: x * 2.0, lambda x: jnp.sqrt(x), lambda x: jnp.zeros_like(x)], x)


def _countdown(x, n):
    return lax.while_loop(lambda c: c[1] > 0, lambda c: (c[0] * 0.5 + 1.0, c[1] - 1), (x, n))


def _two(function):
    return [(function, FINITE), (function, ROWS), (function, EMPTY)]


def _handed_on(x):
    """JAX takes a carry that never changes out of its loop; the loops and the branch are left without a result."""
    same, _ = lax.scan(lambda c, _: (c, None), x, x)
    kept = lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0], c[1] + 1), (x, 0))[0]
    return same, lax.cond(jnp.sum(x) > 0, lambda x: x, lambda x: x, kept)


def _weak(x, reverse):
    """The carry starts as a Python number, whose type is weak."""
    return lax.scan(lambda total, row: (total * 0.5 + jnp.sum(row), (total, row)), 1.0, x, reverse=reverse)


SCATTERS = {
    "scatter": lambda x, i, u: x.at[i[1:]].set(u[1:]),
    "scatter-add": lambda x, i, u: x.at[i].add(u),
    "scatter-sub": lambda x, i, u: x.at[i].subtract(u),
    "scatter-mul": lambda x, i, u: x.at[i].multiply(u, unique_indices=True),
    "scatter-min": lambda x, i, u: x.at[i].min(u),
    "scatter-max": lambda x, i, u: x.at[i].max(u),
}
COMPARISONS = {"eq": lax.eq, "ne": lax.ne, "lt": lax.lt, "le": lax.le, "gt": lax.gt, "ge": lax.ge}
NO_GRADIENT = {"while", "nextafter"}  # JAX has none in reverse
# Where the gradient is not JAX's, point by point: a predicate of the arrays. Values are compared there too.
# The value is NaN: JAX gives no operand a gradient, torch gives it to all of them.
VALUE_IS_NAN = lambda x, y: np.isnan(x) | np.isnan(y)  # noqa: E731
UNLIKE_JAX = {
    "max": VALUE_IS_NAN,
    "min": VALUE_IS_NAN,
    "cummax": lambda x: np.isnan(x).any(-1, keepdims=True) & np.ones_like(x, bool),
    "cummin": lambda x: np.isnan(x).any(-1, keepdims=True) & np.ones_like(x, bool),
    "scatter-max": lambda x, _, u: VALUE_IS_NAN(x, u),
    "scatter-min": lambda x, _, u: VALUE_IS_NAN(x, u),
    # JAX forms x² + y², y², 2x or x / y, which leave float32 where torch's own formula does not.
    "atan2": lambda x, y: x * x + y * y == 0,
    "div": lambda _, y: np.isfinite(y) & (y != 0) & ((y * y == 0) | np.isinf(y * y)),
    "rem": lambda x, y=STEP: np.isfinite(x) & (y != 0) & np.isinf(x / np.where(y == 0, 1, y)),
    "integer_pow": lambda x: np.isfinite(x) & np.isinf(2 * x),
    # x⁰ and 0 to a negative power: JAX multiplies 0 by infinity.
    "pow": lambda x, y: ((x == 0) & (y <= 0)) | (np.isnan(x) & (y == 0)),
    # A pole: the sign of the infinity is -0's in JAX.
    "rsqrt": lambda x: (x == 0) & np.signbit(x),
    # The derivative's limit is 0; JAX's series is NaN.
    "digamma": lambda x: x == INF,
}
CASES = {
    "abs": [*unary(lax.abs), (lax.abs, WHOLE)],
    "acos": unary(lax.acos, UNIT),
    "acosh": unary(lax.acosh, 1.0 + POSITIVE),
    "add": binary(lax.add) + whole(lax.add),
    "add_any": [(jax.grad(lambda x: jnp.sum(jnp.sin(x) * x)), FINITE)],
    "and": whole(lambda x, y: (x & y, (x > 0) & (y > 0))),
    "argmax": [*_two(lambda x: jnp.argmax(x, -1))[:2], (lambda x: jnp.argmax(x > 0, 0), FINITE)],
    "argmin": [*_two(lambda x: jnp.argmin(x, -1))[:2], (lambda x: jnp.argmin(x > 0, 0), FINITE)],
    "asin": unary(lax.asin, UNIT),
    "asinh": unary(lax.asinh),
    "atan": unary(lax.atan),
    "atan2": binary(lax.atan2),
    "atanh": unary(lax.atanh, UNIT),
    "bitcast_convert_type": [(lambda x: lax.bitcast_convert_type(x, jnp.int32), FLOATS)],
    "broadcast_in_dim": [(lambda x: lax.broadcast_in_dim(x, (2, *x.shape, 3), (1, 2)), x) for x in (ROWS, EMPTY)],
    "cbrt": unary(lax.cbrt),
    "ceil": unary(lax.ceil),
    "clamp": [(lambda x: lax.clamp(-0.5, x, 1.0), FLOATS)]
    + [(lambda a, x, width=width: lax.clamp(a, x, a + width), *PAIRS) for width in (1.0, 0.0, -1.0)],
    "clz": [(lax.clz, WHOLE), (lambda x: lax.clz(x.astype(jnp.uint8)), WHOLE)],
    "concatenate": [(lambda x: lax.concatenate([x, 2.0 * x, x[:0]], 0), x) for x in (ROWS, EMPTY)],
    "cond": [(lambda x, p: lax.cond(p, jnp.sqrt, jnp.negative, x), FLOATS, np.bool_(p)) for p in (False, True)]
    + [(_switched, FLOATS, np.int32(i)) for i in (-5, 0, 1, 2, 9)],
    "convert_element_type": [
        (lambda x: (x.astype(jnp.bfloat16), x.astype(bool)), FLOATS),
        (lambda x: (x.astype(jnp.int8), x.astype(jnp.uint8), x.astype(jnp.float32), x.astype(bool)), WHOLE),
        (lambda x: x.astype(jnp.int32), FINITE),
    ],
    "copy": [(lambda x: jnp.array(x, copy=True) * 2.0, ROWS)],
    "cos": unary(lax.cos),
    "cosh": unary(lax.cosh),
    "cumlogsumexp": [(lambda x, r=r: lax.cumlogsumexp(x, 1, reverse=r), FINITE) for r in (False, True)],
    "cummax": [(lambda x, r=r: lax.cummax(x, 1, reverse=r), x) for r in (False, True) for x in (FINITE, ROWS, *TIES)],
    "cummin": [(lambda x, r=r: lax.cummin(x, 1, reverse=r), x) for r in (False, True) for x in (FINITE, ROWS, *TIES)],
    "cumprod": [(lambda x, r=r: lax.cumprod(x, 1, reverse=r), FINITE) for r in (False, True)],
    "cumsum": [(lambda x, r=r: lax.cumsum(x, 1, reverse=r), x) for r in (False, True) for x in (FINITE, ROWS)],
    "custom_jvp_call": [(_odd, FLOATS), (lambda x: jax.nn.relu(x) + jax.nn.softplus(x), FINITE)],
    "custom_vjp_call": [(_clipped, FLOATS)],
    "device_put": [(lambda x: jax.device_put(x) + 1.0, FINITE)],
    "digamma": unary(lax.digamma, POSITIVE[POSITIVE > 1e-20]),
    "dim_as_value": [(lambda x: x * x.shape[0] + jnp.sum(x) / x.shape[1], FINITE)],
    "div": binary(lax.div) + whole(lax.div) + [(lambda x: lax.div(x, np.int32(-1)), WHOLE)],
    "dot_general": [
        (lambda x: x @ x.T, ROWS),
        (lambda x: jnp.einsum("bi,bj->bij", x, x), FINITE),
        (lambda x: x @ x.T, EMPTY),
    ],
    "dynamic_slice": [(lambda x, i: lax.dynamic_slice(x, (i, 1), (2, 2)), FINITE, np.int32(i)) for i in (-9, 0, 1, 9)],
    "dynamic_update_slice": [
        (lambda x, u, i: lax.dynamic_update_slice(x, u, (i, i)), FINITE, ROWS[:2, :2], np.int32(i))
        for i in (-9, 0, 1, 9)
    ]
    + [(lambda x, u, i: lax.dynamic_update_slice(x, u, (i,)), FINITE[0], ROWS[0, :2], np.int32(1))]
    + [(lambda x, u: lax.dynamic_update_slice(x, u, ()), FINITE[0, 0], FINITE[0, 3])],
    "eq_to": [(lambda x, y: lax.eq_to_p.bind(x, y), *PAIRS)],
    "erf": unary(lax.erf),
    "erf_inv": unary(lax.erf_inv, UNIT),
    "erfc": unary(lax.erfc),
    "exp": unary(lax.exp),
    "exp2": unary(lax.exp2),
    "expm1": unary(lax.expm1),
    "floor": unary(lax.floor),
    "gather": [
        (lambda x, i, mode=mode: x.at[i].get(mode=mode), FINITE, i)
        for mode in ("fill", "clip", "promise_in_bounds")
        for i in ((AT,) if mode[0] == "p" else (AT, np.array([-9, 9, 1], np.int32)))
    ],
    "integer_pow": [(lambda x, n=n: lax.integer_pow(x, n), FLOATS) for n in (-2, -1, 0, 1, 2, 3)],
    "iota": [
        (lambda x: x + lax.broadcasted_iota(x.dtype, x.shape, 0) * lax.broadcasted_iota(x.dtype, x.shape, 1), FINITE)
    ],
    "is_finite": unary(lax.is_finite),
    "jit": [(jax.jit(lambda x: jnp.sin(x) * 2.0), FINITE)],
    "le_to": [(lambda x, y: lax.le_to_p.bind(x, y), *PAIRS)],
    "lgamma": unary(lax.lgamma, POSITIVE[POSITIVE > 1e-20]),
    "log": unary(lax.log),
    "log1p": unary(lax.log1p),
    "logistic": unary(lax.logistic),
    "lt_to": [(lambda x, y: lax.lt_to_p.bind(x, y), *PAIRS)],
    "max": binary(lax.max) + whole(lax.max),
    "min": binary(lax.min) + whole(lax.min),
    "mul": binary(lax.mul) + whole(lax.mul),
    "neg": [*unary(lax.neg), (lax.neg, WHOLE)],
    "nextafter": [(lax.nextafter, *PAIRS)],
    "not": [(lambda x: (~x, ~(x > 0)), WHOLE)],
    "optimization_barrier": [(lambda x: lax.optimization_barrier((x, x * 2.0)), FINITE)],
    "or": whole(lambda x, y: (x | y, (x > 0) | (y > 0))),
    "pad": [
        (lambda x, c=c: lax.pad(x, np.float32(1.5), c), FINITE)
        for c in (((1, 0, 2), (0, 2, 1)), ((-1, 1, 0), (1, -2, 1)))
    ]
    + [(lambda x: lax.pad(x, x[0, 0], ((1, 1, 0), (0, 0, 0))), FINITE)],
    "population_count": [(lax.population_count, WHOLE), (lambda x: lax.population_count(x.astype(jnp.uint16)), WHOLE)],
    "pow": [(lax.pow, np.abs(PAIRS[0]), PAIRS[1])],
    "reduce_and": [(lambda x: (jnp.all(x > 0, 0), jnp.all(x > 0)), x) for x in (FINITE, EMPTY)],
    "reduce_max": [
        *_two(lambda x: jnp.max(x, -1)),
        (lambda x: jnp.max(x, 0, initial=-9), WHOLE),
        (lambda x: jnp.max(x > 0), FINITE),
    ],
    "reduce_min": [
        *_two(lambda x: jnp.min(x, -1)),
        (lambda x: jnp.min(x, 0, initial=9), WHOLE),
        (lambda x: jnp.min(x > 0), FINITE),
    ],
    "reduce_or": [(lambda x: (jnp.any(x > 0, 0), jnp.any(x > 0)), x) for x in (FINITE, EMPTY)],
    "reduce_precision": [(lambda x, b=b: lax.reduce_precision(x, *b), FLOATS) for b in ((5, 10), (8, 7), (8, 23))],
    "reduce_prod": _two(lambda x: (jnp.prod(x, 0), jnp.prod(x)))[::2],
    "reduce_sum": [*_two(lambda x: (jnp.sum(x, 0), jnp.sum(x))), (jnp.sum, WHOLE)],
    "rem": [
        *binary(lax.rem),
        (lax.rem, FINITE, FINITE + 0.75),
        (lambda x: lax.rem(x, 0.3), FLOATS),
        *whole(lax.rem),
        *((lambda x, y=y: lax.rem(x, np.int32(y)), WHOLE) for y in (3, -1)),
    ],
    "remat2": [(jax.checkpoint(lambda x: jnp.sin(x) * x), FINITE)],
    "reshape": [(lambda x: x.reshape(x.shape[1], -1), FINITE), (lambda x: x.reshape(3, 0), EMPTY)],
    "rev": [(lambda x: lax.rev(x, (0, 1)), x) for x in (ROWS, EMPTY)],
    "round": [(lambda x, m=m: lax.round(x, m), x) for m in lax.RoundingMethod for x in (FLOATS, EMPTY)],
    "rsqrt": unary(lax.rsqrt),
    "scan": [(lambda x, r=r: _running(x, r), x) for r in (False, True) for x in (FINITE, ROWS)]
    + [(lambda x, r=r: _weak(x, r), x) for r in (False, True) for x in (FINITE, EMPTY)]
    + [(_handed_on, x) for x in (FINITE, EMPTY)]
    + [(lambda x: lax.scan(lambda c, _: (c * 0.5, c), x, length=3), FINITE)],  # one argument
    "select_n": [
        (lambda x, y: jnp.where(x > y, x, y), *PAIRS),
        (lambda i, x: lax.select_n(i % 3, x, -x, x * x), WHOLE, WHOLE),
    ],
    "sharding_constraint": [(lambda x: lax.with_sharding_constraint(x, HERE) * 2.0, ROWS)],
    "shift_left": [(lax.shift_left, *SHIFTS)],
    "shift_right_arithmetic": [(lax.shift_right_arithmetic, *SHIFTS)],
    "shift_right_logical": [
        (lax.shift_right_logical, *SHIFTS),
        (lambda x: lax.shift_right_logical(x, np.int32(40)), WHOLE),
    ],
    "sign": [*unary(lax.sign), (lax.sign, WHOLE)],
    "sin": unary(lax.sin),
    "sinh": unary(lax.sinh),
    "slice": [(lambda x: (lax.slice(x, (0, 1), (3, 4), (2, 2)), x[1:, :-1], x[:0]), FINITE)],
    "sort": [
        *_two(lambda x: (jnp.sort(x, -1), jnp.sort(x, 0))),
        (lambda x: lax.sort((jnp.round(x), x[:, ::-1], 2.0 * x), num_keys=2), FINITE),
    ],
    "split": [(lambda x: lax.split(x, (1, 2, 1), 1), ROWS)],
    "sqrt": unary(lax.sqrt),
    "square": unary(lax.square),
    "squeeze": [(lambda x: lax.squeeze(x[:, None], (1,)), x) for x in (ROWS, EMPTY)],
    "stack": [(lambda x: jnp.stack([x, 2.0 * x, x], 1), x) for x in (ROWS, EMPTY)],
    "stop_gradient": [(lambda x: lax.stop_gradient(x) * x, FINITE)],
    "sub": binary(lax.sub) + whole(lax.sub),
    "tan": unary(lax.tan, UNIT),
    "tanh": unary(lax.tanh),
    "tile": [(lambda x: jnp.tile(x, (2, 3)), x) for x in (ROWS, EMPTY)],
    "top_k": [(lambda x: lax.top_k(x, 2), x) for x in (FINITE, ROWS)],
    "transpose": [(lambda x: lax.transpose(x, (1, 0)), x) for x in (ROWS, EMPTY)],
    "unstack": [(lambda x: jnp.unstack(x, axis=1), x) for x in (ROWS, EMPTY)],
    "while": [(_countdown, FINITE, np.int32(n)) for n in (0, 1, 5)],
    "xor": whole(lambda x, y: (x ^ y, (x > 0) ^ (y > 0))),
    **{name: binary(function) + whole(function) for name, function in COMPARISONS.items()},
    **{
        name: [
            (f, FINITE, ONCE if name == "scatter-mul" else AT, FINITE[::-1] * 1.5),
            (f, FINITE, np.array([0, 1, 2], np.int32), ROWS[:3]),
        ]
        for name, f in SCATTERS.items()
    },
}


def primitives(jaxpr):
    """The names of all primitives in a jaxpr, the nested ones included."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for inner in jex_core.jaxprs_in_params(eqn.params):
            yield from primitives(getattr(inner, "jaxpr", inner))


# These two stand only in programs that are traced with symbolic sizes: test_programs.py has their cases.
SYMBOLIC = {"associative_scan", "dim_as_value"}


# Not JAX's: tests/bridge/modules/test_own_loss.py has its values and gradients.
OURS = {"torch_call"}


def test_every_rule_has_a_case_and_every_case_a_rule():
    assert set(CASES) | SYMBOLIC == set(RULES) - OURS


@pytest.mark.long
@pytest.mark.parametrize(("name", "number"), [(name, i) for name, cases in CASES.items() for i in range(len(cases))])
def test_value_and_gradient_at_special_values(name, number):
    function, *args = CASES[name][number]
    arrays = [jnp.asarray(x) for x in args]
    with jax.numpy_rank_promotion("allow"):
        assert name in {*primitives(jax.make_jaxpr(function)(*arrays).jaxpr), *SYMBOLIC}
        lowered = from_jax(function, dynamic=name != "unstack")
        assert_same(lowered(*map(to_torch, args)), function(*arrays), 3e-5, 1e-6)
        places = [i for i, x in enumerate(args) if x.dtype.kind == "f" and name not in NO_GRADIENT]
        expected = jax_gradient(function, arrays, places)
    with np.errstate(over="ignore", invalid="ignore"):
        unlike = UNLIKE_JAX[name](*args) if name in UNLIKE_JAX and places else False
    assert not np.size(unlike) or not np.all(unlike)
    for actual, wanted in zip(torch_gradient(lowered, args, places), expected, strict=True):
        compared = np.broadcast_to(np.logical_not(unlike), wanted.shape)
        np.testing.assert_allclose(to_numpy(actual)[compared], to_numpy(wanted)[compared], rtol=1e-4, atol=1e-5)
