"""One masked linear recurrence from the end of a row; every return, advantage and per-segment sum is made of it."""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from rl_fn._numerics import Array, Mask, Number, Segments, Tokens, as_float, as_ids, as_mask

BLOCK = 8


def segment_ends(shape: tuple[int, ...], segment_ids: Array | None) -> jax.Array:
    """Mark the last position of every segment (without segment_ids, of every row)."""
    if shape[-1] == 0:
        return jnp.ones(shape, dtype=bool)
    last = jnp.ones((*shape[:-1], 1), dtype=bool)
    if segment_ids is None:
        return jnp.concatenate([jnp.zeros((*shape[:-1], shape[-1] - 1), dtype=bool), last], axis=-1)
    ids = as_ids(segment_ids)
    return jnp.concatenate([ids[..., 1:] != ids[..., :-1], last], axis=-1)


def segment_starts(shape: tuple[int, ...], segment_ids: Array | None) -> jax.Array:
    """Mark the first position of every segment (without segment_ids, of every row)."""
    if shape[-1] == 0:
        return jnp.ones(shape, dtype=bool)
    first = jnp.ones((*shape[:-1], 1), dtype=bool)
    return jnp.concatenate([first, segment_ends(shape, segment_ids)[..., :-1]], axis=-1)


def scan(decay: jax.Array, inputs: jax.Array, init: jax.Array, *, reverse: bool) -> jax.Array:
    """xₜ = decayₜ xₜ₊₁ + inputsₜ (or xₜ₋₁, without reverse) from init, one a row, in a logarithmic number of steps.

    Every block of BLOCK positions is run through at once, from 0; then the blocks' ends, by the same function; then
    each block takes its share of the one beside it. The steps are written out, so that a compiler makes one loop of
    them: on a CPU several times faster than jax.lax.associative_scan, whose levels are interleaved in memory.
    """
    *rows, length = inputs.shape
    blocks = -(-length // BLOCK)
    width = BLOCK if blocks > 1 else length
    surplus = blocks * width - length
    if surplus:
        gap = [(0, 0)] * len(rows) + [(0, surplus)]
        # What is added at the end lets init through.
        decay, inputs = jnp.pad(decay, gap, constant_values=1.0), jnp.pad(inputs, gap)
    a, b = (x.reshape(*rows, blocks, width) for x in (decay, inputs))
    order = range(width - 1, -1, -1) if reverse else range(width)
    columns = [tuple(jax.lax.index_in_dim(x, i, axis=x.ndim - 1, keepdims=False) for x in (a, b)) for i in order]
    if blocks > 1:
        state = [columns[0]]
        for decays, added in columns[1:]:
            state.append((decays * state[-1][0], decays * state[-1][1] + added))
        products, sums = state[-1]
        ends = scan(products, sums, init, reverse=reverse)
        first = init[..., None]
        beside = _following(ends, first) if reverse else jnp.concatenate([first, ends[..., :-1]], axis=-1)
        values = [decays * beside + x for decays, x in state]
    else:
        carry, values = init[..., None], []
        for decays, added in columns:
            carry = decays * carry + added
            values.append(carry)
    stacked = jnp.stack(values[::-1] if reverse else values, axis=-1).reshape(*rows, blocks * width)
    return stacked[..., :length] if surplus else stacked


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
    nothing = jnp.zeros_like(x[..., 0])
    after = inside_after * _following(scan(inside_after, x, nothing, reverse=True), nothing[..., None])
    return after + scan(inside_before, x, nothing, reverse=False)


def _following(x: jax.Array, last: jax.Array) -> jax.Array:
    return jnp.concatenate([x[..., 1:], last], axis=-1)


def _per_row(value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """One value a row, whether one is given for all rows or one for each."""
    return jnp.broadcast_to(value, shape[:-1])


def next_counted(values: jax.Array, mask: jax.Array, last: jax.Array, segment_ids: Array | None) -> jax.Array:
    """At every position, the value of the next counted position of its segment; `last` where there is none."""
    if values.shape[-1] == 0:
        return values
    passes = jnp.where(mask, 0.0, 1.0).astype(values.dtype)
    return _after(passes, jnp.where(mask, values, 0.0), _per_row(last, values.shape), segment_ids)


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
    carried = _carried(*_passing(a, b, counted), _per_row(start, b.shape), segment_ids)
    return jnp.where(counted, carried, 0.0)


def following_recurrence(
    decay: jax.Array, inputs: jax.Array, mask: jax.Array, init: jax.Array, segment_ids: Array | None
) -> jax.Array:
    """At every position, linear_recurrence's x of its segment's next counted position; init where there is none."""
    if inputs.shape[-1] == 0:
        return inputs
    return _after(*_passing(decay, inputs, mask), _per_row(init, inputs.shape), segment_ids)


def _passing(a: jax.Array, b: jax.Array, counted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Decay and input with which a masked position holds the x that passes through it."""
    a = a if a.ndim in (0, b.ndim) else a[..., None]
    return jnp.where(counted, a, 1.0), jnp.where(counted, b, 0.0)


def _carried(a: jax.Array, b: jax.Array, init: jax.Array, segment_ids: Array | None) -> jax.Array:
    """Run the recurrence, from init at the end of every segment."""
    if segment_ids is None:
        return scan(a, b, init, reverse=True)
    ends = segment_ends(b.shape, segment_ids)
    b = b + jnp.where(ends, a * init[..., None], 0.0)
    return scan(jnp.where(ends, 0.0, a), b, jnp.zeros_like(init), reverse=True)


def _after(a: jax.Array, b: jax.Array, init: jax.Array, segment_ids: Array | None) -> jax.Array:
    """At every position, what is carried to it from the one after it; init at the end of its segment."""
    first = init[..., None]
    behind = _following(_carried(a, b, init, segment_ids), first)
    return behind if segment_ids is None else jnp.where(segment_ends(b.shape, segment_ids), first, behind)
