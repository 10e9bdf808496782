"""Log-probability, entropy and log-sum-exp of tokens: the reference that the kernels are measured against.

One state per row (maximum, sum, weighted sum, target) has an associative merge, so that tiles of a vocabulary, shards
of a model and ranks of a cluster combine to the same result.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Integer

from rl_fn._numerics import Array, Mask, Number, Segments, Tokens, as_float, as_mask, keep, require
from rl_fn.recurrence import segment_totals

Logits = Float[Array, "*batch V"]
TokenIds = Integer[Array, "*batch"]
Support = Bool[Array, "..."]
PerRow = Float[Array, "*batch"]


class RowState(NamedTuple):
    """What a tile of a row of logits x contributes; `merge` combines tiles in any grouping.

    maximum = max x;  sum_exp = Σ e^{x − maximum};  weighted = Σ (x − maximum) e^{x − maximum};
    target = x at the row's token, −inf where the tile does not hold it (or the support excludes it)

    The maximum is a reference point that results do not depend on, held constant in derivatives: gradients are those of
    `finish(state)`, not of the fields one by one.
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
    logits: Array, temperature: Number | Array, softcap: Number | None, support: Array | None
) -> tuple[jax.Array, jax.Array]:
    """Logits after softcap and temperature, and which of them are in the distribution."""
    require(softcap is None or softcap > 0, f"softcap must be positive, got {softcap}")
    if isinstance(temperature, float | int):
        require(temperature > 0, f"temperature must be positive, got {temperature}")
    x, heat = as_float(logits, temperature)
    # NaN is allowed: it must reach the result, not be taken for an excluded entry.
    allowed = x != -jnp.inf
    if support is not None:
        allowed = allowed & jnp.broadcast_to(as_mask(support), x.shape)
    x = jnp.where(allowed, x, 0.0)
    if softcap is not None:
        x = softcap * jnp.tanh(x / softcap)
    return x / (heat[..., None] if heat.ndim else heat), allowed


def row_state(
    logits: Logits,
    tokens: TokenIds,
    *,
    start: int = 0,
    temperature: Number | Float[Array, "..."] = 1.0,
    softcap: Number | None = None,
    support: Support | None = None,
) -> RowState:
    """State of a tile of the vocabulary: entries start, start + 1, … of every row.

    x = softcap · tanh(logits / softcap) / temperature;  state as in RowState

    Args:
        logits: a tile of V entries, `*batch V`; −inf excludes an entry.
        tokens: token ids in the whole vocabulary, `*batch`; they may lie outside the tile.
        start: id of the tile's first entry.
        temperature: > 0, a number or one per row, `*batch`.
        softcap: cap applied before the temperature; none by default.
        support: True for entries in the distribution, `*batch V` or `V`.

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
    x, allowed = _scaled(logits, temperature, softcap, support)
    maximum = jax.lax.stop_gradient(jnp.max(x, axis=-1, where=allowed, initial=-jnp.inf))
    base = jnp.where(maximum != -jnp.inf, maximum, 0.0)
    shifted = jnp.where(allowed, x - base[..., None], 0.0)
    e = jnp.where(allowed, jnp.exp(shifted), 0.0)
    local = jnp.asarray(tokens) - start
    inside = (local >= 0) & (local < x.shape[-1])
    index = jnp.where(inside, local, 0)[..., None]
    target = jnp.take_along_axis(x, index, axis=-1)[..., 0]
    held = inside & jnp.take_along_axis(allowed, index, axis=-1)[..., 0]
    return RowState(maximum, jnp.sum(e, axis=-1), jnp.sum(e * shifted, axis=-1), jnp.where(held, target, -jnp.inf))


def merge(a: RowState, b: RowState) -> RowState:
    """Combine the states of two disjoint tiles of the same rows; associative and commutative.

    m = max(mₐ, m_b);  s = Σᵢ sᵢ e^{mᵢ−m};  u = Σᵢ e^{mᵢ−m}(uᵢ + (mᵢ − m) sᵢ);  target = max(targetₐ, target_b)

    Args:
        a: state of one tile, fields `*batch`.
        b: state of the other tile, fields `*batch`.

    Returns:
        RowState of both, fields `*batch`.

    Raises:
        TypeError: if the shapes differ (from JAX).

    Reference:
        Milakov & Gimelshein, arXiv 1805.02867, equation 4.

    >>> import jax.numpy as jnp
    >>> left, right = (row_state(jnp.array([x]), jnp.array(0), start=i) for i, x in enumerate([1.0, 2.0]))
    >>> whole = row_state(jnp.array([1.0, 2.0]), jnp.array(0))
    >>> bool(jnp.allclose(merge(left, right).weighted, whole.weighted))
    True

    """
    maximum = jnp.maximum(a.maximum, b.maximum)
    base = jnp.where(maximum != -jnp.inf, maximum, 0.0)

    def rescaled(state: RowState) -> tuple[jax.Array, jax.Array]:
        held = state.maximum != -jnp.inf
        shift = jnp.where(held, state.maximum - base, 0.0)
        factor = jnp.where(held, jnp.exp(shift), 0.0)
        return factor * state.sum_exp, factor * (state.weighted + shift * state.sum_exp)

    (sum_a, weighted_a), (sum_b, weighted_b) = rescaled(a), rescaled(b)
    return RowState(maximum, sum_a + sum_b, weighted_a + weighted_b, jnp.maximum(a.target, b.target))


def finish(state: RowState) -> TokenLogprobs:
    """Log-probability, entropy and log-sum-exp from the state of whole rows.

    lse = m + log s;  log π = target − lse;  H = log s − u/s

    Args:
        state: RowState of the whole vocabulary, fields `*batch`.

    Returns:
        TokenLogprobs, each field `*batch`.

    Raises:
        TypeError: if the fields are not arrays (from JAX).

    Reference:
        Milakov & Gimelshein, arXiv 1805.02867, section 3.1.

    >>> import jax.numpy as jnp
    >>> print(finish(row_state(jnp.array([0.0, 0.0]), jnp.array(0))).logprobs.round(4))
    -0.6931

    """
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


def logits_logprobs(
    logits: Logits,
    tokens: TokenIds,
    *,
    temperature: Number | Float[Array, "..."] = 1.0,
    softcap: Number | None = None,
    support: Support | None = None,
) -> TokenLogprobs:
    """Log-probability of each token and entropy of the distribution it was drawn from.

    x = softcap · tanh(logits / softcap) / temperature;  lse = log Σ eˣ;  log π = x_token − lse;  H = lse − Σ π x

    Args:
        logits: `*batch V`, any float dtype; −inf excludes an entry.
        tokens: token ids in [0, V), `*batch`.
        temperature: > 0, a number or one per token, `*batch`.
        softcap: the model's cap, applied before the temperature; none by default.
        support: True for entries in the distribution (a top-k or top-p set), `*batch V` or `V`; the others are
            excluded and the rest renormalised.

    Returns:
        TokenLogprobs(logprobs, entropy, logsumexp), each `*batch`. A token outside the support has −inf with gradient
        0; the entropy and its gradient are always finite.

    Raises:
        ValueError: for a softcap or a temperature (as a number) that is not positive.

    Reference:
        Shannon, A Mathematical Theory of Communication (1948), section 6, for H; the softcap: Gemma Team, arXiv
        2408.00118.

    >>> import jax.numpy as jnp
    >>> out = logits_logprobs(jnp.array([[0.0, 0.0, -jnp.inf]]), jnp.array([0]))
    >>> print(out.logprobs.round(4), out.entropy.round(4))
    [-0.6931] [0.6931]

    """
    return finish(row_state(logits, tokens, temperature=temperature, softcap=softcap, support=support))


def sequence_logprobs(logprobs: Tokens, mask: Mask, *, segment_ids: Segments | None = None) -> Tokens | PerRow:
    """Log-probability of each sequence.

    Σₜ log π(tokenₜ)

    Args:
        logprobs: log π of the sampled tokens, in nats, `*batch T`.
        mask: True where a token counts, `*batch T`.
        segment_ids: `*batch T`, for several sequences packed into a row.

    Returns:
        `*batch`; with segment_ids `*batch T`, at each counted token the sum over its sequence, zero where masked.

    Raises:
        ValueError: if the mask is not boolean.

    Reference:
        None: the chain rule of probability.

    >>> import jax.numpy as jnp
    >>> sequence_logprobs(jnp.array([[-1.0, -2.0, jnp.nan]]), jnp.array([[True, True, False]])).tolist()
    [-3.0]

    """
    (values,) = as_float(logprobs)
    values = keep(values, mask)
    if segment_ids is None:
        return jnp.sum(values, axis=-1)
    return keep(segment_totals(values, segment_ids), mask)
