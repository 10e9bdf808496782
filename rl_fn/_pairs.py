"""What preference losses share: shapes, log-ratios of a pair, and a softplus that holds at any argument."""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Integer

from rl_fn._numerics import POSITIVE, Array, Constant, Number, Range, as_float, divide, keep, numbers, same_shape

Pairs = Float[Array, "*batch"]
PairMask = Bool[Array, "*batch"]
Lengths = Float[Array, "*batch"] | Integer[Array, "*batch"]


_SMOOTHING = Range("must be in [0, 0.5)", lambda x: 0 <= x < 0.5)


def beta_of(x: jax.Array, beta: Number) -> Constant:
    """Check β > 0, for arithmetic with x."""
    return numbers(x.dtype, POSITIVE, beta=beta)[0]


def smoothing_of(x: jax.Array, label_smoothing: Number) -> Constant:
    """Check that the label smoothing is in [0, ½), for arithmetic with x."""
    return numbers(x.dtype, _SMOOTHING, label_smoothing=label_smoothing)[0]


def log_ratios(
    chosen: Array, rejected: Array, ref_chosen: Array, ref_rejected: Array, mask: Array | None
) -> tuple[jax.Array, jax.Array]:
    """Give log π/π_ref of both sides of each pair, zero where masked."""
    same_shape(chosen=chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected, mask=mask)
    c, r, ref_c, ref_r = as_float(chosen, rejected, ref_chosen, ref_rejected)
    return keep(c, mask) - keep(ref_c, mask), keep(r, mask) - keep(ref_r, mask)


def both(chosen: Array, rejected: Array, mask: Array | None) -> tuple[jax.Array, jax.Array]:
    """Both sides of each pair in one dtype, zero where masked."""
    same_shape(chosen=chosen, rejected=rejected, mask=mask)
    c, r = as_float(chosen, rejected)
    return keep(c, mask), keep(r, mask)


def per_token(x: jax.Array, lengths: Array, mask: Array | None) -> jax.Array:
    """Divide x by the length, zero where masked or where the length is 0."""
    counts = jnp.asarray(lengths).astype(x.dtype)
    return divide(x, keep(counts, mask))


def softplus(x: jax.Array) -> jax.Array:
    """log(1 + eˣ) = −log σ(−x): exact to rounding for every x, with all its derivatives."""
    # A selection between two forms of one function. max(x, 0) and |x| have kinks at 0, where policies are equal: the
    # slope σ(0) = ½ or the curvature ¼ would come out as 0.
    positive = x > 0
    return jnp.where(positive, x, 0.0) + jnp.log1p(jnp.exp(jnp.where(positive, -x, x)))


def smoothed_logistic(z: jax.Array, label_smoothing: Constant) -> jax.Array:
    """−(1 − ε) log σ(z) − ε log σ(−z), in its form with one softplus: log(1 + e^{−z}) + εz."""
    return softplus(-z) + label_smoothing * z
