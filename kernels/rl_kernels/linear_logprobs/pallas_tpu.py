"""Pallas for TPU, for JAX arrays: logits exist a block at a time in the core's memory, forward and backward.

Two kernels make the backward, each with the logits computed again: one sums dL/dhidden over the vocabulary, the other
dL/dweight over the rows, both in float32.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from rl_kernels.common.pallas_helpers import (
    Options,
    columns,
    finalize_row_state,
    gradient,
    matmul,
    row_scalars,
    scaled,
    single,
)
from rl_kernels.common.pallas_tpu_helpers import absorb, grid_parameters, rows_spec


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def run(
    hidden: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    tokens: jax.Array,
    scale: jax.Array,
    allowed: jax.Array | None,
    options: Options,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probabilities [N, K], entropy [N], logsumexp [N] of hidden [N, H] @ weight [V, H].T + bias [V]."""
    return _forward(hidden, weight, bias, tokens, scale, allowed, options)[0]


def _tile(refs, v, options):
    """x, which of its tokens are possible, and their ids, from the refs that every kernel has.

    Beyond the end of the vocabulary the logits are made of whatever is in memory; `scaled` excludes them.
    """
    hidden, weight, bias, _, scale, *rest = refs
    allowed = rest[0][...] != 0 if options.allowed else None
    logits = matmul(hidden[...], weight[...], (1, 1)) + bias[...].astype(jnp.float32)
    column = columns(v * options.block_vocab, logits.shape)
    return *scaled(logits, scale[...], allowed, column, options), column


def _inputs(hidden, weight, bias, tokens, scale, allowed, options, order):
    """Every kernel's arguments and their block specifications; ``order``: the grid axes of rows and vocabulary."""
    n, v = order
    hidden_size, targets = hidden.shape[1], tokens.shape[1]
    specs = [
        rows_spec(hidden_size, options, rows_axis=n),
        pl.BlockSpec((options.block_vocab, hidden_size), lambda *grid: (grid[v], 0)),
        pl.BlockSpec((1, options.block_vocab), lambda *grid: (0, grid[v])),
        rows_spec(targets, options, rows_axis=n),
        rows_spec(1, options, rows_axis=n),
    ]
    arguments = [hidden, weight, bias[None, :], tokens, scale[:, None]]
    if options.allowed:
        specs.append(pl.BlockSpec((options.block_tokens, options.block_vocab), lambda *grid: (grid[n], grid[v])))
        arguments.append(allowed)
    return arguments, specs


def _tiles(options, count):
    return pl.cdiv(count, options.block_tokens), pl.cdiv(options.vocab_size, options.block_vocab)


def _forward(hidden, weight, bias, tokens, scale, allowed, options):
    arguments, specs = _inputs(hidden, weight, bias, tokens, scale, allowed, options, (0, 1))
    widths = (1, 1, 1, tokens.shape[1])

    def kernel(*refs):
        refs, state = refs[: len(arguments)], refs[len(arguments) :]
        v = pl.program_id(1)
        x, possible, column = _tile(refs, v, options)
        absorb(x, possible, column, single(refs[3][...]), v, state)

    state = pl.pallas_call(
        kernel,
        grid=_tiles(options, len(hidden)),
        in_specs=specs,
        out_specs=[rows_spec(width, options) for width in widths],
        out_shape=[jax.ShapeDtypeStruct((len(hidden), width), jnp.float32) for width in widths],
        **grid_parameters(options.interpret),
    )(*arguments)
    maximum, total, weighted, target = state
    outputs = finalize_row_state((maximum, total, weighted), target)
    return outputs, (hidden, weight, bias, tokens, scale, allowed, outputs)


def _backward(options, saved, cotangents):
    hidden, weight, bias, tokens, scale, allowed, outputs = saved
    scalars = row_scalars(outputs, cotangents)
    n_tiles, v_tiles = _tiles(options, len(hidden))
    hidden_size = hidden.shape[1]

    def tile_gradient(refs, n, v):
        x, possible, column = _tile(refs, v, options)
        a, b, logsumexp, g = (ref[...] for ref in refs[-4:])
        # Rows beyond the end of the batch hold whatever is in memory, and must not be summed.
        row = n * options.block_tokens + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
        tokens, scale = refs[3][...], refs[4][...]
        dz = gradient(x, possible, scale, column, single(tokens), (a, b, logsumexp), single(g), options)
        return jnp.where(row < len(saved[0]), dz, 0.0)

    def summed(dz, operand, contract, limit, first):
        """Matmul with zeros for the operand's rows beyond its end (0 · NaN is NaN)."""
        index = first + jax.lax.broadcasted_iota(jnp.int32, operand.shape, 0)
        operand = jnp.where(index < limit, operand, jnp.zeros_like(operand)).astype(jnp.float32)
        return matmul(dz, operand, (contract, 0))

    def hidden_kernel(*refs):
        *refs, out = refs
        n, v = pl.program_id(0), pl.program_id(1)
        dz = tile_gradient(refs, n, v)

        @pl.when(v == 0)
        def _():
            out[...] = jnp.zeros(out.shape, out.dtype)

        out[...] += summed(dz, refs[1][...], 1, options.vocab_size, v * options.block_vocab)

    def weight_kernel(*refs):
        *refs, out, out_bias = refs
        v, n = pl.program_id(0), pl.program_id(1)
        dz = tile_gradient(refs, n, v)

        @pl.when(n == 0)
        def _():
            out[...] = jnp.zeros(out.shape, out.dtype)
            out_bias[...] = jnp.zeros(out_bias.shape, out_bias.dtype)

        out[...] += summed(dz, refs[0][...], 0, len(saved[0]), n * options.block_tokens)
        out_bias[...] += jnp.sum(dz, axis=0, keepdims=True)

    def specs_of(order):
        arguments, specs = _inputs(hidden, weight, bias, tokens, scale, allowed, options, order)
        return [*arguments, *scalars], [
            *specs,
            *(rows_spec(width, options, rows_axis=order[0]) for width in (1, 1, 1, tokens.shape[1])),
        ]

    arguments, specs = specs_of((0, 1))
    d_hidden = pl.pallas_call(
        hidden_kernel,
        grid=(n_tiles, v_tiles),
        in_specs=specs,
        out_specs=rows_spec(hidden_size, options),
        out_shape=jax.ShapeDtypeStruct(hidden.shape, jnp.float32),
        **grid_parameters(options.interpret),
    )(*arguments)
    arguments, specs = specs_of((1, 0))
    d_weight, d_bias = pl.pallas_call(
        weight_kernel,
        grid=(v_tiles, n_tiles),
        in_specs=specs,
        out_specs=[
            pl.BlockSpec((options.block_vocab, hidden_size), lambda v, n: (v, 0)),
            pl.BlockSpec((1, options.block_vocab), lambda v, n: (0, v)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct(weight.shape, jnp.float32),
            jax.ShapeDtypeStruct((1, options.vocab_size), jnp.float32),
        ],
        **grid_parameters(options.interpret),
    )(*arguments)
    return (
        d_hidden.astype(hidden.dtype),
        d_weight.astype(weight.dtype),
        d_bias[0].astype(bias.dtype),
        None,
        None,
        None,
    )


run.defvjp(_forward, _backward)
