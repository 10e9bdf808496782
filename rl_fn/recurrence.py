"""One masked linear recurrence from the end of a row; every return, advantage and per-segment sum is made of it."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from rl_fn._numerics import (
    ANY,
    Array,
    Mask,
    Number,
    Segments,
    Shape,
    Tokens,
    as_float,
    as_ids,
    as_mask,
    per_row,
    same_shape,
)

BLOCK = 8
Step = tuple[jax.Array | None, jax.Array, jax.Array | None]  # decay, input, cut


def segment_ends(shape: Shape, segment_ids: Array | None) -> jax.Array:
    """Mark the last position of every segment (without segment_ids, of every row)."""
    if shape[-1] == 0:
        return jnp.ones(shape, dtype=bool)
    last = jnp.ones((*shape[:-1], 1), dtype=bool)
    if segment_ids is None:
        return jnp.concatenate([jnp.zeros((*shape[:-1], shape[-1] - 1), dtype=bool), last], axis=-1)
    ids = as_ids(segment_ids)
    return jnp.concatenate([ids[..., 1:] != ids[..., :-1], last], axis=-1)


def segment_starts(shape: Shape, segment_ids: Array | None) -> jax.Array:
    """Mark the first position of every segment (without segment_ids, of every row)."""
    if shape[-1] == 0:
        return jnp.ones(shape, dtype=bool)
    first = jnp.ones((*shape[:-1], 1), dtype=bool)
    return jnp.concatenate([first, segment_ends(shape, segment_ids)[..., :-1]], axis=-1)


def scan(
    decay: jax.Array | None, inputs: jax.Array, init: jax.Array, *, reverse: bool, cuts: jax.Array | None = None
) -> jax.Array:
    """xₜ = decayₜ xₜ₊₁ + inputsₜ (or xₜ₋₁, without reverse) from init, one a row, in a logarithmic number of steps.

    Without a decay it is 1. Where cuts is True nothing is carried in: xₜ = inputsₜ. A selection, since a decay of 0
    would make NaN of a neighbour's infinity.

    Every block of BLOCK positions is run through at once, from 0; then the blocks' ends, by the same function; then
    each block takes its share of the one beside it. The steps are written out, so that a compiler makes one loop of
    them: on a CPU several times faster than jax.lax.associative_scan, whose levels are interleaved in memory.
    """
    if decay is not None and cuts is not None:
        decay = jnp.where(cuts, 0.0, decay)
    *rows, length = inputs.shape
    if not isinstance(length, int):
        return _scan_of_symbolic_length(decay, inputs, init, cuts, reverse=reverse)
    blocks = -(-length // BLOCK)
    width = BLOCK if blocks > 1 else length
    surplus = blocks * width - length
    order = range(width - 1, -1, -1) if reverse else range(width)

    def columns(x: jax.Array, fill: float | bool) -> list[jax.Array]:
        if surplus:
            x = jnp.pad(x, [(0, 0)] * len(rows) + [(0, surplus)], constant_values=fill)
        x = x.reshape(*rows, blocks, width)
        return [jax.lax.index_in_dim(x, i, axis=x.ndim - 1, keepdims=False) for i in order]

    # What is added at the end lets init through.
    decays = [None] * width if decay is None else columns(decay, 1.0)
    limits = [None] * width if cuts is None else columns(cuts, False)
    places = list(zip(decays, columns(inputs, 0.0), limits, strict=True))
    if blocks > 1:
        state = [places[0]]
        for place in places[1:]:
            state.append(_composed(state[-1], place))
        products, totals, any_cut = state[-1]
        ends = scan(products, totals, init, reverse=reverse, cuts=any_cut)
        first = init[..., None]
        beside = _following(ends, first) if reverse else jnp.concatenate([first, ends[..., :-1]], axis=-1)
        values = [_carried_in(product, any_cut, beside) + total for product, total, any_cut in state]
    else:
        carry, values = init[..., None], []
        for a, b, cut in places:
            carry = _carried_in(a, cut, carry) + b
            values.append(carry)
    stacked = jnp.stack(values[::-1] if reverse else values, axis=-1).reshape(*rows, blocks * width)
    return stacked[..., :length] if surplus else stacked


def _carried_in(decay: jax.Array | None, cut: jax.Array | None, x: jax.Array) -> jax.Array:
    """Return what of x is carried into a position: decay · x, nothing where it is cut."""
    x = x if cut is None else jnp.where(cut, 0.0, x)
    return x if decay is None else decay * x


def _composed(before: Step, here: Step) -> Step:
    """Return the step that takes x through two: x ↦ decay · x + input, or the input alone where it is cut."""
    (product, total, any_cut), (decay, added, cut) = before, here
    product = None if product is None else _carried_in(decay, cut, product)
    any_cut = None if any_cut is None or cut is None else any_cut | cut
    return product, _carried_in(decay, cut, total) + added, any_cut


def _scan_of_symbolic_length(
    decay: jax.Array | None, inputs: jax.Array, init: jax.Array, cuts: jax.Array | None, *, reverse: bool
) -> jax.Array:
    """Run `scan` where the length is a symbol of jax.export, and how many steps to write out is not known."""
    # A step in front that gives init, whatever comes before it.
    extra = (jnp.ones_like(init), init, jnp.zeros_like(init, dtype=bool))
    steps: list[jax.Array | None] = []
    for one, x in zip(extra, (decay, inputs, cuts), strict=True):
        both = (x, one[..., None].astype(x.dtype)) if x is not None else ()
        steps.append(jnp.concatenate(both if reverse else both[::-1], axis=-1) if both else None)
    totals = jax.lax.associative_scan(_composed, tuple(steps), reverse=reverse, axis=inputs.ndim - 1)[1]
    return totals[..., :-1] if reverse else totals[..., 1:]


def segment_totals(x: jax.Array, segment_ids: Array | None) -> jax.Array:
    """At every position, the sum of x over that position's segment (the whole row without segment_ids).

    A sum up to and a sum from the position, not a difference of running totals: another segment's large values cost
    this one no precision.
    """
    if segment_ids is None:
        return jnp.broadcast_to(jnp.sum(x, axis=-1, keepdims=True), x.shape)
    if x.shape[-1] == 0:
        return x
    starts, ends = segment_starts(x.shape, segment_ids), segment_ends(x.shape, segment_ids)
    nothing = jnp.zeros_like(x[..., 0])
    after = _following(scan(None, x, nothing, reverse=True, cuts=ends), nothing[..., None])
    return jnp.where(ends, 0.0, after) + scan(None, x, nothing, reverse=False, cuts=starts)


def _following(x: jax.Array, last: jax.Array) -> jax.Array:
    return jnp.concatenate([x[..., 1:], last], axis=-1)


def _per_row(value: jax.Array, shape: Shape) -> jax.Array:
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
    same_shape(inputs=inputs, mask=mask, segment_ids=segment_ids)
    if np.shape(decay) != np.shape(inputs):
        (decay,) = per_row(inputs.shape[:-1], ANY, decay=decay)
    (init,) = per_row(inputs.shape[:-1], ANY, init=init)
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
    return scan(a, b, jnp.zeros_like(init), reverse=True, cuts=ends)


def _after(a: jax.Array, b: jax.Array, init: jax.Array, segment_ids: Array | None) -> jax.Array:
    """At every position, what is carried to it from the one after it; init at the end of its segment."""
    first = init[..., None]
    behind = _following(_carried(a, b, init, segment_ids), first)
    return behind if segment_ids is None else jnp.where(segment_ends(b.shape, segment_ids), first, behind)
