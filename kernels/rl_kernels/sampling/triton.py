"""Triton for NVIDIA and ROCm: the two-level sampler, with one exponential and no noise an entry.

tiles_kernel sums up each tile; cutoff_kernel bisects for what is kept, reading only tiles that reach above the
threshold it tries; tiles_kernel again, of what is kept; draw_kernel draws a tile and an entry of it. A program has one
row (several in the interpreter, whose price is by the program).
"""

# Triton annotates neither constants passed to kernels nor reductions to scalars as what they are.
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_kernels.backends import interpreting
from rl_kernels.sampling.cutoff import EMPTY, greedy_is_top_1, tile_width
from rl_kernels.sampling.kernel_math import gumbel, key_mass, ordered_key
from rl_kernels.sampling.kernel_search import amount_above, largest, scaled_tile

_ROWS = 512 if interpreting() else 1
_EMPTY = tl.constexpr(EMPTY)


@triton.jit
def tiles_kernel(
    logits, temperature, cutoff, last, maximum, total, weighted, kept_count, rows, vocabulary, tiles, row_stride,
    column_stride, CUT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tile = tl.program_id(1)
    live = row < rows
    heat = tl.load(temperature + row, mask=live, other=1.0)
    x = scaled_tile(logits, row, live, heat, tile, vocabulary, row_stride, column_stride, WIDTH)
    possible = x != float("-inf")
    if CUT:
        key = ordered_key(x)
        lowest = tl.load(cutoff + row, mask=live, other=0)[:, None]
        stop = tl.load(last + row, mask=live, other=0)[:, None]
        column = (tile * WIDTH + tl.arange(0, WIDTH))[None, :]
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
        tl.store(kept_count + place, tl.sum(possible.to(tl.int32), 1), mask=live)


@triton.jit
def cutoff_kernel(
    logits, temperature, maximum, k, p, log_min_p, cutoff, last, rows, vocabulary, tiles, row_stride, column_stride,
    ROWS: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    heat = tl.load(temperature + row, mask=live, other=1.0)
    number = tl.arange(0, TILES)
    there = live[:, None] & (number < tiles)[None, :]
    peak = tl.max(tl.load(maximum + row[:, None] * tiles + number[None, :], mask=there, other=float("-inf")), 1)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    top = ordered_key(peak).to(tl.int64)
    low = tl.full([ROWS], _EMPTY, tl.int64)
    equals = tl.zeros([ROWS], tl.int64)

    count = tl.load(k + row, mask=live, other=vocabulary)
    counted = count < vocabulary
    if tl.max(counted.to(tl.int32), 0) > 0:
        # Rows that are not cut are searched for nothing; the largest alone is known.
        start = tl.where(counted & (count > 1), low, tl.where(counted, top, low))
        end = tl.where(counted, top, low)
        low = largest(
            logits, maximum, row, live, heat, base, count, start, end, vocabulary, tiles, row_stride, column_stride,
            False, ROWS, WIDTH,
        )  # fmt: skip
        above, _, _ = amount_above(
            logits, maximum, row, live, heat, base, low + 1, vocabulary, tiles, row_stride, column_stride,
            False, ROWS, WIDTH,
        )  # fmt: skip
        equals = tl.where(low > _EMPTY, count - above, 0)

    share = tl.load(p + row, mask=live, other=1.0)
    massed = share < 1
    if tl.max(massed.to(tl.int32), 0) > 0:
        above, _, _ = amount_above(
            logits, maximum, row, live, heat, base, low + 1, vocabulary, tiles, row_stride, column_stride,
            True, ROWS, WIDTH,
        )  # fmt: skip
        total = above + equals * key_mass(low, base)
        wanted = tl.maximum(tl.ceil(share.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
        found = largest(
            logits, maximum, row, live, heat, base, wanted, low, tl.where(massed, top, low), vocabulary, tiles,
            row_stride, column_stride, True, ROWS, WIDTH,
        )  # fmt: skip
        above, _, _ = amount_above(
            logits, maximum, row, live, heat, base, found + 1, vocabulary, tiles, row_stride, column_stride,
            True, ROWS, WIDTH,
        )  # fmt: skip
        each = tl.maximum(key_mass(found, base), 1)
        fitting = tl.where(found > _EMPTY, (wanted - above + each - 1) // each, 0)
        equals = tl.where(massed, fitting, equals)
        low = tl.where(massed, found, low)

    # Which id is the last of the equals that are kept.
    stop = tl.full([ROWS], -1, tl.int64)
    seen = tl.zeros([ROWS], tl.int64)
    if tl.max(equals, 0) > 0:
        for tile in range(0, tiles):
            reach = ordered_key(tl.load(maximum + row * tiles + tile, mask=live, other=float("-inf")))
            if tl.max(((reach >= low) & (equals > 0)).to(tl.int32), 0) > 0:
                x = scaled_tile(logits, row, live, heat, tile, vocabulary, row_stride, column_stride, WIDTH)
                same = (ordered_key(x) == low[:, None]).to(tl.int64)
                upto = tl.cumsum(same, 1) + seen[:, None]
                column = (tile * WIDTH + tl.arange(0, WIDTH))[None, :].to(tl.int64)
                stop = tl.maximum(stop, tl.max(tl.where((same > 0) & (upto <= equals[:, None]), column, -1), 1))
                seen += tl.sum(same, 1)
    least = tl.load(log_min_p + row, mask=live, other=float("-inf"))
    floor = tl.where(least > float("-inf"), ordered_key(base + least).to(tl.int64), _EMPTY)
    tl.store(cutoff + row, tl.maximum(floor, low), mask=live)
    tl.store(last + row, tl.where(floor > low, vocabulary, stop), mask=live)


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
    logits, temperature, cutoff, last, full_maximum, full_total, full_weighted, maximum, total, weighted, kept_count,
    seed, position, token, logprob, full_logprob, entropy, number, logsumexp, rows, vocabulary, tiles, row_stride,
    column_stride, ROWS: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    heat = tl.load(temperature + row, mask=live, other=1.0)
    key = tl.load(seed + row, mask=live, other=0)[:, None]
    where = tl.load(position + row, mask=live, other=0)[:, None]
    tile = tl.arange(0, TILES)[None, :]
    there = live[:, None] & (tile < tiles)
    place = row[:, None] * tiles + tile
    _, log_full, _, peak = merged(full_maximum, full_total, full_weighted, place, there)
    base, log_kept, spread, _ = merged(maximum, total, weighted, place, there)

    top = tl.load(maximum + place, mask=there, other=float("-inf"))
    mass = tl.load(total + place, mask=there, other=1.0)
    mass = tl.log(tl.where(top == float("-inf"), 1.0, mass)) + top
    # A row with NaN is refused by its logsumexp; an argmax over nothing but NaN would be no index.
    mass = tl.where(mass == mass, mass, 0.0)
    won = tl.argmax(mass + gumbel(key, where, tile.to(tl.int64) + row[:, None] * 0, 0), 1).to(tl.int64)

    column = won[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    inside = live[:, None] & (column < vocabulary)
    z = tl.load(logits + row[:, None] * row_stride + column * column_stride, mask=inside, other=float("-inf"))
    z = z.to(tl.float32)
    x = tl.div_rn(z, tl.broadcast_to(heat[:, None], z.shape))
    code = ordered_key(x)
    lowest = tl.load(cutoff + row, mask=live, other=0)[:, None]
    stop = tl.load(last + row, mask=live, other=0)[:, None]
    kept = (code > lowest) | ((code == lowest) & (column <= stop))
    best = tl.argmax(tl.where(kept, x + gumbel(key, where, column, 1), float("-inf")), 1).to(tl.int64)
    drawn = tl.max(tl.where(tl.arange(0, WIDTH)[None, :] == best[:, None], x, float("-inf")), 1)
    counts = tl.sum(tl.load(kept_count + place, mask=there, other=0).to(tl.int64), 1)

    tl.store(token + row, tl.where(counts > 0, won * WIDTH + best, -1), mask=live)
    tl.store(logprob + row, drawn - base - log_kept, mask=live)
    tl.store(full_logprob + row, drawn - base - log_full, mask=live)
    tl.store(entropy + row, spread, mask=live)
    tl.store(number + row, counts, mask=live)
    tl.store(logsumexp + row, peak + log_full, mask=live)


def forward(
    logits: Tensor, temperature: Tensor, k: Tensor, p: Tensor, log_min_p: Tensor, seed: Tensor, position: Tensor
) -> tuple[Tensor, ...]:
    """Tokens, log-probabilities (truncated, full), entropy, kept count, cutoff, last id kept, full logsumexp: [B]."""
    rows, vocabulary = logits.shape
    heat, count = greedy_is_top_1(temperature, k)
    width = tile_width(vocabulary)
    tiles = -(-vocabulary // width)
    each = min(_ROWS, triton.next_power_of_2(max(1, rows)))
    size = {"ROWS": each, "WIDTH": width}
    whole = {"ROWS": each, "WIDTH": width, "TILES": triton.next_power_of_2(tiles)}
    programs = triton.cdiv(rows, each)
    full, cut = logits.new_empty(2, 3, rows, tiles, dtype=torch.float32)
    counts = torch.empty(rows, tiles, dtype=torch.int32, device=logits.device)
    token, number, cutoff, last = (torch.empty_like(seed) for _ in range(4))
    logprob, full_logprob, entropy, logsumexp = (torch.empty_like(temperature) for _ in range(4))
    shape = (rows, vocabulary, tiles, *logits.stride())
    if rows:
        tiles_kernel[programs, tiles](logits, heat, cutoff, last, *full, counts, *shape, CUT=False, **size)
        cutoff_kernel[(programs,)](logits, heat, full[0], count, p, log_min_p, cutoff, last, *shape, **whole)
        tiles_kernel[programs, tiles](logits, heat, cutoff, last, *cut, counts, *shape, CUT=True, **size)
        draw_kernel[(programs,)](
            logits, heat, cutoff, last, *full, *cut, counts, seed, position, token, logprob, full_logprob, entropy,
            number, logsumexp, *shape, **whole,
        )  # fmt: skip
    full_logprob.masked_fill_(temperature == 0, 0.0).masked_fill_(number == 0, float("-inf"))
    return token, logprob, full_logprob, entropy, number, cutoff, last, logsumexp


def _specialisation(function, dtype, **constants):
    """What kernels/benchmarks/ahead_of_time.py compiles."""
    integers = {"rows", "vocabulary", "tiles", "row_stride"}
    longs = {"cutoff", "last", "k", "seed", "position", "token", "number"}
    constants = {"ROWS": 1, "WIDTH": 1024, "TILES": 128, **constants}
    constants = {n: v for n, v in constants.items() if n in function.arg_names} | {"column_stride": 1}
    special = (
        {"logits": f"*{dtype}", "kept_count": "*i32"} | dict.fromkeys(longs, "*i64") | dict.fromkeys(integers, "i32")
    )
    types = {n: special.get(n, "*fp32") for n in function.arg_names if n not in constants}
    aligned = tuple(n for n in types if n not in integers or n == "row_stride")
    return function.__name__, types, constants, {"aligned": aligned, "warps": 4}


SPECIALISATIONS = {
    **{
        f"tiles {dtype}{', kept' if cut else ''}": _specialisation(tiles_kernel, dtype, CUT=cut)
        for dtype in ("bf16", "fp32")
        for cut in (False, True)
    },
    **{
        f"{function.__name__[:-7]} {dtype}": _specialisation(function, dtype)
        for function in (cutoff_kernel, draw_kernel)
        for dtype in ("bf16", "fp32")
    },
}
