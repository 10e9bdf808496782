"""What the Pallas kernels for GPUs share: loads that stop at an array's end, a grid without
order, masks of allowed tokens in bits.

Programs of a GPU's grid run at once and in any order, so that nothing is summed from one to the next: each has rows and
a part of the vocabulary to itself, and the parts' states are merged afterwards. How many parts there are depends on the
vocabulary alone: a row's bits do not depend on how many rows came with it.

The dialect is Pallas's for Triton, which serves CUDA and ROCm. The size of each array is a power of two, and bounds
are not checked: every load and store here has its mask. JAX 0.11 deprecates it for Mosaic GPU, which has no ROCm; the
algebra, in `pallas_math`, is of no dialect.
"""

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from rl_kernels.common.pallas_helpers import LEFT_OUT, NOTHING, Options, State, columns, merge_row_states

# Programs that share a row's vocabulary: enough to fill a GPU with few rows, few enough that their states cost nothing.
PARTS = 8


def tiles_of(options: Options) -> tuple[int, int, int]:
    """Tiles of the vocabulary, tiles in a part, parts."""
    tiles = pl.cdiv(options.vocab_size, options.block_vocab)
    each = pl.cdiv(tiles, min(tiles, PARTS))
    return tiles, each, pl.cdiv(tiles, each)


def rows_here(options: Options, count: int) -> tuple[Any, jax.Array]:
    """This program's rows: their slice, and which of them are in the batch [R, 1]."""
    first = pl.program_id(0) * options.block_tokens
    row = first + jax.lax.broadcasted_iota(jnp.int32, (options.block_tokens, 1), 0)
    return pl.ds(first, options.block_tokens), row < count


def load_row(ref: Any, rows: Any, there: jax.Array, other: float | int, k: int = 0) -> jax.Array:
    """[R, 1] of a [N, K] array."""
    return plt.load(ref.at[rows, pl.ds(k, 1)], mask=there, other=other)


def load_scale(ref: Any, rows: Any, there: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The rows' scale [R, 1], and whether any of them counts; beyond the last row none does."""
    scale = load_row(ref, rows, there, LEFT_OUT)
    # A NaN temperature counts, so that it shows in the results.
    # Reduced one axis at a time, as numbers: the dialect cannot reduce bools.
    return scale, jnp.max(jnp.max(jnp.where(scale < 0, 0, 1), axis=1), axis=0) > 0


def packed(allowed: jax.Array) -> jax.Array:
    """int32 [N, ⌈V/32⌉] of bool [N, V]: bit i of word j stands for token 32·j + i."""
    count, vocab_size = allowed.shape
    words = pl.cdiv(vocab_size, 32)
    bits = jnp.pad(allowed, ((0, 0), (0, 32 * words - vocab_size))).reshape(count, words, 32)
    weights = jnp.left_shift(jnp.uint32(1), jnp.arange(32, dtype=jnp.uint32))[None, None, :]
    total = jnp.sum(jnp.where(bits, weights, jnp.uint32(0)), axis=2, dtype=jnp.uint32)
    return jax.lax.bitcast_convert_type(total, jnp.int32)


def bit_of(word: jax.Array, column: jax.Array) -> jax.Array:
    """Whether a token is allowed, from its word."""
    return ((word >> (column & 31)) & 1) != 0


def load_allowed(ref: Any, rows: Any, column: jax.Array, inside: jax.Array) -> jax.Array:
    """Which tokens of a tile their row allows."""
    row = rows.start + jax.lax.broadcasted_iota(jnp.int32, column.shape, 0)
    return bit_of(plt.load(ref.at[row, column >> 5], mask=inside, other=0), column)


def tile_columns(tile: Any, options: Options) -> tuple[Any, jax.Array, jax.Array]:
    """A tile's tokens: their slice, their ids [R, W], and which of them are in the vocabulary."""
    first = tile * options.block_vocab
    column = columns(first, (options.block_tokens, options.block_vocab))
    return pl.ds(first, options.block_vocab), column, column < options.vocab_size


def load_bias(ref: Any, vocab: Any, options: Options) -> jax.Array:
    """The bias of a tile, float32 [1, W]."""
    inside = columns(vocab.start, (1, vocab.size)) < options.vocab_size
    return plt.load(ref.at[pl.ds(0, 1), vocab], mask=inside, other=0.0).astype(jnp.float32)


def merge_parts(maximum: jax.Array, total: jax.Array, weighted: jax.Array) -> State:
    """The states of whole rows from those of parts, each [N, parts], merged from the first to the last."""
    parts = [tuple(x[:, p : p + 1] for x in (maximum, total, weighted)) for p in range(maximum.shape[1])]
    return reduce(merge_row_states, parts)  # pyright: ignore[reportArgumentType, reportReturnType]


def inside_vocabulary(tokens: jax.Array, options: Options) -> jax.Array:
    """Which tokens [N, K] are ids at all."""
    return (tokens >= 0) & (tokens < options.vocab_size)


def store_own(d_logits: jax.Array, tokens: jax.Array, own: jax.Array) -> jax.Array:
    """``d_logits`` [N, W] with the tokens' own gradients [N, K] in their places; tokens outside 0 … W − 1 have none.

    They were summed in float32. A token that occurs twice among the K has the same sum in both.
    """
    width = d_logits.shape[1]
    # A negative index would count from the end; one beyond it is dropped.
    places = jnp.where((tokens >= 0) & (tokens < width), tokens, width)
    rows = jnp.arange(len(tokens), dtype=jnp.int32)[:, None]
    return d_logits.at[rows, places].set(own.astype(d_logits.dtype), mode="drop")


def grid_parameters(interpret: bool, warps: int) -> dict[str, Any]:
    """Keyword arguments of pallas_call."""
    return {"interpret": True} if interpret else {"compiler_params": plt.CompilerParams(num_warps=warps)}


def empty_target(rows: int) -> jax.Array:
    """The target logit before a tile with the token was met."""
    return jnp.full((rows, 1), NOTHING, jnp.float32)
