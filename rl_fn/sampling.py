"""Truncations of a distribution as functions of logits, and a sampler that knows what it drew from.

They compose in the order temperature, top-k, top-p, min-p; what a step removes is −inf for the next, which therefore
sees a renormalised distribution. Ties are broken by the lower token id.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Integer, Key, UInt32

from rl_fn._numerics import (
    AT_LEAST_ONE,
    NOT_NEGATIVE,
    POSITIVE,
    UNIT,
    Array,
    Number,
    Range,
    as_float,
    as_mask,
    per_row,
    same_shape,
)
from rl_fn.logprobs.row_state import log_softmax

Logits = Float[Array, "*batch V"]
PerRow = Number | Float[Array, "..."]
Count = int | np.integer | Integer[Array, "..."]
_SHARE = Range("must be in (0, 1]", lambda x: 0 < x <= 1)


def _column(parameter: jax.Array, logits: jax.Array) -> jax.Array:
    """Shape a number, or one per row, to meet logits of `*batch V`."""
    return jnp.broadcast_to(parameter[..., None] if parameter.ndim else parameter, (*logits.shape[:-1], 1))


def _ranks(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Order of the entries by falling logit (lower id first among equals), and each entry's place in it."""
    order = jnp.argsort(-logits, axis=-1, stable=True)
    return order, jnp.argsort(order, axis=-1, stable=True)


def temperature(logits: Logits, t: PerRow) -> Logits:
    """Divide logits by a temperature; 0 is greedy.

    logits / t;  at t = 0: 0 for the largest logit, −inf for the others

    Args:
        logits: `*batch V`.
        t: ≥ 0, a number or one per row, `*batch`.

    Returns:
        Logits, `*batch V`.

    Raises:
        ValueError: if t as a number is negative, or an array t does not have one entry per row.

    Reference:
        Ackley et al., A Learning Algorithm for Boltzmann Machines (1985).

    >>> import jax.numpy as jnp
    >>> temperature(jnp.array([1.0, 2.0]), 0.0).tolist()
    [-inf, 0.0]

    """
    (t,) = per_row(logits.shape[:-1], NOT_NEGATIVE, temperature=t)
    x, heat = as_float(logits, t)
    heat = _column(heat, x)
    cold = heat == 0
    is_best = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1) == jnp.argmax(x, axis=-1, keepdims=True).astype(
        jnp.int32
    )
    greedy = jnp.where(is_best, 0.0, -jnp.inf)
    return jnp.where(cold & ~jnp.isnan(x), greedy, x / jnp.where(cold, 1.0, heat))


def top_k(logits: Logits, k: Count) -> Logits:
    """Keep the k largest logits, exactly k also when some are equal.

    logits where rank < k, else −inf

    Args:
        logits: `*batch V`.
        k: ≥ 1, a number or one per row, `*batch`; k ≥ V keeps everything.

    Returns:
        Logits, `*batch V`.

    Raises:
        ValueError: if k as a number is below 1, or an array k does not have one entry per row.

    Reference:
        Fan et al., arXiv 1805.04833.

    >>> import jax.numpy as jnp
    >>> top_k(jnp.array([1.0, 3.0, 3.0, 2.0]), 2).tolist()
    [-inf, 3.0, 3.0, -inf]

    """
    (count,) = per_row(logits.shape[:-1], AT_LEAST_ONE, k=k)
    (x,) = as_float(logits)
    count, ranks = _column(jnp.asarray(count), x), _ranks(x)[1]
    return jnp.where((ranks < count.astype(ranks.dtype)) | jnp.isnan(x), x, -jnp.inf)


def top_p(logits: Logits, p: PerRow) -> Logits:
    """Keep the smallest set of largest logits whose probability is at least p (nucleus sampling).

    logits where the mass of all larger entries is < p, else −inf

    Args:
        logits: `*batch V`.
        p: in (0, 1], a number or one per row, `*batch`; 1 keeps everything.

    Returns:
        Logits, `*batch V`; the largest is always kept.

    Raises:
        ValueError: if p as a number is outside (0, 1], or an array p does not have one entry per row.

    Reference:
        Holtzman et al., arXiv 1904.09751, section 3.1.

    >>> import jax.numpy as jnp
    >>> top_p(jnp.log(jnp.array([0.5, 0.3, 0.2])), 0.6).tolist()[2]
    -inf

    """
    (p,) = per_row(logits.shape[:-1], _SHARE, p=p)
    x, mass = as_float(logits, p)
    mass = _column(mass, x)
    order, ranks = _ranks(x)
    probabilities = jnp.take_along_axis(jnp.exp(log_softmax(x)), order, axis=-1)
    up_to = jnp.cumsum(probabilities, axis=-1)
    before = jnp.concatenate([jnp.zeros_like(up_to[..., :1]), up_to[..., :-1]], axis=-1)
    # With p = 1 the running sum may reach 1 by rounding before the tail is over.
    kept = ~(before >= mass) | (mass >= 1.0)
    return jnp.where(jnp.take_along_axis(kept, ranks, axis=-1), x, -jnp.inf)


def min_p(logits: Logits, p: PerRow) -> Logits:
    """Keep the entries at least p times as probable as the most probable one.

    logits where πᵥ ≥ p · max π, else −inf

    Args:
        logits: `*batch V`.
        p: in [0, 1], a number or one per row, `*batch`; 0 keeps everything.

    Returns:
        Logits, `*batch V`; the largest is always kept.

    Raises:
        ValueError: if p as a number is outside [0, 1], or an array p does not have one entry per row.

    Reference:
        Nguyen et al., arXiv 2407.01082.

    >>> import jax.numpy as jnp
    >>> min_p(jnp.array([0.0, -1.0, -3.0]), 0.1).tolist()
    [0.0, -1.0, -inf]

    """
    (p,) = per_row(logits.shape[:-1], UNIT, p=p)
    x, share = as_float(logits, p)
    share = _column(share, x)
    below = jnp.where(share > 0, jnp.log(jnp.where(share > 0, share, 1.0)), -jnp.inf)
    return jnp.where(x < jnp.max(x, axis=-1, keepdims=True) + below, -jnp.inf, x)


def repetition_penalty(logits: Logits, seen: Bool[Array, "*batch V"], penalty: PerRow) -> Logits:
    """Make entries that already occurred less likely.

    logits / θ where seen and positive, logits · θ where seen and negative

    Args:
        logits: `*batch V`.
        seen: True for entries that occurred in the prompt or the answer, `*batch V`.
        penalty: θ > 0, a number or one per row, `*batch`; 1 changes nothing.

    Returns:
        Logits, `*batch V`.

    Raises:
        ValueError: if penalty as a number is not positive, or an array penalty does not have one entry per row.

    Reference:
        Keskar et al. (CTRL), arXiv 1909.05858, section 4.1, with the field's treatment of negative logits.

    >>> import jax.numpy as jnp
    >>> repetition_penalty(jnp.array([2.0, -2.0, 1.0]), jnp.array([True, True, False]), 2.0).tolist()
    [1.0, -4.0, 1.0]

    """
    same_shape(logits=logits, seen=seen)
    (penalty,) = per_row(logits.shape[:-1], POSITIVE, penalty=penalty)
    x, theta = as_float(logits, penalty)
    theta = _column(theta, x)
    return jnp.where(as_mask(seen), jnp.where(x > 0, x / theta, x * theta), x)


_temperature, _top_k, _top_p, _min_p = temperature, top_k, top_p, min_p


def sample(
    key: Key[Array, ""] | UInt32[Array, "2"],
    logits: Logits,
    *,
    temperature: PerRow = 1.0,
    top_k: Count | None = None,
    top_p: PerRow | None = None,
    min_p: PerRow | None = None,
) -> tuple[Integer[Array, "*batch"], Float[Array, "*batch"]]:
    """Draw one token a row, with its log-probability under the distribution it was drawn from.

    token ~ softmax(min_p(top_p(top_k(temperature(logits)))))

    Args:
        key: JAX random key.
        logits: `*batch V`; −inf excludes an entry.
        temperature: ≥ 0, a number or one per row, `*batch`; 0 is greedy, with log-probability 0.
        top_k: see top_k; None keeps everything.
        top_p: see top_p; None keeps everything.
        min_p: see min_p; None keeps everything.

    Returns:
        Token ids (int32) and log-probabilities in nats, both `*batch`.

    Raises:
        ValueError: for parameters that the steps refuse.

    Reference:
        Maddison et al., arXiv 1411.0030 (the Gumbel-max trick).

    >>> import jax, jax.numpy as jnp
    >>> tokens, logprobs = sample(jax.random.key(0), jnp.array([[1.0, 9.0]]), temperature=0.0)
    >>> tokens.tolist(), logprobs.tolist()
    ([1], [0.0])

    """
    x = _temperature(logits, temperature)
    x = x if top_k is None else _top_k(x, top_k)
    x = x if top_p is None else _top_p(x, top_p)
    x = x if min_p is None else _min_p(x, min_p)
    tokens = jax.random.categorical(key, x, axis=-1).astype(jnp.int32)
    return tokens, jnp.take_along_axis(log_softmax(x), tokens[..., None], axis=-1)[..., 0]
