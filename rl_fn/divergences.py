"""KL estimators from two log-probabilities of one token, and exact divergences from two rows of logits.

d = log π − log π_ref of a token sampled from π. As a loss (differentiated through log π): k1 has zero expected
gradient, k2 exactly the reverse-KL gradient, k3 the forward-KL one. As a reward penalty k1 is the unbiased choice.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from rl_fn._numerics import Array, Mask, Tokens, as_float, exp, keep, magnitude
from rl_fn.logprobs import log_softmax


def _difference(logprobs: Array, ref_logprobs: Array, mask: Array | None) -> jax.Array:
    new, ref = as_float(logprobs, ref_logprobs)
    return keep(new, mask) - keep(ref, mask)


def kl_k1(logprobs: Tokens, ref_logprobs: Tokens, mask: Mask | None = None) -> Tokens:
    """Unbiased, high-variance estimator of KL(π‖π_ref); as a loss its expected gradient is zero.

    k1 = d = log π − log π_ref

    Args:
        logprobs: log π of the sampled tokens, in nats, `*batch T`.
        ref_logprobs: log π_ref of the same tokens, `*batch T`.
        mask: True where a token counts, `*batch T`; without it every token does.

    Returns:
        `*batch T`, zero where masked.

    Raises:
        ValueError: if the mask is not boolean.

    Reference:
        Schulman, "Approximating KL Divergence" (2020), k1.

    >>> import jax.numpy as jnp
    >>> kl_k1(jnp.array([-1.0]), jnp.array([-3.0])).tolist()
    [2.0]

    """
    return _difference(logprobs, ref_logprobs, mask)


def kl_k2(logprobs: Tokens, ref_logprobs: Tokens, mask: Mask | None = None) -> Tokens:
    """Low-variance, biased estimator of KL(π‖π_ref); as a loss it has exactly the reverse-KL gradient.

    k2 = d²/2

    Args:
        logprobs: log π of the sampled tokens, in nats, `*batch T`.
        ref_logprobs: log π_ref of the same tokens, `*batch T`.
        mask: True where a token counts, `*batch T`; without it every token does.

    Returns:
        `*batch T`, zero where masked.

    Raises:
        ValueError: if the mask is not boolean.

    Reference:
        Schulman, "Approximating KL Divergence" (2020), k2.

    >>> import jax.numpy as jnp
    >>> kl_k2(jnp.array([-1.0]), jnp.array([-3.0])).tolist()
    [2.0]

    """
    return 0.5 * jnp.square(_difference(logprobs, ref_logprobs, mask))


def kl_k3(logprobs: Tokens, ref_logprobs: Tokens, mask: Mask | None = None) -> Tokens:
    """Low-variance, unbiased, never negative estimator of KL(π‖π_ref); as a loss it has the forward-KL gradient.

    k3 = e^{−d} + d − 1

    Below |d| = 0.5 it is summed as d²/2 − d³/6 + …, where the closed form would cancel; beyond −d = 64 (float32) the
    exponential goes on as its tangent, so that value and gradient stay finite (docs/numerics.md).

    Args:
        logprobs: log π of the sampled tokens, in nats, `*batch T`.
        ref_logprobs: log π_ref of the same tokens, `*batch T`.
        mask: True where a token counts, `*batch T`; without it every token does.

    Returns:
        `*batch T`, ≥ 0, zero where masked.

    Raises:
        ValueError: if the mask is not boolean.

    Reference:
        Schulman, "Approximating KL Divergence" (2020), k3; Shao et al., arXiv 2402.03300, equation 4.

    >>> import jax.numpy as jnp
    >>> kl_k3(jnp.array([0.0, 0.0]), jnp.array([0.0, -90.0])).tolist()
    [0.0, 89.0]

    """
    d = _difference(logprobs, ref_logprobs, mask)
    near = jnp.abs(d) < 0.5
    small = jnp.where(near, d, 0.0)
    # Horner form of Σ_{n≥2} (−d)ⁿ/n!: the first term left out is 4e-8 (float64: 2e-13) of the sum at |d| = 0.5. Beyond,
    # e^{−d} − 1 has lost less than three bits, and costs a quarter of expm1.
    series = 1.0
    for n in range(12 if d.dtype == jnp.float64 else 8, 2, -1):
        series = 1.0 - small * (1.0 / n) * series
    return jnp.where(near, 0.5 * jnp.square(small) * series, (exp(-d) - 1.0) + d)


def kl_abs(logprobs: Tokens, ref_logprobs: Tokens, mask: Mask | None = None) -> Tokens:
    """Absolute log-ratio, a penalty that is neither a KL estimator nor has a KL gradient.

    |d|

    Args:
        logprobs: log π of the sampled tokens, in nats, `*batch T`.
        ref_logprobs: log π_ref of the same tokens, `*batch T`.
        mask: True where a token counts, `*batch T`; without it every token does.

    Returns:
        `*batch T`, ≥ 0, zero where masked; the gradient at d = 0 is 0.

    Raises:
        ValueError: if the mask is not boolean.

    Reference:
        None: a penalty found in practice.

    >>> import jax.numpy as jnp
    >>> kl_abs(jnp.array([-3.0]), jnp.array([-1.0])).tolist()
    [2.0]

    """
    return magnitude(_difference(logprobs, ref_logprobs, mask))


def kl_straight_through(value: Float[Array, "*shape"], gradient: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Take the value of one estimator with the gradient of another.

    gradient + sg(value − gradient)

    Args:
        value: estimator whose number is wanted, say kl_k3(...), any shape.
        gradient: estimator whose gradient is wanted, say kl_k2(...), the same shape.

    Returns:
        The same shape; equal to value to rounding.

    Raises:
        TypeError: if the shapes differ (from JAX).

    Reference:
        Bengio et al., arXiv 1308.3432, for the straight-through idea.

    >>> import jax.numpy as jnp
    >>> kl_straight_through(jnp.array([1.0]), jnp.array([5.0])).tolist()
    [1.0]

    """
    v, g = as_float(value, gradient)
    return g + jax.lax.stop_gradient(v - g)


def kl_categorical(logits: Float[Array, "*batch V"], ref_logits: Float[Array, "*batch V"]) -> Float[Array, "*batch"]:
    """Exact KL divergence between two categorical distributions.

    KL(π‖π_ref) = Σᵥ πᵥ (log πᵥ − log π_refᵥ)

    Args:
        logits: logits of π, `*batch V`; −inf excludes an entry.
        ref_logits: logits of π_ref, `*batch V`.

    Returns:
        `*batch`, ≥ 0 to rounding; +inf where π reaches an entry that π_ref excludes.

    Raises:
        TypeError: if the shapes differ (from JAX).

    Reference:
        Kullback & Leibler, On Information and Sufficiency (1951).

    >>> import jax.numpy as jnp
    >>> kl_categorical(jnp.array([0.0, 0.0]), jnp.array([0.0, -jnp.inf])).tolist()
    inf

    """
    new, ref = as_float(logits, ref_logits)
    log_p, log_q = log_softmax(new), log_softmax(ref)
    reached = log_p != -jnp.inf
    shared = reached & (log_q != -jnp.inf)
    p = jnp.where(reached, jnp.exp(jnp.where(reached, log_p, 0.0)), 0.0)
    difference = jnp.where(shared, log_p, 0.0) - jnp.where(shared, log_q, 0.0)
    divergence = jnp.sum(jnp.where(shared, p * difference, 0.0), axis=-1)
    return jnp.where(jnp.any(reached & ~shared & (p > 0), axis=-1), jnp.inf, divergence)


def entropy(logits: Float[Array, "*batch V"]) -> Float[Array, "*batch"]:
    """Entropy of a categorical distribution, in nats.

    H = −Σᵥ πᵥ log πᵥ, with 0 log 0 = 0

    Args:
        logits: `*batch V`; −inf excludes an entry.

    Returns:
        `*batch`, between 0 and log V, finite (gradient too) for a truncated distribution.

    Raises:
        TypeError: if logits are not floating point (with annotations checked).

    Reference:
        Shannon, A Mathematical Theory of Communication (1948), section 6.

    >>> import jax.numpy as jnp
    >>> print(entropy(jnp.array([0.0, 0.0, -jnp.inf])).round(4))
    0.6931

    """
    (z,) = as_float(logits)
    log_p = log_softmax(z)
    reached = log_p != -jnp.inf
    finite = jnp.where(reached, log_p, 0.0)
    return -jnp.sum(jnp.where(reached, jnp.exp(finite) * finite, 0.0), axis=-1)
