"""Pallas for GPUs, for JAX arrays: forward one kernel that makes no logits, backward a block of them at a time.

Backward the three GEMMs are XLA's (cuBLAS, hipBLASLt), and one kernel turns a block of logits into its gradient. A
kernel with its own matmuls would either add to dL/dhidden and dL/dweight in an order that changes from run to run, or
compute every logit twice: four matmuls instead of three, each slower than cuBLAS's.
"""

from functools import partial
from math import isqrt

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from rl_kernels.common.pallas_helpers import (
    LEFT_OUT,
    Options,
    empty_state,
    finalize_row_state,
    matmul,
    merge_row_states,
    row_scalars,
    scaled,
    target_of,
    tile_state,
)
from rl_kernels.experimental.pallas_gpu.helpers import (
    empty_target,
    grid_parameters,
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
from rl_kernels.experimental.pallas_gpu.logits_logprobs import d_logits, own_gradients

WARPS = 8

# The tile of the backward's kernel, which is that of logits_logprobs; the forward's matmul has another.
_TILE = (4, 1024)


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def run(
    hidden: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    tokens: jax.Array,
    scale: jax.Array,
    allowed: jax.Array | None,
    options: Options,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probabilities [N, K], entropy [N], logsumexp [N] of hidden [N, H] @ weight [V, H].T + bias [V]."""
    return _forward(hidden, weight, bias, tokens, scale, allowed, options)[0]


def _forward(hidden, weight, bias, tokens, scale, allowed, options):
    count, hidden_size = hidden.shape
    targets = tokens.shape[1]
    tiles, each, parts = tiles_of(options)
    # 128 bytes of a row at a time.
    width = 128 // hidden.dtype.itemsize
    optional = [] if allowed is None else [packed(allowed)]
    if bias is not None:
        optional.append(bias[None, :])

    def kernel(hidden, weight, tokens, scale, *rest):
        *rest, maximum, total, weighted, target = rest
        words = rest.pop(0) if options.allowed else None
        shift = rest.pop() if bias is not None else None
        rows, there = rows_here(options, count)
        factor, counts = load_scale(scale, rows, there)
        ids = [load_row(tokens, rows, there, -1, k) for k in range(targets)]
        part = pl.program_id(1)

        def logits_of(vocab, inside):
            def add(chunk, z):
                first = chunk * width
                dim = pl.ds(first, width)
                of_row, of_entry = there, inside
                if hidden_size % width:
                    here = first + jax.lax.broadcasted_iota(jnp.int32, (1, width), 1) < hidden_size
                    of_row, of_entry = there & here, inside & here
                h = plt.load(hidden.at[rows, dim], mask=of_row, other=0.0)
                w = plt.load(weight.at[vocab, dim], mask=of_entry, other=0.0)
                return z + matmul(h, w, (1, 1))

            nothing = jnp.zeros((options.block_tokens, options.block_vocab), jnp.float32)
            return jax.lax.fori_loop(0, pl.cdiv(hidden_size, width), add, nothing)

        def absorb(tile, carry):
            state, found = carry
            vocab, column, inside = tile_columns(tile, options)
            row = tile * options.block_vocab + jax.lax.broadcasted_iota(jnp.int32, (options.block_vocab, 1), 0)
            z = logits_of(vocab, row < options.vocab_size)
            if shift is not None:
                z = z + load_bias(shift, vocab, options)
            held = None if words is None else load_allowed(words, rows, column, inside & there)
            x, possible = scaled(z, factor, held, column, options)
            found = [jnp.maximum(f, target_of(x, possible, column, k)) for f, k in zip(found, ids, strict=True)]
            return merge_row_states(state, tile_state(x, possible)), found

        last = jnp.where(counts, jnp.minimum((part + 1) * each, tiles), part * each)
        start = empty_state(options.block_tokens), [empty_target(options.block_tokens)] * targets
        state, found = jax.lax.fori_loop(part * each, last, absorb, start)
        for ref, value in zip((maximum, total, weighted), state, strict=True):
            plt.store(ref.at[rows, pl.ds(part, 1)], value, mask=there)
        for k, value in enumerate(found):
            plt.store(target.at[rows, pl.ds(part * targets + k, 1)], value, mask=there)

    maximum, total, weighted, target = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(count, options.block_tokens), parts),
        out_shape=[jax.ShapeDtypeStruct((count, parts * n), jnp.float32) for n in (1, 1, 1, targets)],
        name="linear_logprobs_forward",
        **grid_parameters(options.interpret, WARPS),
    )(hidden, weight, tokens, scale[:, None], *optional)
    found = jnp.max(target.reshape(count, parts, targets), axis=1)
    outputs = finalize_row_state(merge_parts(maximum, total, weighted), found)
    return outputs, (hidden, weight, bias, tokens, scale, allowed, found, outputs)


def _blocks(count, vocab_size, workspace):
    """Tokens in a block, and of the vocabulary about as many: the sums of a block are read and written once for each
    edge.
    """
    # Logits in float32 and their gradient in as much.
    elements = max(1, workspace // 8)
    vocab = _even(vocab_size, isqrt(elements))
    return _even(count, max(1, elements // vocab)), vocab


def _even(size, most):
    """Length of the pieces when ``size`` is cut into as few of at most ``most`` as will do; the last may overlap."""
    # A GEMM is fast where its operands begin at multiples of a tile.
    unit = 128 if most >= 128 else 1
    length = pl.cdiv(size, pl.cdiv(size, most // unit * unit))
    return min(size, pl.cdiv(length, unit) * unit)


def _backward(options, saved, cotangents):
    hidden, weight, bias, tokens, scale, allowed, target, outputs = saved
    scalars = row_scalars(outputs, cotangents)
    own = own_gradients(target, tokens, scale, scalars, options)
    count, vocab_size = len(hidden), len(weight)
    size, width = _blocks(count, vocab_size, options.workspace)
    # As in the torch operations: a half-precision GEMM takes dL/dlogits in half precision, and sums in float32.
    dtype = hidden.dtype if hidden.dtype.itemsize == 2 else jnp.float32
    tile = [min(t, 1 << (n - 1).bit_length()) for t, n in zip(_TILE, (size, width), strict=True)]
    inner = options._replace(vocab_size=width, block_tokens=tile[0], block_vocab=tile[1])

    def cut(x, start, length, axis=0):
        return jax.lax.dynamic_slice_in_dim(x, start, length, axis)

    def over_entries(j, carry):
        d_hidden, d_weight, d_bias = carry
        # The last block begins earlier instead of ending later. What it shares with the block before is computed and
        # stored again in dL/dweight, but not added to dL/dhidden again.
        first = jnp.minimum(j * width, vocab_size - width)
        w = cut(weight, first, width)
        new = first + jnp.arange(width, dtype=jnp.int32) >= j * width
        new_w = jnp.where(new[:, None], w, jnp.zeros_like(w))
        shift = None if bias is None else cut(bias, first, width)

        def over_rows(i, carry):
            d_hidden, d_w, d_shift = carry
            start = jnp.minimum(i * size, count - size)
            h = cut(hidden, start, size)
            a, b, logsumexp = (cut(x, start, size) for x in scalars[:3])
            # A row of an earlier block does not count again.
            done = start + jnp.arange(size, dtype=jnp.int32) < i * size
            factor = jnp.where(done, LEFT_OUT, cut(scale, start, size))
            held = None if allowed is None else packed(jax.lax.dynamic_slice(allowed, (start, first), (size, width)))
            dz = d_logits(matmul(h, w, (1, 1)), shift, factor, held, (a, b, logsumexp), inner, dtype)
            mine = jnp.where(done[:, None], 0.0, cut(own, start, size))
            dz = store_own(dz, cut(tokens, start, size) - first, mine)
            sums = cut(d_hidden, start, size) + matmul(dz, new_w, (1, 0))
            if bias is not None:
                d_shift = d_shift + jnp.sum(dz.astype(jnp.float32), axis=0)
            d_hidden = jax.lax.dynamic_update_slice_in_dim(d_hidden, sums, start, 0)
            return d_hidden, d_w + matmul(dz, h, (0, 0)), d_shift

        nothing = jnp.zeros(w.shape, jnp.float32), None if bias is None else jnp.zeros(width, jnp.float32)
        d_hidden, d_w, d_shift = jax.lax.fori_loop(0, pl.cdiv(count, size), over_rows, (d_hidden, *nothing))
        d_weight = jax.lax.dynamic_update_slice_in_dim(d_weight, d_w.astype(weight.dtype), first, 0)
        if bias is not None:
            d_bias = jax.lax.dynamic_update_slice_in_dim(d_bias, d_shift.astype(bias.dtype), first, 0)
        return d_hidden, d_weight, d_bias

    start = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros_like(weight), None if bias is None else jnp.zeros_like(bias)
    d_hidden, d_weight, d_bias = jax.lax.fori_loop(0, pl.cdiv(vocab_size, width), over_entries, start)
    return d_hidden.astype(hidden.dtype), d_weight, d_bias, None, None, None


run.defvjp(_forward, _backward)
