"""The search for a cutoff in Triton, as cutoff.py has it; tiles below the threshold that is tried are not read."""

# Triton annotates neither constants passed to kernels nor reductions to scalars as what they are.
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

import triton
import triton.language as tl

from rl_kernels.sampling.cutoff import DEPTH, EMPTY, UNIT

_EMPTY = tl.constexpr(EMPTY)
_DEPTH = tl.constexpr(DEPTH)
_UNIT = tl.constexpr(UNIT)


@triton.jit
def ordered_key(x):
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def mass_units(shifted):
    """e^{x − maximum} in units of 2⁻⁴⁰."""
    return (tl.exp(shifted) * _UNIT).to(tl.int64)


@triton.jit
def key_value(key):
    """The float with this key (int64)."""
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def key_mass(key, base):
    """The mass of a token with this key."""
    return mass_units(key_value(key) - base)


@triton.jit
def gumbel(seed, position, index, PURPOSE: tl.constexpr):
    """Noise from int64 [ROWS, n] as philox.py has it; log1p by its quotient, which is exact to rounding for u ≤ ½."""
    zero = index * 0
    c0 = ((position & 0xFFFFFFFF) + zero).to(tl.uint32)
    c1 = (((position >> 32) & 0xFFFFFFFF) + zero).to(tl.uint32)
    high, low, _, _ = tl.philox(seed + zero, c0, c1, index.to(tl.uint32), (zero + PURPOSE).to(tl.uint32))
    upper = high >= 0x80000000
    high, low = tl.where(upper, high ^ 0xFFFFFFFF, high), tl.where(upper, low ^ 0xFFFFFFFF, low)
    u = high.to(tl.float32) * 2.0**-32 + (low.to(tl.float32) + 0.5) * 2.0**-64
    rest = 1.0 - u
    near = tl.where(rest == 1.0, u, -tl.log(rest) * tl.div_rn(u, tl.where(rest == 1.0, 1.0, 1.0 - rest)))
    return -tl.log(tl.where(upper, -tl.log(u), near))


@triton.jit
def scaled_tile(logits, row, live, heat, tile, vocab_size, row_stride, column_stride, BLOCK_N: tl.constexpr):
    """Logits over temperature [ROWS, WIDTH], divided with the one rounding that PyTorch has; −inf past the end."""
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    place = row[:, None] * row_stride + column[None, :].to(tl.int64) * column_stride
    z = tl.load(logits + place, mask=live[:, None] & (column < vocab_size)[None, :], other=float("-inf"))
    z = z.to(tl.float32)
    return tl.div_rn(z, tl.broadcast_to(heat[:, None], z.shape))


@triton.jit
def amount_above(
    logits, maximum, row, live, heat, base, threshold, vocab_size, tiles, row_stride, column_stride,
    MASS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """How many tokens, or how much mass, have keys of at least the threshold [ROWS]; the nearest keys at or above it
    and below it.
    """
    amount = tl.zeros([BLOCK_M], tl.int64)
    above = tl.full([BLOCK_M], 0x7FFFFFFF, tl.int32)
    below = tl.full([BLOCK_M], _EMPTY, tl.int32)
    for tile in range(0, tiles):
        top = ordered_key(tl.load(maximum + row * tiles + tile, mask=live, other=float("-inf")))
        if tl.max((top >= threshold).to(tl.int32), 0) > 0:
            x = scaled_tile(logits, row, live, heat, tile, vocab_size, row_stride, column_stride, BLOCK_N)
            key = ordered_key(x)
            chosen = key >= threshold[:, None]
            value = mass_units(x - base[:, None]) if MASS else tl.full([BLOCK_M, BLOCK_N], 1, tl.int64)
            amount += tl.sum(tl.where(chosen, value, 0), 1)
            above = tl.minimum(above, tl.min(tl.where(chosen, key, 0x7FFFFFFF), 1))
            below = tl.maximum(below, tl.max(tl.where(chosen, _EMPTY, key), 1))
        else:
            below = tl.maximum(below, top)
    return amount, above.to(tl.int64), below.to(tl.int64)


@triton.jit
def largest(
    logits, maximum, row, live, heat, base, wanted, low, high, vocab_size, tiles, row_stride, column_stride,
    MASS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The largest key in [low, high] at or above which there is the amount wanted; low if there is none. As in
    cutoff.py.
    """
    floor = key_value(high) - _DEPTH
    step = 0
    while tl.max(high - low, 0) > 0:
        value = 0.5 * tl.maximum(key_value(low), floor) + 0.5 * key_value(high)
        by_value = tl.minimum(tl.maximum(ordered_key(value).to(tl.int64), low + 1), high)
        middle = tl.where(step % 2 == 0, by_value, low + (high - low + 1) // 2)
        amount, above, below = amount_above(
            logits, maximum, row, live, heat, base, middle, vocab_size, tiles, row_stride, column_stride,
            MASS, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        enough = amount >= wanted
        open_ = low < high
        high = tl.where(open_ & (amount < wanted), tl.maximum(below, low), high)
        low = tl.where(open_ & enough, above, low)
        step += 1
    return low


@triton.jit
def tiles_kernel(
    logits, temperature, cutoff, last, maximum, total, weighted, allowed_count, rows, vocab_size, tiles, row_stride,
    column_stride, CUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    tile = tl.program_id(1)
    live = row < rows
    heat = tl.load(temperature + row, mask=live, other=1.0)
    x = scaled_tile(logits, row, live, heat, tile, vocab_size, row_stride, column_stride, BLOCK_N)
    possible = x != float("-inf")
    if CUT:
        key = ordered_key(x)
        lowest = tl.load(cutoff + row, mask=live, other=0)[:, None]
        stop = tl.load(last + row, mask=live, other=0)[:, None]
        column = (tile * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        possible = possible & ((key > lowest) | ((key == lowest) & (column <= stop)))
    top = tl.max(tl.where(possible, x, float("-inf")), 1)
    base = tl.where(top == float("-inf"), 0.0, top)[:, None]
    shifted = tl.where(possible, x - base, 0.0)
    e = tl.where(possible, tl.exp(shifted), 0.0)
    place = row * tiles + tile
    tl.store(maximum + place, top, mask=live)
    tl.store(total + place, tl.sum(e, 1), mask=live)
    tl.store(weighted + place, tl.sum(shifted * e, 1), mask=live)
    if CUT:
        tl.store(allowed_count + place, tl.sum(possible.to(tl.int32), 1), mask=live)


@triton.jit
def cutoff_kernel(
    logits, temperature, maximum, k, p, log_min_p, cutoff, last, rows, vocab_size, tiles, row_stride, column_stride,
    BLOCK_M: tl.constexpr, TILES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = row < rows
    heat = tl.load(temperature + row, mask=live, other=1.0)
    number = tl.arange(0, TILES)
    there = live[:, None] & (number < tiles)[None, :]
    peak = tl.max(tl.load(maximum + row[:, None] * tiles + number[None, :], mask=there, other=float("-inf")), 1)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    top = ordered_key(peak).to(tl.int64)
    low = tl.full([BLOCK_M], _EMPTY, tl.int64)
    equals = tl.zeros([BLOCK_M], tl.int64)

    count = tl.load(k + row, mask=live, other=vocab_size)
    counted = count < vocab_size
    if tl.max(counted.to(tl.int32), 0) > 0:
        # Rows that are not cut need no search, nor do rows of k = 1: the largest is known.
        start = tl.where(counted & (count > 1), low, tl.where(counted, top, low))
        end = tl.where(counted, top, low)
        low = largest(
            logits, maximum, row, live, heat, base, count, start, end, vocab_size, tiles, row_stride, column_stride,
            False, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        above, _, _ = amount_above(
            logits, maximum, row, live, heat, base, low + 1, vocab_size, tiles, row_stride, column_stride,
            False, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        equals = tl.where(low > _EMPTY, count - above, 0)

    share = tl.load(p + row, mask=live, other=1.0)
    massed = share < 1
    if tl.max(massed.to(tl.int32), 0) > 0:
        above, _, _ = amount_above(
            logits, maximum, row, live, heat, base, low + 1, vocab_size, tiles, row_stride, column_stride,
            True, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        total = above + equals * key_mass(low, base)
        wanted = tl.maximum(tl.ceil(share.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
        found = largest(
            logits, maximum, row, live, heat, base, wanted, low, tl.where(massed, top, low), vocab_size, tiles,
            row_stride, column_stride, True, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        above, _, _ = amount_above(
            logits, maximum, row, live, heat, base, found + 1, vocab_size, tiles, row_stride, column_stride,
            True, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        each = tl.maximum(key_mass(found, base), 1)
        fitting = tl.where(found > _EMPTY, (wanted - above + each - 1) // each, 0)
        equals = tl.where(massed, fitting, equals)
        low = tl.where(massed, found, low)

    # The id of the last allowed token among those that equal the cutoff.
    stop = tl.full([BLOCK_M], -1, tl.int64)
    seen = tl.zeros([BLOCK_M], tl.int64)
    if tl.max(equals, 0) > 0:
        for tile in range(0, tiles):
            reach = ordered_key(tl.load(maximum + row * tiles + tile, mask=live, other=float("-inf")))
            if tl.max(((reach >= low) & (equals > 0)).to(tl.int32), 0) > 0:
                x = scaled_tile(logits, row, live, heat, tile, vocab_size, row_stride, column_stride, BLOCK_N)
                same = (ordered_key(x) == low[:, None]).to(tl.int64)
                upto = tl.cumsum(same, 1) + seen[:, None]
                column = (tile * BLOCK_N + tl.arange(0, BLOCK_N))[None, :].to(tl.int64)
                stop = tl.maximum(stop, tl.max(tl.where((same > 0) & (upto <= equals[:, None]), column, -1), 1))
                seen += tl.sum(same, 1)
    least = tl.load(log_min_p + row, mask=live, other=float("-inf"))
    floor = tl.where(least > float("-inf"), ordered_key(base + least).to(tl.int64), _EMPTY)
    tl.store(cutoff + row, tl.maximum(floor, low), mask=live)
    tl.store(last + row, tl.where(floor > low, vocab_size, stop), mask=live)


@triton.jit
def merged(maximum, total, weighted, place, there):
    """Maximum, log Σ e^{x − maximum} and entropy of rows from their tiles [ROWS, TILES]."""
    m = tl.load(maximum + place, mask=there, other=float("-inf"))
    s = tl.load(total + place, mask=there, other=0.0)
    u = tl.load(weighted + place, mask=there, other=0.0)
    peak = tl.max(m, 1)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    moved = tl.where(m == float("-inf"), 0.0, m - base[:, None])
    scale = tl.exp(moved)
    whole = tl.where(peak == float("-inf"), 1.0, tl.sum(s * scale, 1))
    log_whole = tl.log(whole)
    return base, log_whole, log_whole - tl.sum(scale * (u + moved * s), 1) / whole, peak


@triton.jit
def draw_kernel(
    logits, temperature, cutoff, last, full_maximum, full_total, full_weighted, maximum, total, weighted, allowed_count,
    seed, position, token, logprob, full_logprob, entropy, number, logsumexp, rows, vocab_size, tiles, row_stride,
    column_stride, BLOCK_M: tl.constexpr, TILES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = row < rows
    heat = tl.load(temperature + row, mask=live, other=1.0)
    key = tl.load(seed + row, mask=live, other=0)[:, None]
    where = tl.load(position + row, mask=live, other=0)[:, None]
    tile = tl.arange(0, TILES)[None, :]
    there = live[:, None] & (tile < tiles)
    place = row[:, None] * tiles + tile
    _, log_full, _, peak = merged(full_maximum, full_total, full_weighted, place, there)
    base, log_allowed, spread, _ = merged(maximum, total, weighted, place, there)

    top = tl.load(maximum + place, mask=there, other=float("-inf"))
    mass = tl.load(total + place, mask=there, other=1.0)
    mass = tl.log(tl.where(top == float("-inf"), 1.0, mass)) + top
    # A row with NaN is reported by its logsumexp; here, an argmax of nothing but NaN would be no index.
    mass = tl.where(mass == mass, mass, 0.0)
    won = tl.argmax(mass + gumbel(key, where, tile.to(tl.int64) + row[:, None] * 0, 0), 1).to(tl.int64)

    column = won[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    inside = live[:, None] & (column < vocab_size)
    z = tl.load(logits + row[:, None] * row_stride + column * column_stride, mask=inside, other=float("-inf"))
    z = z.to(tl.float32)
    x = tl.div_rn(z, tl.broadcast_to(heat[:, None], z.shape))
    code = ordered_key(x)
    lowest = tl.load(cutoff + row, mask=live, other=0)[:, None]
    stop = tl.load(last + row, mask=live, other=0)[:, None]
    allowed = (code > lowest) | ((code == lowest) & (column <= stop))
    best = tl.argmax(tl.where(allowed, x + gumbel(key, where, column, 1), float("-inf")), 1).to(tl.int64)
    drawn = tl.max(tl.where(tl.arange(0, BLOCK_N)[None, :] == best[:, None], x, float("-inf")), 1)
    counts = tl.sum(tl.load(allowed_count + place, mask=there, other=0).to(tl.int64), 1)

    tl.store(token + row, tl.where(counts > 0, won * BLOCK_N + best, -1), mask=live)
    tl.store(logprob + row, drawn - base - log_allowed, mask=live)
    tl.store(full_logprob + row, drawn - base - log_full, mask=live)
    tl.store(entropy + row, spread, mask=live)
    tl.store(number + row, counts, mask=live)
    tl.store(logsumexp + row, peak + log_full, mask=live)
