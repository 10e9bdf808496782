"""Pallas for GPUs, for JAX arrays: forward one kernel that makes no logits, backward a block of them at a time.

Backward the three products are XLA's, which are the vendor's, and one kernel turns a block of logits into its gradient.
A kernel that made the products too would either add to dL/dhidden and dL/dweight in an order that changes from run to
run, or compute every logit twice, once for each: four products instead of three, each slower than the vendor's.
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
    finish,
    merge,
    product,
    row_scalars,
    scaled,
    target_of,
    tile_state,
)
from rl_kernels.experimental.pallas_gpu.helpers import (
    empty_target,
    grid_parameters,
    load_bias,
    load_kept,
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

# Of the kernel that the backward shares with logits_logprobs: a tile of its own, whatever the forward's product takes.
_TILE = (4, 1024)


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def run(
    hidden: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    tokens: jax.Array,
    scale: jax.Array,
    kept: jax.Array | None,
    options: Options,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probabilities [N, K], entropy [N], logsumexp [N] of hidden [N, H] @ weight [V, H].T + bias [V]."""
    return _forward(hidden, weight, bias, tokens, scale, kept, options)[0]


def _forward(hidden, weight, bias, tokens, scale, kept, options):
    count, features = hidden.shape
    targets = tokens.shape[1]
    tiles, each, parts = tiles_of(options)
    # 128 bytes of a row at a time.
    width = 128 // hidden.dtype.itemsize
    optional = [] if kept is None else [packed(kept)]
    if bias is not None:
        optional.append(bias[None, :])

    def kernel(hidden, weight, tokens, scale, *rest):
        *rest, maximum, total, weighted, target = rest
        words = rest.pop(0) if options.kept else None
        shift = rest.pop() if bias is not None else None
        rows, there = rows_here(options, count)
        factor, counts = load_scale(scale, rows, there)
        ids = [load_row(tokens, rows, there, -1, k) for k in range(targets)]
        part = pl.program_id(1)

        def logits_of(entries, inside):
            def add(chunk, z):
                first = chunk * width
                feature = pl.ds(first, width)
                of_row, of_entry = there, inside
                if features % width:
                    here = first + jax.lax.broadcasted_iota(jnp.int32, (1, width), 1) < features
                    of_row, of_entry = there & here, inside & here
                h = plt.load(hidden.at[rows, feature], mask=of_row, other=0.0)
                w = plt.load(weight.at[entries, feature], mask=of_entry, other=0.0)
                return z + product(h, w, (1, 1))

            nothing = jnp.zeros((options.block_rows, options.block_entries), jnp.float32)
            return jax.lax.fori_loop(0, pl.cdiv(features, width), add, nothing)

        def absorb(tile, carry):
            state, found = carry
            entries, column, inside = tile_columns(tile, options)
            row = tile * options.block_entries + jax.lax.broadcasted_iota(jnp.int32, (options.block_entries, 1), 0)
            z = logits_of(entries, row < options.vocabulary)
            if shift is not None:
                z = z + load_bias(shift, entries, options)
            held = None if words is None else load_kept(words, rows, column, inside & there)
            x, possible = scaled(z, factor, held, column, options)
            found = [jnp.maximum(f, target_of(x, possible, column, k)) for f, k in zip(found, ids, strict=True)]
            return merge(state, tile_state(x, possible)), found

        last = jnp.where(counts, jnp.minimum((part + 1) * each, tiles), part * each)
        start = empty_state(options.block_rows), [empty_target(options.block_rows)] * targets
        state, found = jax.lax.fori_loop(part * each, last, absorb, start)
        for ref, value in zip((maximum, total, weighted), state, strict=True):
            plt.store(ref.at[rows, pl.ds(part, 1)], value, mask=there)
        for k, value in enumerate(found):
            plt.store(target.at[rows, pl.ds(part * targets + k, 1)], value, mask=there)

    maximum, total, weighted, target = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(count, options.block_rows), parts),
        out_shape=[jax.ShapeDtypeStruct((count, parts * n), jnp.float32) for n in (1, 1, 1, targets)],
        name="linear_logprobs_forward",
        **grid_parameters(options.interpret, WARPS),
    )(hidden, weight, tokens, scale[:, None], *optional)
    found = jnp.max(target.reshape(count, parts, targets), axis=1)
    outputs = finish(merge_parts(maximum, total, weighted), found)
    return outputs, (hidden, weight, bias, tokens, scale, kept, found, outputs)


def _blocks(count, vocabulary, workspace):
    """Rows and entries in a block, about as many: a block's sums are read and written once for each of its edges."""
    # Logits in float32 and their gradient in as much.
    elements = max(1, workspace // 8)
    entries = _even(vocabulary, isqrt(elements))
    return _even(count, max(1, elements // entries)), entries


def _even(size, most):
    """Length of the pieces when ``size`` is cut into as few of at most ``most`` as will do; the last may overlap."""
    # A vendor's product is fast where it begins at multiples of a tile.
    unit = 128 if most >= 128 else 1
    length = pl.cdiv(size, pl.cdiv(size, most // unit * unit))
    return min(size, pl.cdiv(length, unit) * unit)


def _backward(options, saved, cotangents):
    hidden, weight, bias, tokens, scale, kept, target, outputs = saved
    scalars = row_scalars(outputs, cotangents)
    own = own_gradients(target, tokens, scale, scalars, options)
    count, vocabulary = len(hidden), len(weight)
    size, width = _blocks(count, vocabulary, options.workspace)
    # Gradients of halves are halves in a product, as everywhere; its sums are float32's.
    dtype = hidden.dtype if hidden.dtype.itemsize == 2 else jnp.float32
    tile = [min(t, 1 << (n - 1).bit_length()) for t, n in zip(_TILE, (size, width), strict=True)]
    inner = options._replace(vocabulary=width, block_rows=tile[0], block_entries=tile[1])

    def cut(x, start, length, axis=0):
        return jax.lax.dynamic_slice_in_dim(x, start, length, axis)

    def over_entries(j, carry):
        d_hidden, d_weight, d_bias = carry
        # The last block begins earlier instead of ending later: what it has in common with the one before is computed
        # again and stored again in dL/dweight, and left out of the sum that is dL/dhidden.
        first = jnp.minimum(j * width, vocabulary - width)
        w = cut(weight, first, width)
        new = first + jnp.arange(width, dtype=jnp.int32) >= j * width
        new_w = jnp.where(new[:, None], w, jnp.zeros_like(w))
        shift = None if bias is None else cut(bias, first, width)

        def over_rows(i, carry):
            d_hidden, d_w, d_shift = carry
            start = jnp.minimum(i * size, count - size)
            h = cut(hidden, start, size)
            a, b, logsumexp = (cut(x, start, size) for x in scalars[:3])
            # A row that had its turn does not count again.
            done = start + jnp.arange(size, dtype=jnp.int32) < i * size
            factor = jnp.where(done, LEFT_OUT, cut(scale, start, size))
            held = None if kept is None else packed(jax.lax.dynamic_slice(kept, (start, first), (size, width)))
            dz = d_logits(product(h, w, (1, 1)), shift, factor, held, (a, b, logsumexp), inner, dtype)
            mine = jnp.where(done[:, None], 0.0, cut(own, start, size))
            dz = store_own(dz, cut(tokens, start, size) - first, mine)
            sums = cut(d_hidden, start, size) + product(dz, new_w, (1, 0))
            if bias is not None:
                d_shift = d_shift + jnp.sum(dz.astype(jnp.float32), axis=0)
            d_hidden = jax.lax.dynamic_update_slice_in_dim(d_hidden, sums, start, 0)
            return d_hidden, d_w + product(dz, h, (0, 0)), d_shift

        nothing = jnp.zeros(w.shape, jnp.float32), None if bias is None else jnp.zeros(width, jnp.float32)
        d_hidden, d_w, d_shift = jax.lax.fori_loop(0, pl.cdiv(count, size), over_rows, (d_hidden, *nothing))
        d_weight = jax.lax.dynamic_update_slice_in_dim(d_weight, d_w.astype(weight.dtype), first, 0)
        if bias is not None:
            d_bias = jax.lax.dynamic_update_slice_in_dim(d_bias, d_shift.astype(bias.dtype), first, 0)
        return d_hidden, d_weight, d_bias

    start = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros_like(weight), None if bias is None else jnp.zeros_like(bias)
    d_hidden, d_weight, d_bias = jax.lax.fori_loop(0, pl.cdiv(vocabulary, width), over_entries, start)
    return d_hidden.astype(hidden.dtype), d_weight, d_bias, None, None, None


run.defvjp(_forward, _backward)
