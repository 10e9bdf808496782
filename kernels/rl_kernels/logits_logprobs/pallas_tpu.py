"""Pallas for TPU, for JAX arrays: the logits are read once forward, once backward, a block at a time."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from rl_kernels.common.pallas_helpers import Options, columns, finalize_row_state, gradient, row_scalars, scaled, single
from rl_kernels.common.pallas_tpu_helpers import absorb, grid_parameters, rows_spec


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def run(
    logits: jax.Array, tokens: jax.Array, scale: jax.Array, allowed: jax.Array | None, options: Options
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probabilities [N, K], entropy [N], logsumexp [N] of logits [N, V]; allowed int8 [N, V]."""
    return _forward(logits, tokens, scale, allowed, options)[0]


def _forward(logits, tokens, scale, allowed, options):
    count, targets = tokens.shape
    grid = (pl.cdiv(count, options.block_tokens), pl.cdiv(options.vocab_size, options.block_vocab))
    tile = pl.BlockSpec((options.block_tokens, options.block_vocab), lambda n, v: (n, v))
    widths = (1, 1, 1, targets)

    def kernel(logits, scale, tokens, *rest):
        allowed, state = (rest[0], rest[1:]) if options.allowed else (None, rest)
        v = pl.program_id(1)
        column = columns(v * options.block_vocab, logits.shape)
        x, possible = scaled(logits[...], scale[...], None if allowed is None else allowed[...] != 0, column, options)
        absorb(x, possible, column, single(tokens[...]), v, state)

    state = pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[tile, rows_spec(1, options), rows_spec(targets, options), *([tile] if options.allowed else [])],
        out_specs=[rows_spec(width, options) for width in widths],
        out_shape=[jax.ShapeDtypeStruct((count, width), jnp.float32) for width in widths],
        **grid_parameters(options.interpret),
    )(logits, scale[:, None], tokens, *([allowed] if options.allowed else []))
    maximum, total, weighted, target = state
    outputs = finalize_row_state((maximum, total, weighted), target)
    return outputs, (logits, tokens, scale, allowed, outputs)


def _backward(options, saved, cotangents):
    logits, tokens, scale, allowed, outputs = saved
    scalars = row_scalars(outputs, cotangents)
    count, targets = tokens.shape
    tile = pl.BlockSpec((options.block_tokens, options.block_vocab), lambda n, v: (n, v))

    def kernel(logits, scale, tokens, a, b, logsumexp, g, *rest):
        allowed, out = (rest[0], rest[1]) if options.allowed else (None, rest[0])
        v = pl.program_id(1)
        column = columns(v * options.block_vocab, logits.shape)
        x, possible = scaled(logits[...], scale[...], None if allowed is None else allowed[...] != 0, column, options)
        row = a[...], b[...], logsumexp[...]
        dz = gradient(x, possible, scale[...], column, single(tokens[...]), row, single(g[...]), options)
        out[...] = dz.astype(out.dtype)

    d_logits = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(count, options.block_tokens), pl.cdiv(options.vocab_size, options.block_vocab)),
        in_specs=[
            tile,
            *(rows_spec(width, options) for width in (1, targets, 1, 1, 1, targets)),
            *([tile] if options.allowed else []),
        ],
        out_specs=tile,
        out_shape=jax.ShapeDtypeStruct(logits.shape, logits.dtype),
        **grid_parameters(options.interpret),
    )(logits, scale[:, None], tokens, *scalars, *([allowed] if options.allowed else []))
    return d_logits, None, None, None


run.defvjp(_forward, _backward)
