"""Exact divergences between two categorical distributions, from their logits, and the KL estimate made on-policy."""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from rl_fn._numerics import Array, Number, Range, as_float, magnitude, numbers, same_shape
from rl_fn.logprobs.row_state import log_softmax

Logits = Float[Array, "*batch V"]
_INSIDE = Range("must be in (0, 1)", lambda x: 0 < x < 1)


def reverse_kl(logits: Logits, ref_logits: Logits) -> Float[Array, "*batch"]:
    """Exact reverse KL divergence: expectation under the policy, so mode-seeking.

    KL(π‖π_ref) = Σᵥ πᵥ (log πᵥ − log π_refᵥ)

    Args:
        logits: logits of π, `*batch V`; −inf excludes an entry.
        ref_logits: logits of π_ref, `*batch V`.

    Returns:
        `*batch`, ≥ 0 to rounding; +inf where π reaches an entry that π_ref excludes.

    Raises:
        ValueError: if the shapes differ.

    Reference:
        Kullback & Leibler, On Information and Sufficiency (1951).

    >>> import jax.numpy as jnp
    >>> print(reverse_kl(jnp.array([0.0, -jnp.inf]), jnp.array([0.0, 0.0])).round(4))
    0.6931

    """
    return kl_categorical(logits, ref_logits)


def forward_kl(logits: Logits, ref_logits: Logits) -> Float[Array, "*batch"]:
    """Exact forward KL divergence: expectation under the reference, so mass-covering.

    KL(π_ref‖π) = Σᵥ π_refᵥ (log π_refᵥ − log πᵥ)

    Args:
        logits: logits of π, `*batch V`; −inf excludes an entry.
        ref_logits: logits of π_ref, `*batch V`.

    Returns:
        `*batch`, ≥ 0 to rounding; +inf where π_ref reaches an entry that π excludes.

    Raises:
        ValueError: if the shapes differ.

    Reference:
        Kullback & Leibler, On Information and Sufficiency (1951).

    >>> import jax.numpy as jnp
    >>> print(forward_kl(jnp.array([0.0, -jnp.inf]), jnp.array([0.0, 0.0])))
    inf

    """
    return kl_categorical(ref_logits, logits)


def _finite(log_p: jax.Array) -> jax.Array:
    """Log-probabilities with a huge negative number in place of −inf, whose gradient would be NaN."""
    return jnp.maximum(log_p, -1e30)


def jensen_shannon(logits: Logits, ref_logits: Logits, *, beta: Number = 0.5) -> Float[Array, "*batch"]:
    """Generalised Jensen–Shannon divergence: finite even where the supports differ.

    β KL(π_ref‖m) + (1 − β) KL(π‖m);  m = β π_ref + (1 − β) π

    Divided by β it tends to the forward KL as β → 0; divided by 1 − β to the reverse KL as β → 1. At β = ½ it is the
    symmetric divergence, at most log 2.

    Args:
        logits: logits of π (the student), `*batch V`; −inf excludes an entry.
        ref_logits: logits of π_ref (the teacher), `*batch V`.
        beta: β, weight of π_ref in the mixture, 0 < β < 1.

    Returns:
        `*batch`, ≥ 0 to rounding, at most −β log β − (1 − β) log(1 − β).

    Raises:
        ValueError: unless 0 < beta < 1 (at the ends the divergence is 0 for any two distributions).

    Reference:
        Agarwal et al. (GKD), arXiv 2306.13649, equation 1 (generalised JSD).

    >>> import jax.numpy as jnp
    >>> print(jensen_shannon(jnp.array([0.0, -jnp.inf]), jnp.array([-jnp.inf, 0.0])).round(4))
    0.6931

    """
    same_shape(logits=logits, ref_logits=ref_logits)
    new, ref = as_float(logits, ref_logits)
    (beta,) = numbers(new.dtype, _INSIDE, beta=beta)
    log_p, log_q = _finite(log_softmax(ref)), _finite(log_softmax(new))
    log_beta, log_rest = jnp.log(jnp.asarray(beta, log_p.dtype)), jnp.log1p(-jnp.asarray(beta, log_p.dtype))
    # log(β p + (1 − β) q) by its larger term: the difference of the two logs is what the smaller one adds.
    a, b = log_p + log_beta, log_q + log_rest
    # A selection between two forms of one function: max and |a − b| have kinks at a tie.
    more = a > b
    log_m = jnp.where(more, a, b) + jnp.log1p(jnp.exp(jnp.where(more, b - a, a - b)))
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    return jnp.sum(beta * p * (log_p - log_m) + (1.0 - beta) * q * (log_q - log_m), axis=-1)


def total_variation(logits: Logits, ref_logits: Logits) -> Float[Array, "*batch"]:
    """Total variation distance: the largest difference in probability of any set of tokens.

    ½ Σᵥ |πᵥ − π_refᵥ|

    Args:
        logits: logits of π, `*batch V`; −inf excludes an entry.
        ref_logits: logits of π_ref, `*batch V`.

    Returns:
        `*batch`, in [0, 1] to rounding.

    Raises:
        ValueError: if the shapes differ.

    Reference:
        Levin, Peres & Wilmer, Markov Chains and Mixing Times (2009), chapter 4.

    >>> import jax.numpy as jnp
    >>> float(total_variation(jnp.array([0.0, -jnp.inf]), jnp.array([0.0, 0.0])))
    0.5

    """
    same_shape(logits=logits, ref_logits=ref_logits)
    new, ref = as_float(logits, ref_logits)
    difference = jnp.exp(log_softmax(new)) - jnp.exp(log_softmax(ref))
    return 0.5 * jnp.sum(magnitude(difference), axis=-1)


def kl_categorical(logits: Float[Array, "*batch V"], ref_logits: Float[Array, "*batch V"]) -> Float[Array, "*batch"]:
    """Exact KL divergence between two categorical distributions.

    KL(π‖π_ref) = Σᵥ πᵥ (log πᵥ − log π_refᵥ)

    Args:
        logits: logits of π, `*batch V`; −inf excludes an entry.
        ref_logits: logits of π_ref, `*batch V`.

    Returns:
        `*batch`, ≥ 0 to rounding; +inf where π reaches an entry that π_ref excludes.

    Raises:
        ValueError: if the shapes differ.

    Reference:
        Kullback & Leibler, On Information and Sufficiency (1951).

    >>> import jax.numpy as jnp
    >>> kl_categorical(jnp.array([0.0, 0.0]), jnp.array([0.0, -jnp.inf])).tolist()
    inf

    """
    same_shape(logits=logits, ref_logits=ref_logits)
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
        TypeError: if logits are no array (from JAX).

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
