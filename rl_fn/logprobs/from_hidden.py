"""Log-probabilities straight from hidden states: the logits of a row are never whole in memory."""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from rl_fn._numerics import POSITIVE, Array, Number, as_float, as_ids, as_mask, has_shape, per_row, require
from rl_fn.logprobs.row_state import RowState, TokenIds, TokenLogprobs, finalize_row_state, merge_row_states, row_state


def linear_logprobs(
    hidden: Float[Array, "*batch H"],
    weight: Float[Array, "V H"],
    tokens: TokenIds,
    *,
    bias: Float[Array, " V"] | None = None,
    temperature: Number | Float[Array, "..."] = 1.0,
    softcap: Number | None = None,
    allowed_tokens: Bool[Array, " V"] | None = None,
    chunk: int = 4096,
) -> TokenLogprobs:
    """logits_logprobs of `hidden @ weight.T + bias`, a tile of the vocabulary at a time.

    Tiles are merged as they come and computed again in the backward pass, so that memory grows with the chunk and not
    with V. The product is taken in float32 of the values as given.

    logits = hidden · weightᵀ + bias;  then as logits_logprobs

    Args:
        hidden: last hidden states, `*batch H`.
        weight: output embedding, `V H`.
        tokens: token ids in [0, V), `*batch`.
        bias: `V`; none by default.
        temperature: > 0, a number or one per token, `*batch`.
        softcap: cap of the logits before the temperature; none by default.
        allowed_tokens: True for entries in the distribution, `V`; all by default.
        chunk: entries of the vocabulary in a tile, static.

    Returns:
        TokenLogprobs(logprobs, entropy, logsumexp), each `*batch`.

    Raises:
        ValueError: for a chunk, a softcap or a temperature (as a number) that is not positive.

    Reference:
        Milakov & Gimelshein, arXiv 1805.02867, equation 4, for the merge.

    >>> import jax.numpy as jnp
    >>> hidden, weight = jnp.array([[1.0, 2.0]]), jnp.zeros((4, 2))
    >>> print(linear_logprobs(hidden, weight, jnp.array([3]), chunk=2).logprobs.round(4))
    [-1.3863]

    """
    require(chunk >= 1, f"chunk must be at least 1, got {chunk}")
    has_shape((*hidden.shape[:-1], *weight.shape[1:]), hidden=hidden)
    has_shape(hidden.shape[:-1], tokens=tokens)
    has_shape(weight.shape[:1], bias=bias, allowed_tokens=allowed_tokens)
    (temperature,) = per_row(hidden.shape[:-1], POSITIVE, temperature=temperature)
    ids = as_ids(tokens)
    size = weight.shape[0]
    width = min(chunk, size)
    tiles = -(-size // width)
    padding = tiles * width - size
    allowed = jnp.ones(size, dtype=bool) if allowed_tokens is None else as_mask(allowed_tokens)
    offsets = jnp.zeros(size, jnp.float32) if bias is None else jnp.asarray(bias)

    @jax.checkpoint
    def step(state: RowState, tile: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> tuple[RowState, None]:
        start, rows, shift, inside = tile
        h, w, b, _ = as_float(hidden, rows, shift, temperature)
        logits = jax.lax.dot_general(
            h, w, (((h.ndim - 1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST
        ) + jnp.reshape(b, (1,) * (h.ndim - 1) + b.shape)
        kept = jnp.broadcast_to(inside, logits.shape)
        # start is traced in the scan: the token's place in the tile is what row_state needs.
        here = row_state(logits, ids - start, temperature=temperature, softcap=softcap, allowed_tokens=kept)
        return merge_row_states(state, here), None

    xs = (
        jnp.arange(tiles, dtype=ids.dtype) * width,
        jnp.pad(jnp.asarray(weight), ((0, padding), (0, 0))).reshape(tiles, width, -1),
        jnp.pad(offsets, (0, padding)).reshape(tiles, width),
        jnp.pad(allowed, (0, padding)).reshape(tiles, width),
    )
    dtype = as_float(hidden, weight, offsets, temperature)[0].dtype
    empty, nothing = jnp.full(ids.shape, -jnp.inf, dtype), jnp.zeros(ids.shape, dtype)
    state, _ = jax.lax.scan(step, RowState(empty, nothing, nothing, empty), xs)
    return finalize_row_state(state)
