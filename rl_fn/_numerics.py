"""What every module needs: one dtype rule, one exponential that stays finite, sums and deviations under a mask."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Bool, Float, Integer

# At run time NumPy arrays are welcome too; statically everything is a jax.Array, which is what comes back.
if TYPE_CHECKING:
    Array = jax.Array
else:
    Array = jax.Array | np.ndarray
Shape = tuple[Any, ...]  # of int, or of jax.export's symbolic dimensions
# A hyper-parameter: Python's or NumPy's number, or an array without axes, which may be traced.
Number = float | int | np.floating | np.integer | Float[Array, ""] | Integer[Array, ""]
# The same, checked and ready for arithmetic (see numbers).
Constant = float | int | jax.Array
Tokens = Float[Array, "*batch T"]
Mask = Bool[Array, "*batch T"]
Segments = Integer[Array, "*batch T"]


class Range(NamedTuple):
    """What a hyper-parameter may be: the words of the message, and the test of a number."""

    words: str
    holds: Callable[[float], bool]


ANY = Range("must not be NaN", lambda x: x == x)
POSITIVE = Range("must be positive", lambda x: x > 0)
NOT_NEGATIVE = Range("must not be negative", lambda x: x >= 0)
AT_LEAST_ONE = Range("must be at least 1", lambda x: x >= 1)
UNIT = Range("must be in [0, 1]", lambda x: 0 <= x <= 1)


def require(condition: bool | jax.Array, message: str) -> None:
    """Raise ValueError for what a caller did; a condition that is traced cannot be looked at, and passes."""
    if not isinstance(condition, Tracer) and not condition:
        raise ValueError(message)


def _refused(x: Number | Array, legal: Range) -> bool:
    """Whether x is not legal. An array is read only if it is one number, known, and not every number is legal."""
    if isinstance(x, float | int):
        return not legal.holds(x)
    unread = legal is ANY or isinstance(x, Tracer) or np.ndim(x) > 0
    return not (unread or legal.holds(x.item()))


def _number(name: str, given: Any) -> Any:
    """Return a hyper-parameter as Python's number, or the array that it is."""
    if given is None or isinstance(given, str | bytes):
        raise TypeError(f"{name} must be a number, got {given!r}")
    return given.item() if isinstance(given, np.generic) else given


def numbers(dtype: jnp.dtype, legal: Range, label: str | None = None, /, **values: Number) -> list[Constant]:
    """Hyper-parameters by name, checked and ready for arithmetic: Python's numbers, or scalar arrays of the dtype.

    Python's numbers stay what they are, so that the arithmetic between them is Python's; NumPy's become Python's, which
    take the dtype of the arrays they meet. The message names one value, or under a label all of them.
    """
    result: list[Constant] = []
    for name, given in values.items():
        x = _number(name, given)
        if _refused(x, legal):
            got = ", ".join(f"{n}={v}" for n, v in values.items()) if label else x
            raise ValueError(f"{label or name} {legal.words}, got {got}")
        if not isinstance(x, float | int):
            require(np.shape(x) == (), f"{name} must be a number, got an array of shape {np.shape(x)}")
            x = jnp.asarray(x).astype(dtype)
        result.append(x)
    return result


def per_row(shape: Shape, legal: Range, /, **values: Number | Array) -> list[Constant]:
    """Parameters by name, each a number (checked) or an array of the shape, one entry a row."""
    result: list[Constant] = []
    for name, given in values.items():
        x = _number(name, given)
        if _refused(x, legal):
            raise ValueError(f"{name} {legal.words}, got {x}")
        if np.shape(x) not in ((), shape):
            raise ValueError(f"{name} must be a number or one per row: shape {shape}, got {np.shape(x)}")
        result.append(x if isinstance(x, float | int) else jnp.asarray(x))
    return result


def repeating(shape: Shape, legal: Range = ANY, /, **values: Number | Array) -> list[Constant]:
    """Parameters by name, each a number (checked) or an array of the shape, with 1 where an axis repeats."""
    result: list[Constant] = []
    for name, given in values.items():
        x = _number(name, given)
        if _refused(x, legal):
            raise ValueError(f"{name} {legal.words}, got {x}")
        own = np.shape(x)
        fits = own == () or (len(own) == len(shape) and all(n in (1, m) for n, m in zip(own, shape, strict=True)))
        if not fits:
            raise ValueError(f"{name} must be a number or of shape {shape}, 1 where an axis repeats, got {own}")
        result.append(x if isinstance(x, float | int) else jnp.asarray(x))
    return result


def has_shape(shape: Shape, /, **arrays: Array | None) -> None:
    """Raise ValueError unless each array that is there has the shape: what broadcasts by accident is a wrong number."""
    for name, x in arrays.items():
        if x is not None and np.shape(x) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {np.shape(x)}")


def same_shape(**arrays: Array | None) -> None:
    """Raise ValueError unless all arrays that are there have the shape of the first."""
    first, shape = "", None
    for name, x in arrays.items():
        if x is None:
            continue
        if shape is None:
            first, shape = name, np.shape(x)
        elif np.shape(x) != shape:
            raise ValueError(f"{name} must have the shape of {first}, {shape}, got {np.shape(x)}")


def known(*values: Constant) -> bool:
    """Whether all are Python's numbers, so that a branch may depend on them."""
    return all(isinstance(x, float | int) for x in values)


def present(coefficient: Number) -> bool:
    """Whether a term with this coefficient is there: a known 0 leaves it out, a traced number may be anything."""
    return isinstance(coefficient, Tracer) or bool(coefficient)


def log(x: Constant) -> Constant:
    """Take log x of a positive hyper-parameter, in Python's precision where the number is known."""
    return float(np.log(x)) if isinstance(x, float | int) else jnp.log(x)


def log1p(x: Constant) -> Constant:
    """Take log(1 + x), as log."""
    return float(np.log1p(x)) if isinstance(x, float | int) else jnp.log1p(x)


def as_float(*arrays: Array | Number) -> tuple[jax.Array, ...]:
    """All arrays in one dtype: float64 if any array is float64 (x64 enabled), else float32."""
    converted = [jnp.asarray(x) for x in arrays]
    wide = any(c.dtype == jnp.float64 for x, c in zip(arrays, converted, strict=True) if hasattr(x, "dtype"))
    return tuple(c.astype(jnp.float64 if wide else jnp.float32) for c in converted)


def as_mask(mask: Array) -> jax.Array:
    """Return a boolean array; an integer mask is refused because ~mask and sums would silently mean something else."""
    mask = jnp.asarray(mask)
    require(mask.dtype == jnp.bool_, f"mask must be boolean (True = counts), got dtype {mask.dtype}")
    return mask


def as_ids(ids: Array | int) -> jax.Array:
    """Token, segment, group or state ids, and counts of entries, as int32; with x64 what may be wider as int64.

    A size compared with a narrower id would be cast to the id's type, and wrap around.
    """
    array = jnp.asarray(ids)
    enabled = bool(jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue]
    wide = enabled and array.dtype in (jnp.int64, jnp.uint64, jnp.uint32)
    dtype = jnp.int64 if wide else jnp.int32
    if isinstance(ids, np.ndarray) and not np.can_cast(ids.dtype, dtype):
        limits = np.iinfo(dtype)
        lost = ids[(ids < limits.min) | (ids > limits.max)]
        require(lost.size == 0, f"ids must fit into {limits.dtype} (int64 with jax_enable_x64), got {lost[:1]}")
    return array.astype(dtype)


def keep(x: jax.Array, mask: Array | None) -> jax.Array:
    """Return x where the mask is True, exactly zero (value and gradient) elsewhere."""
    return x if mask is None else jnp.where(as_mask(mask), x, jnp.zeros_like(x))


def exp_limit(dtype: jnp.dtype) -> float:
    """Where the exponential leaves its curve for its tangent: e⁶⁴ = 6.2e27 in float32, e⁶⁹⁰ = 4.6e299 in float64.

    What is left below the largest number, 10 decades, is for log-ratios of 10⁴ (a token that one of two policies all
    but excludes) and for the sums and weights that come after.
    """
    return 690.0 if dtype == jnp.float64 else 64.0


def exp(x: jax.Array) -> jax.Array:
    """Return eˣ up to exp_limit, its tangent e^c(1 + x − c) beyond: finite, increasing, gradient finite and not 0."""
    c = exp_limit(x.dtype)
    return jnp.exp(jnp.minimum(x, c)) * (1.0 + (jnp.maximum(x, c) - c))


def own_gradient(x: jax.Array) -> jax.Array:
    """Return x − sg[x]: zeros with the gradient of x; at −inf, where the difference would be NaN, without one."""
    x = jnp.where(x == -jnp.inf, 0.0, x)
    return x - jax.lax.stop_gradient(x)


def expm1(x: jax.Array) -> jax.Array:
    """Return eˣ − 1 without cancellation near zero, continued by its tangent beyond exp_limit."""
    c = exp_limit(x.dtype)
    low = jnp.minimum(x, c)
    # The slope is e^low, not the constant e^c: at an ordinary x the branch not taken has gradient 0 · slope · weight,
    # and a large weight must not make the product ∞ · 0.
    return jnp.expm1(low) + jnp.exp(low) * (jnp.maximum(x, c) - c)


def divide(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """Numerator / denominator, and 0 where the denominator is 0; the gradient is finite in both cases."""
    empty = denominator == 0
    return jnp.where(empty, jnp.zeros_like(numerator), numerator / jnp.where(empty, 1.0, denominator))


def sqrt(x: jax.Array) -> jax.Array:
    """√x with gradient 0 instead of infinity at x = 0; 0 below it, and NaN of NaN."""
    nothing = x <= 0
    return jnp.where(nothing, 0.0, jnp.sqrt(jnp.where(nothing, 1.0, x)))


def magnitude(x: jax.Array) -> jax.Array:
    """|x| with gradient 0 at 0, where jnp.abs has 1: equal policies must not be pushed either way."""
    return jnp.sign(x) * x


def deviations(
    x: jax.Array, mask: jax.Array, axis: int | tuple[int, ...] | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Mean, x − mean (zero where masked) and count over the masked-in entries of axis, dimensions kept.

    The mean is taken of the distances to one entry, so equal entries deviate by exactly 0 and a large common offset
    costs no precision.
    """
    counted = as_mask(mask)
    count = jnp.sum(counted, axis=axis, keepdims=True, dtype=x.dtype)
    anchor = jax.lax.stop_gradient(jnp.max(x, axis=axis, keepdims=True, where=counted, initial=-jnp.inf))
    anchor = jnp.where(count > 0, anchor, 0.0)
    distance = jnp.where(counted, x - anchor, 0.0)
    mean_distance = divide(jnp.sum(distance, axis=axis, keepdims=True), count)
    return anchor + mean_distance, jnp.where(counted, distance - mean_distance, 0.0), count


def variance(
    deviation: jax.Array, count: jax.Array, axis: int | tuple[int, ...] | None, ddof: Constant = 1
) -> jax.Array:
    """Σ deviation² / (count − ddof), dimensions kept; 0 where count ≤ ddof."""
    squares = jnp.sum(jnp.square(deviation), axis=axis, keepdims=True)
    return divide(squares, jnp.maximum(count - ddof, 0.0))
