"""One masked linear recurrence from the end of a row; every return, advantage and per-segment sum is made of it."""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from rl_fn._numerics import Array, Mask, Number, Segments, Tokens, as_float, as_mask

BLOCK = 8


def segment_ends(shape: tuple[int, ...], segment_ids: Array | None) -> jax.Array:
    """Mark the last position of every segment (without segment_ids, of every row)."""
    last = jnp.ones((*shape[:-1], 1), dtype=bool)
    if segment_ids is None:
        return jnp.concatenate([jnp.zeros((*shape[:-1], shape[-1] - 1), dtype=bool), last], axis=-1)
    ids = jnp.asarray(segment_ids)
    return jnp.concatenate([ids[..., 1:] != ids[..., :-1], last], axis=-1)


def segment_starts(shape: tuple[int, ...], segment_ids: Array | None) -> jax.Array:
    """Mark the first position of every segment (without segment_ids, of every row)."""
    first = jnp.ones((*shape[:-1], 1), dtype=bool)
    return jnp.concatenate([first, segment_ends(shape, segment_ids)[..., :-1]], axis=-1)


def scan(decay: jax.Array, inputs: jax.Array, *, reverse: bool) -> jax.Array:
    """xₜ = decayₜ xₜ₊₁ + inputsₜ (or xₜ₋₁, without reverse), in a logarithmic number of steps.

    Every block of BLOCK positions is run through at once, from 0; then the blocks' ends, by the same function; then
    each block takes its share of the one beside it. The steps are written out, so that a compiler makes one loop of
    them: on a CPU several times faster than jax.lax.associative_scan, whose levels are interleaved in memory.
    """
    *rows, length = inputs.shape
    blocks = -(-length // BLOCK)
    width = BLOCK if blocks > 1 else length
    gap = [(0, 0)] * len(rows) + [(0, blocks * width - length)]
    a, b = (jnp.pad(x, gap).reshape(*rows, blocks, width) for x in (decay, inputs))
    order = range(width - 1, -1, -1) if reverse else range(width)
    columns = [tuple(jax.lax.index_in_dim(x, i, axis=x.ndim - 1, keepdims=False) for x in (a, b)) for i in order]
    state = [columns[0]]
    for decays, added in columns[1:]:
        state.append((decays * state[-1][0], decays * state[-1][1] + added))
    if blocks > 1:
        ends = scan(*state[-1], reverse=reverse)
        zero = jnp.zeros_like(ends[..., :1])
        beside = _following(ends, zero) if reverse else jnp.concatenate([zero, ends[..., :-1]], axis=-1)
        state = [(decays, decays * beside + values) for decays, values in state]
    values = [x for _, x in (state[::-1] if reverse else state)]
    return jnp.stack(values, axis=-1).reshape(*rows, blocks * width)[..., :length]


def segment_totals(x: jax.Array, segment_ids: Array | None) -> jax.Array:
    """At every position, the sum of x over that position's segment (the whole row without segment_ids).

    A sum up to and a sum from the position, not a difference of running totals: another segment's large values cost
    this one no precision.
    """
    if segment_ids is None:
        return jnp.broadcast_to(jnp.sum(x, axis=-1, keepdims=True), x.shape)
    if x.shape[-1] == 0:
        return x
    inside_after = jnp.where(segment_ends(x.shape, segment_ids), 0.0, 1.0).astype(x.dtype)
    inside_before = jnp.where(segment_starts(x.shape, segment_ids), 0.0, 1.0).astype(x.dtype)
    after = inside_after * _following(scan(inside_after, x, reverse=True), jnp.zeros_like(x[..., :1]))
    return after + scan(inside_before, x, reverse=False)


def _following(x: jax.Array, last: jax.Array) -> jax.Array:
    return jnp.concatenate([x[..., 1:], last], axis=-1)


def _per_row(value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    column = value[..., None] if value.ndim else value
    return jnp.broadcast_to(column, shape)


def next_counted(values: jax.Array, mask: jax.Array, last: jax.Array, segment_ids: Array | None) -> jax.Array:
    """At every position, the value of the next counted position of its segment; `last` where there is none."""
    if values.shape[-1] == 0:
        return values
    ends = segment_ends(values.shape, segment_ids)
    last = _per_row(last, values.shape)
    here = jnp.where(mask, values, jnp.where(ends, last, 0.0))
    passes = jnp.where(mask | ends, 0.0, 1.0).astype(values.dtype)
    carried = scan(passes, here, reverse=True)
    return jnp.where(ends, last, _following(carried, last[..., -1:]))


def linear_recurrence(
    decay: Number | Float[Array, "..."],
    inputs: Tokens,
    mask: Mask,
    *,
    init: Number | Float[Array, "..."] = 0.0,
    segment_ids: Segments | None = None,
) -> Tokens:
    """Linear recurrence from the end of each row that jumps over masked positions.

    xₜ = aₜ xₜ₊₁ + bₜ, where t + 1 is the next counted position.

    Args:
        decay: a, a number, one per row `*batch`, or one per token `*batch T`.
        inputs: b, `*batch T`.
        mask: True where a position counts, `*batch T`; the others pass x through and return 0.
        init: x after the last position of every segment, a number or `*batch`.
        segment_ids: `*batch T`, equal and contiguous within a packed sequence; the recurrence starts anew in each.

    Returns:
        x, `*batch T`, zero where masked.

    Raises:
        ValueError: if the mask is not boolean.

    Reference:
        Blelloch, Prefix Sums and Their Applications (CMU-CS-90-190, 1990): first-order recurrences.

    >>> import jax.numpy as jnp
    >>> mask = jnp.array([True, False, True])
    >>> linear_recurrence(0.5, jnp.array([1.0, jnp.nan, 4.0]), mask).tolist()
    [3.0, 0.0, 4.0]

    """
    b, a, start = as_float(inputs, decay, init)
    counted = as_mask(mask)
    if b.shape[-1] == 0:
        return b
    ends = segment_ends(b.shape, segment_ids)
    return jnp.where(counted, _carried(a, b, counted, _per_row(start, b.shape), ends), 0.0)


def following_recurrence(
    decay: jax.Array, inputs: jax.Array, mask: jax.Array, init: jax.Array, segment_ids: Array | None
) -> jax.Array:
    """At every position, linear_recurrence's x of its segment's next counted position; init where there is none."""
    if inputs.shape[-1] == 0:
        return inputs
    ends, last = segment_ends(inputs.shape, segment_ids), _per_row(init, inputs.shape)
    return jnp.where(ends, last, _following(_carried(decay, inputs, mask, last, ends), last[..., -1:]))


def _carried(a: jax.Array, b: jax.Array, counted: jax.Array, start: jax.Array, ends: jax.Array) -> jax.Array:
    """Run the recurrence without masking its result: a masked position holds the x that passes through it."""
    a = a if a.ndim == b.ndim else _per_row(a, b.shape)
    a = jnp.where(counted, a, 1.0)
    b = jnp.where(counted, b, 0.0)
    b = b + jnp.where(ends, a * start, 0.0)
    return scan(jnp.where(ends, 0.0, a), b, reverse=True)
