"""KL estimators from two log-probabilities of one token, and exact divergences from two rows of logits.

d = log π − log π_ref of a token sampled from π. As a loss (differentiated through log π): k1 has zero expected
gradient, k2 exactly the reverse-KL gradient, k3 the forward-KL one. As a reward penalty k1 is the unbiased choice.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from rl_fn._numerics import (
    POSITIVE,
    Array,
    Mask,
    Number,
    Tokens,
    as_float,
    exp,
    expm1,
    keep,
    magnitude,
    numbers,
    same_shape,
)


def _difference(logprobs: Array, ref_logprobs: Array, mask: Array | None) -> jax.Array:
    same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs, mask=mask)
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
        ValueError: if the shapes differ.

    Reference:
        Bengio et al., arXiv 1308.3432, for the straight-through idea.

    >>> import jax.numpy as jnp
    >>> kl_straight_through(jnp.array([1.0]), jnp.array([5.0])).tolist()
    [1.0]

    """
    same_shape(value=value, gradient=gradient)
    v, g = as_float(value, gradient)
    return g + jax.lax.stop_gradient(v - g)


def kl_importance_corrected(
    logprobs: Tokens,
    old_logprobs: Tokens,
    ref_logprobs: Tokens,
    mask: Mask | None = None,
    *,
    log_clip: Number | None = None,
) -> Tokens:
    """Estimator of KL(π‖π_ref) from tokens of π_old whose value and gradient, as a loss, are both unbiased.

    ρ k3 = ρ (e^{−d} + d − 1);  ρ = π/π_old,  d = log π − log π_ref

    The gradient flows through ρ too: that is what turns k3's forward-KL gradient into the reverse-KL one. Unbiased per
    token: the tokens before it still come from π_old. A product of two exponentials, it overflows float32 once log ρ
    and −d together pass about 85; `log_clip` bounds both.

    Args:
        logprobs: log π of the sampled tokens, in nats, `*batch T`.
        old_logprobs: log π_old of the same tokens, π_old being the policy that sampled them, `*batch T`.
        ref_logprobs: log π_ref of the same tokens, `*batch T`.
        mask: True where a token counts, `*batch T`; without it every token does.
        log_clip: |log ρ| and |d| are held at this many nats (their gradient is then 0); none by default.

    Returns:
        `*batch T`, ≥ 0, zero where masked.

    Raises:
        ValueError: if log_clip is not positive.

    Reference:
        DeepSeek-AI (DeepSeek-V3.2), arXiv 2512.02556 (unbiased KL estimate).

    >>> import jax.numpy as jnp
    >>> new, old, ref = jnp.log(jnp.array([0.5])), jnp.log(jnp.array([0.25])), jnp.log(jnp.array([0.5]))
    >>> print(kl_importance_corrected(new, old, ref), kl_importance_corrected(old, old, ref).round(4))
    [0.] [0.3069]

    """
    same_shape(logprobs=logprobs, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs, mask=mask)
    new, old, ref = as_float(logprobs, old_logprobs, ref_logprobs)
    new, old, ref = keep(new, mask), keep(old, mask), keep(ref, mask)
    log_rho, d = new - old, new - ref
    if log_clip is not None:
        (log_clip,) = numbers(new.dtype, POSITIVE, log_clip=log_clip)
        log_rho, d = jnp.clip(log_rho, -log_clip, log_clip), jnp.clip(d, -log_clip, log_clip)
    # k3's own derivative passes through its continuation beyond 64 nats, where a large ratio overflows (∞ · 0). The
    # slope 1 − e^{−d} is finite wherever the product is. Taken half way to d, it gives the curvature e^{−d} too.
    fixed = jax.lax.stop_gradient(d)
    k3 = kl_k3(fixed, jnp.zeros_like(fixed)) - expm1(-0.5 * (fixed + d)) * (d - fixed)
    return exp(log_rho) * k3
