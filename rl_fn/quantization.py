"""Symmetric quantisation of weights to int8 and fp8: the reference of the kernels, with scales always fresh."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from rl_fn._numerics import UNIT, Array, Constant, Number, Range, as_float, divide, has_shape, numbers, require

GRANULARITIES = ("tensor", "channel", "block")
FP8_MAX = 448.0
_HALF_RANGE = Range("must be within [127, 128]", lambda x: 127 <= x <= 128)
# A scale that would be 0 becomes this, as in compressed-tensors: all-zero weights quantise to zeros.
_EPS = float(np.finfo(np.float32).eps)


class Quantized(NamedTuple):
    """Codes and the scales they are multiplied with; see dequantize."""

    values: Array
    scale: Array


def _divide_exactly(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a / b rounded once; b is broadcast to a.

    XLA turns a division by a constant or by a broadcast array into a multiplication with the rounded inverse, and the
    largest element of a row then lands on either side of the tie 127.5. It does not look through a barrier.
    """
    return a / jax.lax.optimization_barrier(jnp.broadcast_to(b, a.shape))


def _scaled(
    weight: jax.Array, absmax: jax.Array, largest: Constant, bound: tuple[float, float]
) -> tuple[jax.Array, ...]:
    """Weight / scale, clamped, and the scale; a group that is not finite has scale NaN and codes 0."""
    finite = jnp.isfinite(absmax)
    scale = _divide_exactly(absmax, jnp.asarray(largest, absmax.dtype))
    scale = jnp.where(scale == 0, _EPS, scale)
    ratio = _divide_exactly(weight, jnp.where(finite, scale, 1.0))
    codes = jnp.where(jnp.broadcast_to(finite, weight.shape), jnp.clip(ratio, *bound), 0.0)
    return codes, jnp.where(finite, scale, jnp.nan)


def _absmax(x: jax.Array, axis: int | tuple[int, ...] | None) -> jax.Array:
    return jnp.max(jnp.abs(x), axis=axis, keepdims=True)


def quantize_int8(weight: Float[Array, "..."], *, axis: int | None = -1, half_range: Number = 127.5) -> Quantized:
    """Quantise weights symmetrically to int8, one scale for each row along an axis.

    scale = max|w| / half_range;  q = clamp(round(w / scale), −128, 127), halves to even

    Args:
        weight: of any shape, usually `out in`.
        axis: the axis that shares a scale: −1 gives one for each output channel. None: one for the whole tensor.
            The axis is static.
        half_range: 127.5 as compressed-tensors has it (the element of the largest magnitude becomes 127 or −128, up to
            half a step away); 127 as in most kernels (it becomes ±127, exactly). Quantising again what was
            dequantised keeps all codes with 127; with 127.5 the scale shrinks a little and −127 may become −128.

    Returns:
        Quantized(values, scale): int8 of weight's shape; float32 scales with the reduced axes kept at length 1. A row
        of zeros has scale 2⁻²³ and codes 0. A row with NaN or infinity has scale NaN and codes 0: it dequantises to NaN
        instead of hiding.

    Raises:
        ValueError: unless 127 ≤ half_range ≤ 128, or for a weight without elements.

    Reference:
        Jacob et al., arXiv 1712.05877, section 2.1, for the scheme; compressed-tensors 0.20 for the constants.

    >>> import jax.numpy as jnp
    >>> q = quantize_int8(jnp.array([[127.5, -1.0, 0.4]]))
    >>> q.values.tolist(), q.scale.tolist()
    ([[127, -1, 0]], [[1.0]])

    """
    (half_range,) = numbers(jnp.dtype(jnp.float32), _HALF_RANGE, half_range=half_range)
    require(0 not in weight.shape, f"weight must not be empty, got shape {weight.shape}")
    w = jnp.asarray(weight).astype(jnp.float32)
    codes, scale = _scaled(w, _absmax(w, axis), half_range, (-128.0, 127.0))
    return Quantized(jnp.round(codes).astype(jnp.int8), scale)


def _blocks(x: jax.Array, block: int) -> jax.Array:
    """`... out in` → `... out/b b in/b b`, padded with zeros to whole blocks."""
    rows, columns = (-(-size // block) for size in x.shape[-2:])
    pad = [(0, 0)] * (x.ndim - 2) + [(0, rows * block - x.shape[-2]), (0, columns * block - x.shape[-1])]
    return jnp.pad(x, pad).reshape(*x.shape[:-2], rows, block, columns, block)


def quantize_fp8(weight: Float[Array, "*batch out in"], *, granularity: str = "channel", block: int = 128) -> Quantized:
    """Quantise weights symmetrically to fp8 (e4m3fn), one scale for a tensor, an output channel or a square block.

    scale = max|w| / 448;  q = e4m3(clamp(w / scale, −448, 448)), to the nearest, halves to even

    Args:
        weight: `*batch out in`; batch dimensions (experts) have scales of their own.
        granularity: "tensor", "channel" (a row of in) or "block" (`block` × `block` elements).
        block: side of a block, static; the last blocks of a row and column may be smaller.

    Returns:
        Quantized(values, scale): float8_e4m3fn of weight's shape; float32 scales, `*batch 1 1`, `*batch out 1` or
        `*batch ⌈out/block⌉ ⌈in/block⌉`. Zeros have scale 2⁻²³. What shares a scale with NaN or infinity has scale NaN
        and codes 0: it dequantises to NaN instead of hiding.

    Raises:
        ValueError: for an unknown granularity, a block below 1, or a weight without elements.

    Reference:
        Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433; compressed-tensors 0.20 for the constants.

    >>> import jax.numpy as jnp
    >>> q = quantize_fp8(jnp.array([[448.0, -1.06, 0.0]]))
    >>> q.values.astype(jnp.float32).tolist(), q.scale.tolist()
    ([[448.0, -1.0, 0.0]], [[1.0]])

    """
    require(granularity in GRANULARITIES, f"granularity must be one of {GRANULARITIES}, got {granularity!r}")
    require(block >= 1, f"block must be at least 1, got {block}")
    require(0 not in weight.shape, f"weight must not be empty, got shape {weight.shape}")
    w = jnp.asarray(weight).astype(jnp.float32)
    if granularity == "block":
        blocks = _blocks(w, block)
        codes, scale = _scaled(blocks, _absmax(blocks, (-3, -1)), FP8_MAX, (-FP8_MAX, FP8_MAX))
        whole = (*w.shape[:-2], blocks.shape[-4] * block, blocks.shape[-2] * block)
        codes = codes.reshape(whole)[..., : w.shape[-2], : w.shape[-1]]
        scale = scale.reshape(*w.shape[:-2], blocks.shape[-4], blocks.shape[-2])
    else:
        axis = -1 if granularity == "channel" else (-2, -1)
        codes, scale = _scaled(w, _absmax(w, axis), FP8_MAX, (-FP8_MAX, FP8_MAX))
    return Quantized(codes.astype(jnp.float8_e4m3fn), scale)


def dequantize(values: Array, scale: Float[Array, "..."], *, block: int | None = None) -> Float[Array, "..."]:
    """Multiply codes with their scales.

    w ≈ q · scale

    Args:
        values: int8 or float8 codes, of any shape; with blocks `*batch out in`.
        scale: as quantize_int8 or quantize_fp8 return it: of values' rank, with 1 where it is shared.
        block: side of the blocks, for scales `*batch ⌈out/block⌉ ⌈in/block⌉`; static.

    Returns:
        float32 of values' shape; differentiable in the scale.

    Raises:
        ValueError: if the scale's shape does not belong to the values.

    Reference:
        Jacob et al., arXiv 1712.05877, equation 1, with zero-point 0.

    >>> import jax.numpy as jnp
    >>> dequantize(jnp.array([[2, -3]], jnp.int8), jnp.array([[0.5]])).tolist()
    [[1.0, -1.5]]

    """
    codes = jnp.asarray(values).astype(jnp.float32)
    (factor,) = as_float(scale)
    if block is not None:
        expected = (*codes.shape[:-2], *(-(-size // block) for size in codes.shape[-2:]))
        require(factor.shape == expected, f"scale must have shape {expected} for blocks of {block}, got {factor.shape}")
        factor = jnp.repeat(jnp.repeat(factor, block, axis=-2), block, axis=-1)
        factor = factor[..., : codes.shape[-2], : codes.shape[-1]]
    fits = factor.ndim == codes.ndim and all(f in (1, c) for f, c in zip(factor.shape, codes.shape, strict=True))
    require(fits, f"scale {factor.shape} does not belong to values {codes.shape}; are these blocks?")
    return codes.astype(factor.dtype) * jnp.broadcast_to(factor, codes.shape)


def smooth_scales(
    activation_absmax: Float[Array, " in"], weight: Float[Array, "out in"], *, alpha: Number = 0.5
) -> Float[Array, " in"]:
    """Scales that move outliers from the activations into the weights (SmoothQuant).

    sⱼ = max|xⱼ|^α / max|wⱼ|^(1−α);  x / s and w · s then give the same product

    Args:
        activation_absmax: largest magnitude of each input channel, ≥ 0, `in`.
        weight: `out in`.
        alpha: α in [0, 1]: how much of the difficulty goes into the weights.

    Returns:
        s, `in`, > 0; 1 for a channel whose activations or weights are all zero.

    Raises:
        ValueError: for α outside [0, 1].

    Reference:
        Xiao et al. (SmoothQuant), arXiv 2211.10438, equation 4.

    >>> import jax.numpy as jnp
    >>> smooth_scales(jnp.array([16.0, 0.0]), jnp.array([[-4.0, 1.0], [1.0, 2.0]])).tolist()
    [2.0, 1.0]

    """
    has_shape(weight.shape[1:], activation_absmax=activation_absmax)
    x, w = as_float(activation_absmax, weight)
    (alpha,) = numbers(x.dtype, UNIT, alpha=alpha)
    largest = jnp.max(jnp.abs(w), axis=0)
    used = ~((x <= 0) | (largest <= 0))
    x, largest = jnp.where(used, x, 1.0), jnp.where(used, largest, 1.0)
    return divide(jnp.power(x, alpha), jnp.power(largest, 1.0 - alpha))
