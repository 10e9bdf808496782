"""What the Pallas kernels for GPUs share: loads that stop at an array's end, a grid without order, kept sets in bits.

Programs of a GPU's grid run at once and in any order, so that nothing is summed from one to the next: each has rows and
a part of the vocabulary to itself, and the parts' states are merged afterwards. How many parts there are depends on the
vocabulary alone: a row's bits do not depend on how many rows came with it.

The dialect is Pallas's for Triton, which serves CUDA and ROCm. Its arrays have a power of two of entries, and it checks
no bounds: every load and store here has its mask. JAX 0.11 deprecates it for Mosaic GPU, which has no ROCm; the
algebra, in `pallas_math`, is of no dialect.
"""

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from rl_kernels.common.pallas_helpers import LEFT_OUT, NOTHING, Options, State, columns, merge

# Programs that share a row's vocabulary: enough to fill a GPU with few rows, few enough that their states cost nothing.
PARTS = 8


def tiles_of(options: Options) -> tuple[int, int, int]:
    """Tiles of the vocabulary, tiles in a part, parts."""
    tiles = pl.cdiv(options.vocabulary, options.block_entries)
    each = pl.cdiv(tiles, min(tiles, PARTS))
    return tiles, each, pl.cdiv(tiles, each)


def rows_here(options: Options, count: int) -> tuple[Any, jax.Array]:
    """This program's rows: their slice, and which of them there are [R, 1]."""
    first = pl.program_id(0) * options.block_rows
    row = first + jax.lax.broadcasted_iota(jnp.int32, (options.block_rows, 1), 0)
    return pl.ds(first, options.block_rows), row < count


def load_row(ref: Any, rows: Any, there: jax.Array, other: float | int, k: int = 0) -> jax.Array:
    """[R, 1] of a [N, K] array."""
    return plt.load(ref.at[rows, pl.ds(k, 1)], mask=there, other=other)


def load_scale(ref: Any, rows: Any, there: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The rows' scale [R, 1], and whether any of them counts; beyond the last row none does."""
    scale = load_row(ref, rows, there, LEFT_OUT)
    # A NaN is a temperature's, which shall be seen in the results.
    # One axis at a time, and numbers: the dialect has no reduction of truth values.
    return scale, jnp.max(jnp.max(jnp.where(scale < 0, 0, 1), axis=1), axis=0) > 0


def packed(kept: jax.Array) -> jax.Array:
    """int32 [N, ⌈V/32⌉] of bool [N, V]: bit i of word j stands for entry 32·j + i."""
    count, vocabulary = kept.shape
    words = pl.cdiv(vocabulary, 32)
    bits = jnp.pad(kept, ((0, 0), (0, 32 * words - vocabulary))).reshape(count, words, 32)
    weights = jnp.left_shift(jnp.uint32(1), jnp.arange(32, dtype=jnp.uint32))[None, None, :]
    total = jnp.sum(jnp.where(bits, weights, jnp.uint32(0)), axis=2, dtype=jnp.uint32)
    return jax.lax.bitcast_convert_type(total, jnp.int32)


def bit_of(word: jax.Array, column: jax.Array) -> jax.Array:
    """Whether an entry is in the kept set, from its word."""
    return ((word >> (column & 31)) & 1) != 0


def load_kept(ref: Any, rows: Any, column: jax.Array, inside: jax.Array) -> jax.Array:
    """Which entries of a tile are in their row's kept set."""
    row = rows.start + jax.lax.broadcasted_iota(jnp.int32, column.shape, 0)
    return bit_of(plt.load(ref.at[row, column >> 5], mask=inside, other=0), column)


def tile_columns(tile: Any, options: Options) -> tuple[Any, jax.Array, jax.Array]:
    """A tile's entries: their slice, their token ids [R, W], and which of them there are."""
    first = tile * options.block_entries
    column = columns(first, (options.block_rows, options.block_entries))
    return pl.ds(first, options.block_entries), column, column < options.vocabulary


def load_bias(ref: Any, entries: Any, options: Options) -> jax.Array:
    """float32 [1, W] of a tile's entries."""
    inside = columns(entries.start, (1, entries.size)) < options.vocabulary
    return plt.load(ref.at[pl.ds(0, 1), entries], mask=inside, other=0.0).astype(jnp.float32)


def merge_parts(maximum: jax.Array, total: jax.Array, weighted: jax.Array) -> State:
    """The states of whole rows from those of parts, each [N, parts], merged from the first to the last."""
    parts = [tuple(x[:, p : p + 1] for x in (maximum, total, weighted)) for p in range(maximum.shape[1])]
    return reduce(merge, parts)  # pyright: ignore[reportArgumentType, reportReturnType]


def inside_vocabulary(tokens: jax.Array, options: Options) -> jax.Array:
    """Which tokens [N, K] are ids at all."""
    return (tokens >= 0) & (tokens < options.vocabulary)


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
    """Of tokens that were not met."""
    return jnp.full((rows, 1), NOTHING, jnp.float32)
