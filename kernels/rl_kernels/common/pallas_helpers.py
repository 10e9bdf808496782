"""What the Pallas kernels of every device share: a tile's scaled logits, its row states and their merge, its gradient.

All functions are on values, [R, W] of a tile and [R, 1] of its rows: TPU and GPU differ in their loads and stores only.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

NOTHING = float("-inf")

# In place of a row's scale, which is positive, where the row does not count.
LEFT_OUT = -1.0

# maximum, Σ e^{x − maximum}, Σ (x − maximum) e^{x − maximum}, each [R, 1].
State = tuple[jax.Array, jax.Array, jax.Array]


class Options(NamedTuple):
    """What is constant in a kernel. block_tokens × block_vocab logits are in the core's memory at a time."""

    vocab_size: int
    softcap: float | None
    allowed: bool
    block_tokens: int
    block_vocab: int
    interpret: bool
    # Bytes of the blocks of logits that a GPU's backward from hidden states makes in its memory.
    workspace: int = 0


def scaled(
    logits: jax.Array, scale: jax.Array, allowed: jax.Array | None, column: jax.Array, options: Options
) -> tuple[jax.Array, jax.Array]:
    """x [R, W] in float32 with 0 for an excluded token, and which tokens are possible.

    ``scale`` [R, 1] is the logit scale over the temperature, ``column`` [R, W] the token ids.
    """
    z = logits.astype(jnp.float32)
    # Beyond the end of the vocabulary, and in masked rows, a block may hold NaN, which is excluded. NaN in a row that
    # counts is not excluded, and shows in the results.
    limit = jnp.where(scale < 0, 0, options.vocab_size)
    possible = (column < limit) & (z != NOTHING)
    if allowed is not None:
        possible = possible & allowed
    z = jnp.where(possible, z, 0.0)
    if options.softcap is not None:
        z = options.softcap * jnp.tanh(z / options.softcap)
    return z * scale, possible


def columns(first: Any, shape: tuple[int, ...]) -> jax.Array:
    """Token ids of a tile whose first token is ``first``."""
    return first + jax.lax.broadcasted_iota(jnp.int32, shape, 1)


def empty_state(rows: int) -> State:
    """The neutral element of ``merge_row_states``."""
    nothing = jnp.zeros((rows, 1), jnp.float32)
    return jnp.full((rows, 1), NOTHING, jnp.float32), nothing, nothing


def tile_state(x: jax.Array, possible: jax.Array) -> State:
    """State of a tile's rows."""
    top = jnp.max(jnp.where(possible, x, NOTHING), axis=1, keepdims=True)
    shifted = jnp.where(possible, x - finite(top), 0.0)
    e = jnp.where(possible, jnp.exp(shifted), 0.0)
    return top, jnp.sum(e, axis=1, keepdims=True), jnp.sum(shifted * e, axis=1, keepdims=True)


def merge_row_states(a: State, b: State) -> State:
    """The state of both sets of tokens together."""
    top = jnp.maximum(a[0], b[0])
    base = finite(top)

    def moved(state: State) -> tuple[jax.Array, jax.Array]:
        maximum, total, weighted = state
        # The maximum of a row without a token so far is −inf: a difference of two −inf would be NaN.
        shift = jnp.where(maximum != NOTHING, maximum - base, 0.0)
        factor = jnp.exp(shift)
        return factor * total, factor * (weighted + shift * total)

    (total_a, weighted_a), (total_b, weighted_b) = moved(a), moved(b)
    return top, total_a + total_b, weighted_a + weighted_b


def target_of(x: jax.Array, possible: jax.Array, column: jax.Array, token: jax.Array) -> jax.Array:
    """x at each row's token [R, 1]; −inf where the tile does not hold it or excludes it."""
    return jnp.max(jnp.where(possible & (column == token), x, NOTHING), axis=1, keepdims=True)


def gradient(
    x: jax.Array,
    possible: jax.Array,
    scale: jax.Array,
    column: jax.Array,
    tokens: Sequence[jax.Array],
    scalars: tuple[jax.Array, jax.Array, jax.Array],
    cotangents: Sequence[jax.Array],
    options: Options,
) -> jax.Array:
    """dL/dz of a tile, from a, b, logsumexp [R, 1] of `row_scalars` and the tokens' [R, 1] and their cotangents."""
    a, b, logsumexp = scalars
    log_p = jnp.where(possible, x - logsumexp, 0.0)
    p = jnp.where(possible, jnp.exp(log_p), 0.0)
    dx = p * (a + b * log_p)
    for token, g in zip(tokens, cotangents, strict=True):
        dx = dx + jnp.where(possible & (column == token), g, 0.0)
    dz = dx * scale
    if options.softcap is not None:
        capped = jnp.where(possible, x / (scale * options.softcap), 1.0)
        dz = dz * (1.0 - capped * capped)
    return dz


def finalize_row_state(state: State, target: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probabilities [N, K], entropy [N], logsumexp [N] of row states; −inf, 0, −inf of a row without a token."""
    maximum, total, weighted = state
    some = total != 0
    safe = jnp.where(some, total, 1.0)
    logsumexp = maximum + jnp.log(safe)
    entropy = jnp.where(some, jnp.log(safe) - weighted / safe, 0.0)
    return target - jnp.where(some, logsumexp, 0.0), entropy[:, 0], logsumexp[:, 0]


def row_scalars(
    outputs: tuple[jax.Array, ...], cotangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """a, b, logsumexp [N, 1] of `gradient`, and the tokens' cotangents g [N, K]."""
    logprobs, entropy, logsumexp = outputs
    g, h, z = cotangents
    # A token that cannot be sampled takes no gradient: −inf has none.
    g = jnp.where(logprobs != NOTHING, g, 0.0)
    a = z - jnp.sum(g, axis=1) - h * entropy
    return a[:, None], -h[:, None], finite(logsumexp)[:, None], g


def single(x: jax.Array) -> list[jax.Array]:
    """The columns [R, 1] of [R, K]."""
    return [x[:, k : k + 1] for k in range(x.shape[1])]


def matmul(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Matmul over an axis of each, summed in float32; float32 operands keep all their bits."""
    exact = jax.lax.Precision.HIGHEST if jnp.float32 in (a.dtype, b.dtype) else None
    return jax.lax.dot_general(
        a, b, (((contract[0],), (contract[1],)), ((), ())), precision=exact, preferred_element_type=jnp.float32
    )


def finite(x: jax.Array) -> jax.Array:
    """0 for −inf, so that differences with it are not NaN."""
    return jnp.where(x != NOTHING, x, 0.0)
