"""State of a row of logits (maximum, sum, weighted sum, target) with an associative merge.

Tiles of a vocabulary, shards of a model and ranks of a cluster combine to the same result.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Integer

from rl_fn._numerics import (
    ANY,
    POSITIVE,
    Array,
    Number,
    as_float,
    as_ids,
    as_mask,
    has_shape,
    numbers,
    per_row,
    same_shape,
)

Logits = Float[Array, "*batch V"]


TokenIds = Integer[Array, "*batch"]


AllowedTokens = Bool[Array, "..."]


PerRow = Float[Array, "*batch"]


class RowState(NamedTuple):
    """What a tile of a row of logits x contributes; `merge_row_states` combines tiles in any grouping.

    maximum = max x;  sum_exp = Σ e^{x − maximum};  weighted = Σ (x − maximum) e^{x − maximum};
    target = x at the row's token, −inf where the tile does not hold it (or the allowed_tokens excludes it)

    The maximum is a reference point that results do not depend on, held constant in derivatives: gradients are those of
    `finalize_row_state(state)`, not of the fields one by one.
    """

    maximum: PerRow
    sum_exp: PerRow
    weighted: PerRow
    target: PerRow


class TokenLogprobs(NamedTuple):
    """Log-probability of each token, entropy of its distribution, log-sum-exp of its scaled logits, in nats."""

    logprobs: PerRow
    entropy: PerRow
    logsumexp: PerRow


def log_softmax(x: jax.Array) -> jax.Array:
    """Log-probabilities of one row of logits; −inf where x is −inf, with a finite gradient everywhere."""
    allowed = x != -jnp.inf
    maximum = jax.lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True))
    maximum = jnp.where(maximum != -jnp.inf, maximum, 0.0)
    shifted = jnp.where(allowed, x - maximum, 0.0)
    total = jnp.sum(jnp.where(allowed, jnp.exp(shifted), 0.0), axis=-1, keepdims=True)
    return jnp.where(allowed, shifted - jnp.log(jnp.where(total != 0, total, 1.0)), -jnp.inf)


def _scaled(
    logits: Array, temperature: Number | Array, softcap: Number | None, allowed_tokens: Array | None
) -> tuple[jax.Array, jax.Array]:
    """Logits after softcap and temperature, and which of them are in the distribution."""
    (temperature,) = per_row(logits.shape[:-1], POSITIVE, temperature=temperature)
    x, heat = as_float(logits, temperature)
    # NaN is allowed: it must reach the result, not be taken for an excluded entry.
    allowed = x != -jnp.inf
    if allowed_tokens is not None:
        every = logits.shape[-1:] if np.ndim(allowed_tokens) == 1 else logits.shape
        has_shape(every, allowed_tokens=allowed_tokens)
        allowed = allowed & jnp.broadcast_to(as_mask(allowed_tokens), x.shape)
    x = jnp.where(allowed, x, 0.0)
    if softcap is not None:
        (softcap,) = numbers(x.dtype, POSITIVE, softcap=softcap)
        x = softcap * jnp.tanh(x / softcap)
    return x / (heat[..., None] if heat.ndim else heat), allowed


def row_state(
    logits: Logits,
    tokens: TokenIds,
    *,
    start: int | Integer[Array, ""] = 0,
    temperature: Number | Float[Array, "..."] = 1.0,
    softcap: Number | None = None,
    allowed_tokens: AllowedTokens | None = None,
) -> RowState:
    """State of a tile of the vocabulary: entries start, start + 1, … of every row.

    x = softcap · tanh(logits / softcap) / temperature;  state as in RowState

    Args:
        logits: a tile of V entries, `*batch V`; −inf excludes an entry.
        tokens: token ids in the whole vocabulary, `*batch`; they may lie outside the tile.
        start: id of the tile's first entry.
        temperature: > 0, a number or one per row, `*batch`.
        softcap: cap applied before the temperature; none by default.
        allowed_tokens: True for entries in the distribution, `*batch V` or `V`.

    Returns:
        RowState, each field `*batch`. A tile without an allowed entry has maximum −inf and sums 0.

    Raises:
        ValueError: for a softcap or a temperature (as a number) that is not positive.

    Reference:
        Milakov & Gimelshein, arXiv 1805.02867, section 3.1 (online softmax); the weighted sum adds the entropy.

    >>> import jax.numpy as jnp
    >>> state = row_state(jnp.array([0.0, 0.0]), jnp.array(1))
    >>> float(state.sum_exp), float(state.target)
    (2.0, 0.0)

    """
    has_shape(logits.shape[:-1], tokens=tokens)
    x, allowed = _scaled(logits, temperature, softcap, allowed_tokens)
    maximum = jax.lax.stop_gradient(jnp.max(x, axis=-1, where=allowed, initial=-jnp.inf))
    base = jnp.where(maximum != -jnp.inf, maximum, 0.0)
    shifted = jnp.where(allowed, x - base[..., None], 0.0)
    e = jnp.where(allowed, jnp.exp(shifted), 0.0)
    ids = as_ids(tokens)
    local = ids - numbers(ids.dtype, ANY, start=start)[0]
    inside = (local >= 0) & (local < x.shape[-1])
    index = jnp.where(inside, local, 0)[..., None]
    target = jnp.take_along_axis(x, index, axis=-1)[..., 0]
    held = inside & jnp.take_along_axis(allowed, index, axis=-1)[..., 0]
    return RowState(maximum, jnp.sum(e, axis=-1), jnp.sum(e * shifted, axis=-1), jnp.where(held, target, -jnp.inf))


def merge_row_states(a: RowState, b: RowState) -> RowState:
    """Combine the states of two disjoint tiles of the same rows; associative and commutative.

    m = max(mₐ, m_b);  s = Σᵢ sᵢ e^{mᵢ−m};  u = Σᵢ e^{mᵢ−m}(uᵢ + (mᵢ − m) sᵢ);  target = max(targetₐ, target_b)

    Args:
        a: state of one tile, fields `*batch`.
        b: state of the other tile, fields `*batch`.

    Returns:
        RowState of both, fields `*batch`.

    Raises:
        ValueError: if the shapes differ.

    Reference:
        Milakov & Gimelshein, arXiv 1805.02867, equation 4.

    >>> import jax.numpy as jnp
    >>> left, right = (row_state(jnp.array([x]), jnp.array(0), start=i) for i, x in enumerate([1.0, 2.0]))
    >>> whole = row_state(jnp.array([1.0, 2.0]), jnp.array(0))
    >>> bool(jnp.allclose(merge_row_states(left, right).weighted, whole.weighted))
    True

    """
    for state in (a, b):
        has_shape(np.shape(a.maximum), **state._asdict())
    maximum = jnp.maximum(a.maximum, b.maximum)
    base = jnp.where(maximum != -jnp.inf, maximum, 0.0)

    def rescaled(state: RowState) -> tuple[jax.Array, jax.Array]:
        held = state.maximum != -jnp.inf
        shift = jnp.where(held, state.maximum - base, 0.0)
        factor = jnp.where(held, jnp.exp(shift), 0.0)
        return factor * state.sum_exp, factor * (state.weighted + shift * state.sum_exp)

    (sum_a, weighted_a), (sum_b, weighted_b) = rescaled(a), rescaled(b)
    return RowState(maximum, sum_a + sum_b, weighted_a + weighted_b, jnp.maximum(a.target, b.target))


def finalize_row_state(state: RowState) -> TokenLogprobs:
    """Log-probability, entropy and log-sum-exp from the state of whole rows.

    lse = m + log s;  log π = target − lse;  H = log s − u/s

    Args:
        state: RowState of the whole vocabulary, fields `*batch`.

    Returns:
        TokenLogprobs, each field `*batch`.

    Raises:
        ValueError: if the shapes of the fields differ.

    Reference:
        Milakov & Gimelshein, arXiv 1805.02867, section 3.1.

    >>> import jax.numpy as jnp
    >>> print(finalize_row_state(row_state(jnp.array([0.0, 0.0]), jnp.array(0))).logprobs.round(4))
    -0.6931

    """
    same_shape(**state._asdict())
    filled = state.sum_exp != 0
    total = jnp.where(filled, state.sum_exp, 1.0)
    log_total = jnp.log(total)
    held = state.target != -jnp.inf
    base = jnp.where(filled, state.maximum, 0.0)
    shifted = jnp.where(held, state.target - base, 0.0)
    return TokenLogprobs(
        logprobs=jnp.where(held, shifted - log_total, -jnp.inf),
        entropy=log_total - state.weighted / total,
        logsumexp=jnp.where(filled, base + log_total, -jnp.inf),
    )
