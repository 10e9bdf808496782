"""The two Triton kernels: candidates from a sweep of rows, and the best of the candidates.

A candidate is one integer: the order of its float in the high half, its id counted backwards in the low one. No two are
equal, and their order is that of largest.py. Blocks are [BLOCK_N logits, BLOCK_M rows].
"""

# Triton annotates neither constants passed to kernels nor reductions to scalars as what they are.
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from rl_kernels.common.triton_helpers import absorbed, softcapped

# Below every order, that of −inf included; above or at every one.
_LOWEST = tl.constexpr(-(2**31))
_HIGHEST = tl.constexpr(2**31 - 1)
# Below every candidate.
_NONE = tl.constexpr(-(2**63))


@triton.jit
def float_order(value):
    """int32 in the order of float32, where −0 is 0 and every NaN the largest."""
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where((bits << 1) == 0, 0, bits)
    return tl.where(value == value, bits ^ ((bits >> 31) & 0x7FFFFFFF), _HIGHEST)


@triton.jit
def parting_order(order, k, BLOCK_M: tl.constexpr):
    """For each row a number that at least k of ``order`` reach and at most k exceed; below all of fewer than k."""
    least = tl.full([BLOCK_M], _LOWEST, tl.int64)
    step = tl.full([BLOCK_M], 2**31, tl.int64)
    while tl.max(step, 0) > 0:
        reached = tl.sum((order >= (least + step).to(tl.int32)[None, :]).to(tl.int32), 0)
        least = tl.where(reached >= k, least + step, least)
        # Any number between the k-th and the next will do.
        step = tl.where(reached == k, 0, step >> 1)
    return least.to(tl.int32)


# One kernel for every k, whether 1 or a multiple of 16. Columns are specialised: a thread then loads 16 bytes.
@triton.jit(do_not_specialize=["rows", "identity", "k", "patience", "capacity"])
def search_kernel(
    logits,
    allowed,
    mask,
    inv_temperature,
    bounds,
    counts,
    candidates,
    states,
    rows,
    start,
    stop,
    identity,
    k,
    patience,
    capacity,
    row_stride,
    column_stride,
    allowed_row_stride,
    allowed_stride,
    softcap,
    STATE: tl.constexpr,
    CAPPED: tl.constexpr,
    ALLOWED: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Append each row's candidates among the columns start … stop − 1, at most k of each BLOCK_N; the first column's id
    is ``identity``. With ``STATE`` also add the columns to the row's (maximum, sum, weighted sum).

    Later columns have higher ids: once k logits reach the bound, a later one that only equals it is not among the
    k best.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = row < rows
    if MASKED:
        live = live & (tl.load(mask + row, mask=live, other=0) != 0)
        if tl.max(live.to(tl.int32), 0) == 0:
            return
    bound = tl.load(bounds + row, mask=live, other=_HIGHEST)
    count = tl.load(counts + row, mask=live, other=0)
    lane = tl.arange(0, BLOCK_N)
    # The largest of every BLOCK_N-th logit. Where k lanes reach a bound, k logits do; and a block has one logit a lane:
    # where at most k lanes exceed a bound, at most k of its logits do.
    best = tl.full([BLOCK_N, BLOCK_M], _LOWEST, tl.int32)
    if STATE:
        scale = tl.load(inv_temperature + row, mask=live, other=1.0)
        maximum = tl.load(states + row, mask=live, other=0.0)
        total = tl.load(states + rows + row, mask=live, other=0.0)
        weighted = tl.load(states + 2 * rows + row, mask=live, other=0.0)
    for first in range(start, stop, BLOCK_N):
        column = first + lane
        inside = (column < stop)[:, None] & live[None, :]
        place = row[None, :] * row_stride + column.to(tl.int64)[:, None] * column_stride
        z = tl.load(logits + place, mask=inside, other=float("-inf")).to(tl.float32)
        if ALLOWED:
            place = row[None, :] * allowed_row_stride + column.to(tl.int64)[:, None] * allowed_stride
            z = tl.where(tl.load(allowed + place, mask=inside, other=0) != 0, z, float("-inf"))
        order = tl.where(inside, float_order(z), _LOWEST)
        best = tl.maximum(best, order)
        chosen = (order > bound[None, :]).to(tl.int32)
        number = tl.sum(chosen, 0)
        if tl.max(number, 0) > patience:
            parting = parting_order(best, k, BLOCK_M)
            above = (order > parting[None, :]).to(tl.int32)
            equal = (order == parting[None, :]).to(tl.int32)
            fitting = tl.cumsum(equal, 0) <= (k - tl.sum(above, 0))[None, :]
            raised = parting > bound
            chosen = tl.where(raised[None, :], tl.where(fitting, above | equal, above), chosen)
            number = tl.sum(chosen, 0)
            bound = tl.where(raised, parting, bound)
        if tl.max(number, 0) > 0:
            place = (row * capacity + count - 1)[None, :] + tl.cumsum(chosen, 0)
            low = 0xFFFFFFFF - (identity + (column - start)).to(tl.int64)
            tl.store(candidates + place, (order.to(tl.int64) << 32) | low[:, None], mask=chosen != 0)
            count += number
        if STATE:
            possible = z != float("-inf")
            x = softcapped(tl.where(possible, z, 0.0), softcap, CAPPED) * scale[None, :]
            maximum, total, weighted = absorbed(x, possible, maximum, total, weighted)
    tl.store(bounds + row, bound, mask=live)
    tl.store(counts + row, count, mask=live)
    if STATE:
        # A maximum ignores NaN; a sum does not.
        tl.store(states + row, tl.where(total == total, maximum, total), mask=live)
        tl.store(states + rows + row, total, mask=live)
        tl.store(states + 2 * rows + row, weighted, mask=live)


@triton.jit(do_not_specialize=["rows", "capacity", "k"])
def keep_kernel(
    candidates, bounds, counts, out, rows, capacity, k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """The k largest candidates of each row, in the order they came; all where there are no more. ``out`` [rows, k] must
    not be their own memory: a program's threads do not wait for each other's stores.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = row < rows
    count = tl.load(counts + row, mask=live, other=0)
    most = tl.max(count, 0)
    mine = candidates + (row * capacity)[None, :]
    least = tl.full([BLOCK_M], _NONE, tl.int64)
    bit = tl.where(count > k, 63, -1)
    while tl.max(bit, 0) >= 0:
        # The least of all integers has the sign's bit set: flipping that bit is adding it.
        middle = least ^ (tl.full([BLOCK_M], 1, tl.int64) << tl.maximum(bit, 0).to(tl.int64))
        reached = tl.zeros([BLOCK_M], tl.int32)
        for first in range(0, most, BLOCK_N):
            place = (first + tl.arange(0, BLOCK_N))[:, None]
            word = tl.load(mine + place, mask=place < count[None, :], other=_NONE)
            reached += tl.sum((word >= middle[None, :]).to(tl.int32), 0)
        least = tl.where((bit >= 0) & (reached >= k), middle, least)
        bit = tl.where(reached == k, -1, bit - 1)
    done = tl.zeros([BLOCK_M], tl.int32)
    for first in range(0, most, BLOCK_N):
        place = (first + tl.arange(0, BLOCK_N))[:, None]
        there = place < count[None, :]
        word = tl.load(mine + place, mask=there, other=_NONE)
        chosen = (there & (word >= least[None, :])).to(tl.int32)
        tl.store(out + (row * k + done - 1)[None, :] + tl.cumsum(chosen, 0), word, mask=chosen != 0)
        done += tl.sum(chosen, 0)
    full = live & (count > k)
    bound = tl.load(bounds + row, mask=full, other=_LOWEST)
    tl.store(bounds + row, tl.maximum(bound, (least >> 32).to(tl.int32)), mask=full)
    tl.store(counts + row, done, mask=full)
