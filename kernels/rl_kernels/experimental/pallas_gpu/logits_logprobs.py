"""Pallas for GPUs, for JAX arrays: the logits are read once forward, once backward, a tile at a time.

The logits of the target tokens are few: XLA gathers them, and stores their gradients into the kernel's result.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from rl_kernels.common.pallas_helpers import (
    NOTHING,
    Options,
    empty_state,
    finalize_row_state,
    gradient,
    merge_row_states,
    row_scalars,
    scaled,
    single,
    tile_state,
)
from rl_kernels.experimental.pallas_gpu.helpers import (
    bit_of,
    grid_parameters,
    inside_vocabulary,
    load_allowed,
    load_bias,
    load_row,
    load_scale,
    merge_parts,
    packed,
    rows_here,
    store_own,
    tile_columns,
    tiles_of,
)

WARPS = 8


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def run(
    logits: jax.Array, tokens: jax.Array, scale: jax.Array, allowed: jax.Array | None, options: Options
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probabilities [N, K], entropy [N], logsumexp [N] of logits [N, V]; allowed bool [N, V]."""
    return _forward(logits, tokens, scale, allowed, options)[0]


def _scaled_tile(refs: tuple[Any, ...], rows: Any, scale: jax.Array, tile: Any, options: Options):
    """x, which of its tokens are possible, their ids, and the tile's slice."""
    logits, words, bias = refs
    vocab, column, inside = tile_columns(tile, options)
    # Rows that do not count are not read.
    read = inside & ~(scale < 0)
    z = plt.load(logits.at[rows, vocab], mask=read, other=0.0).astype(jnp.float32)
    if bias is not None:
        z = z + load_bias(bias, vocab, options)
    held = None if words is None else load_allowed(words, rows, column, read)
    x, possible = scaled(z, scale, held, column, options)
    return x, possible, column, vocab


def _forward(logits, tokens, scale, allowed, options):
    count = len(logits)
    tiles, each, parts = tiles_of(options)
    words = None if allowed is None else packed(allowed)

    def kernel(logits, scale, *rest):
        words, out = (rest[0], rest[1:]) if options.allowed else (None, rest)
        rows, there = rows_here(options, count)
        factor, counts = load_scale(scale, rows, there)
        part = pl.program_id(1)

        def absorb(tile, state):
            x, possible, *_ = _scaled_tile((logits, words, None), rows, factor, tile, options)
            return merge_row_states(state, tile_state(x, possible))

        last = jnp.where(counts, jnp.minimum((part + 1) * each, tiles), part * each)
        state = jax.lax.fori_loop(part * each, last, absorb, empty_state(options.block_tokens))
        for ref, value in zip(out, state, strict=True):
            plt.store(ref.at[rows, pl.ds(part, 1)], value, mask=there)

    state = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(count, options.block_tokens), parts),
        out_shape=[jax.ShapeDtypeStruct((count, parts), jnp.float32)] * 3,
        name="logits_logprobs_forward",
        **grid_parameters(options.interpret, WARPS),
    )(logits, scale[:, None], *([words] if options.allowed else []))
    maximum, total, weighted = state
    target = _targets(logits, tokens, scale, words, options)
    outputs = finalize_row_state(merge_parts(maximum, total, weighted), target)
    return outputs, (logits, tokens, scale, words, target, outputs)


def _targets(logits, tokens, scale, words, options):
    """x at the tokens [N, K]; −inf for one that cannot be sampled."""
    inside = inside_vocabulary(tokens, options)
    safe = jnp.where(inside, tokens, 0)
    held = None if words is None else bit_of(jnp.take_along_axis(words, safe >> 5, 1), safe)
    x, possible = scaled(jnp.take_along_axis(logits, safe, 1), scale[:, None], held, safe, options)
    return jnp.where(inside & possible, x, NOTHING)


def own_gradients(
    target: jax.Array,
    tokens: jax.Array,
    scale: jax.Array,
    scalars: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    options: Options,
) -> jax.Array:
    """dL/dz at the tokens [N, K], in float32, from x there; 0 where that is −inf."""
    a, b, logsumexp, g = scalars
    possible = target != NOTHING
    return gradient(target, possible, scale[:, None], tokens, single(tokens), (a, b, logsumexp), single(g), options)


def d_logits(
    logits: jax.Array,
    bias: jax.Array | None,
    scale: jax.Array,
    words: jax.Array | None,
    scalars: tuple[jax.Array, jax.Array, jax.Array],
    options: Options,
    dtype: Any,
) -> jax.Array:
    """dL/dlogits [N, V] but for the tokens' own: one program a block of rows and a tile."""
    count = len(logits)
    optional = [] if words is None else [words]
    if bias is not None:
        optional.append(bias[None, :])

    def kernel(logits, scale, a, b, logsumexp, *rest):
        *rest, out = rest
        words = rest.pop(0) if options.allowed else None
        shift = rest.pop() if bias is not None else None
        rows, there = rows_here(options, count)
        factor, _ = load_scale(scale, rows, there)
        row = load_row(a, rows, there, 0.0), load_row(b, rows, there, 0.0), load_row(logsumexp, rows, there, 0.0)
        x, possible, column, vocab = _scaled_tile((logits, words, shift), rows, factor, pl.program_id(1), options)
        dz = gradient(x, possible, factor, column, (), row, (), options)
        plt.store(out.at[rows, vocab], dz.astype(dtype), mask=there & (column < options.vocab_size))

    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(count, options.block_tokens), pl.cdiv(options.vocab_size, options.block_vocab)),
        out_shape=jax.ShapeDtypeStruct(logits.shape, dtype),
        name="logits_logprobs_backward",
        **grid_parameters(options.interpret, WARPS),
    )(logits, scale[:, None], *scalars, *optional)


def _backward(options, saved, cotangents):
    logits, tokens, scale, words, target, outputs = saved
    scalars = row_scalars(outputs, cotangents)
    own = own_gradients(target, tokens, scale, scalars, options)
    found = d_logits(logits, None, scale, words, scalars[:3], options, logits.dtype)
    return store_own(found, tokens, own), None, None, None


run.defvjp(_forward, _backward)
