"""What the Pallas kernels share: a tile's scaled logits, its contribution to a row's state, its gradient."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

NOTHING = float("-inf")


class Options(NamedTuple):
    """What is constant in a kernel. ``block_rows`` × ``block_entries`` logits are in the core's memory at a time."""

    vocabulary: int
    softcap: float | None
    kept: bool
    block_rows: int
    block_entries: int
    interpret: bool


def scaled(
    logits: jax.Array, inverse: jax.Array, kept: Any, tile: Any, options: Options
) -> tuple[jax.Array, jax.Array]:
    """x [R, W] in float32 with 0 where an entry is excluded, and which entries are not; ``tile`` counts tiles."""
    z = logits.astype(jnp.float32)
    column = tile * options.block_entries + jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
    # Beyond the vocabulary's end a block holds whatever was in memory, NaN included.
    possible = (column < options.vocabulary) & (z > NOTHING)
    if options.kept:
        possible = possible & (kept[...] != 0)
    z = jnp.where(possible, z, 0.0)
    if options.softcap is not None:
        z = options.softcap * jnp.tanh(z / options.softcap)
    return z * inverse[...], possible


def columns(tile: Any, options: Options, shape: tuple[int, ...]) -> jax.Array:
    """Token id of each entry of a tile."""
    return tile * options.block_entries + jax.lax.broadcasted_iota(jnp.int32, shape, 1)


def absorb(x: jax.Array, possible: jax.Array, tokens: Any, tile: Any, state: tuple[Any, ...], options: Options) -> None:
    """Merge a tile into the row states: refs (maximum, sum_exp, weighted) [R, 1] and target [R, K]."""
    maximum, total, weighted, target = state

    @pl.when(tile == 0)
    def _() -> None:
        maximum[...] = jnp.full(maximum.shape, NOTHING, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        weighted[...] = jnp.zeros(weighted.shape, jnp.float32)
        target[...] = jnp.full(target.shape, NOTHING, jnp.float32)

    before = maximum[...]
    top = jnp.maximum(before, jnp.max(jnp.where(possible, x, NOTHING), axis=1, keepdims=True))
    base = jnp.where(top > NOTHING, top, 0.0)
    # A row that has had nothing yet: differences with −inf would be NaN.
    moved = jnp.where(before > NOTHING, before - base, 0.0)
    shrunk = jnp.exp(moved)
    shifted = jnp.where(possible, x - base, 0.0)
    e = jnp.where(possible, jnp.exp(shifted), 0.0)
    weighted[...] = shrunk * (weighted[...] + moved * total[...]) + jnp.sum(shifted * e, axis=1, keepdims=True)
    total[...] = total[...] * shrunk + jnp.sum(e, axis=1, keepdims=True)
    maximum[...] = top
    ids = columns(tile, options, x.shape)
    for k in range(target.shape[1]):
        hit = possible & (ids == tokens[:, k : k + 1])
        found = jnp.max(jnp.where(hit, x, NOTHING), axis=1, keepdims=True)
        target[:, k : k + 1] = jnp.maximum(target[:, k : k + 1], found)


def gradient(
    x: jax.Array,
    possible: jax.Array,
    inverse: Any,
    tokens: Any,
    cotangents: tuple[Any, ...],
    tile: Any,
    options: Options,
) -> jax.Array:
    """dL/dz of a tile, from the row scalars a, b, logsumexp [R, 1] and the tokens' cotangents g [R, K]."""
    a, b, logsumexp, g = cotangents
    log_p = jnp.where(possible, x - logsumexp[...], 0.0)
    p = jnp.where(possible, jnp.exp(log_p), 0.0)
    dx = p * (a[...] + b[...] * log_p)
    ids = columns(tile, options, x.shape)
    for k in range(g.shape[1]):
        dx = dx + jnp.where(possible & (ids == tokens[:, k : k + 1]), g[:, k : k + 1], 0.0)
    dz = dx * inverse[...]
    if options.softcap is not None:
        capped = jnp.where(possible, x / (inverse[...] * options.softcap), 1.0)
        dz = dz * (1.0 - capped * capped)
    return dz


def finish(state: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probabilities [N, K], entropy [N], logsumexp [N] of row states; −inf, 0, −inf of a row without entries."""
    maximum, total, weighted, target = state
    some = total > 0
    safe = jnp.where(some, total, 1.0)
    logsumexp = maximum + jnp.log(safe)
    entropy = jnp.where(some, jnp.log(safe) - weighted / safe, 0.0)
    return target - jnp.where(some, logsumexp, 0.0), entropy[:, 0], logsumexp[:, 0]


def row_scalars(
    outputs: tuple[jax.Array, ...], cotangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """a, b, logsumexp [N, 1] and g [N, K] of `gradient`."""
    logprobs, entropy, logsumexp = outputs
    g, h, z = cotangents
    # A token that cannot be drawn takes no gradient: −inf has none.
    g = jnp.where(logprobs > NOTHING, g, 0.0)
    a = z - jnp.sum(g, axis=1) - h * entropy
    finite = jnp.where(logsumexp > NOTHING, logsumexp, 0.0)
    return a[:, None], -h[:, None], finite[:, None], g


def rows_spec(width: int, options: Options, *, rows_axis: int = 0) -> pl.BlockSpec:
    """Block of a [N, width] array that follows the rows' grid axis."""
    return pl.BlockSpec((options.block_rows, width), lambda *grid: (grid[rows_axis], 0))


def grid_parameters(interpret: bool) -> dict[str, Any]:
    """Keyword arguments of pallas_call: rows may run in any order, vocabulary tiles of a row may not."""
    parallel = pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"))
    return {"interpret": True} if interpret else {"compiler_params": parallel}
