"""CDNA4: rows, gathered where some do not count, and entries are copied into a ring in the LDS without passing through
registers, and multiplied by waves, each of which holds the logits of its own rows.
"""

# Gluon annotates what its compiler sees: layouts and sizes become constants by being declared so.
# pyright: reportAssignmentType=false, reportArgumentType=false, reportGeneralTypeIssues=false

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import AMDMFMALayout
from triton.experimental.gluon.language.amd.cdna4 import async_copy, mfma

from rl_kernels.experimental.gluon.rows import ENTRIES, fits, readable
from rl_kernels.experimental.gluon.state import NUMBERS, eighths, extended, place, store_state

# 144 KiB of buffers, 128 registers a lane for its logits.
STAGES, WARPS = 3, 4
# Rows begin, and features end, at multiples of as many: what Triton knows an argument to be a multiple of, so that a
# lane's 16 bytes are one copy.
UNIT = 16
# Elements from an entry to the next: a tile of them lies within the 2³¹ bytes that offsets from its first reach.
FARTHEST = 2**31 // (2 * ENTRIES) - UNIT


def operands(hidden: Tensor, weight: Tensor, rows: slice | Tensor) -> tuple[Tensor | int, ...]:
    """Whole hidden states and an index, or rows that were copied."""
    if not fits(hidden, UNIT):
        hidden = readable(hidden[rows], UNIT)
        rows = slice(0, len(hidden))
    if isinstance(rows, slice):
        rows = torch.arange(rows.start, rows.stop, device=hidden.device)
    return hidden, weight, rows, hidden.stride(0), weight.stride(0)


@gluon.jit
def copy(
    hidden_rows,
    weight,
    left,
    right,
    entry,
    feature,
    step,
    steps,
    features,
    origin,
    vocabulary,
    weight_row_stride,
    STAGES: gl.constexpr,
    EVEN: gl.constexpr,
):
    """Ask for the tiles of one step; past the last, for the last's again: how many are under way is known so."""
    FEATURES: gl.constexpr = left.shape[2]
    ENTRIES: gl.constexpr = right.shape[1]
    a_tile = gl.cdiv(features, FEATURES)
    stage = step % STAGES
    step = gl.minimum(step, steps - 1)
    done = step % a_tile * FEATURES
    first = origin + step // a_tile * ENTRIES
    base = weight + (first.to(gl.int64) * weight_row_stride + done)
    # Entries past the last read the last one.
    offset = gl.minimum(entry, vocabulary - 1 - first)[:, None] * weight_row_stride + feature[None, :]
    if EVEN:
        async_copy.global_load_to_shared(left.index(stage), hidden_rows + done)
        async_copy.buffer_load_to_shared(right.index(stage), base, offset)
    else:
        inside = (feature < features - done)[None, :]
        async_copy.global_load_to_shared(left.index(stage), hidden_rows + done, mask=inside, other=0.0)
        async_copy.buffer_load_to_shared(right.index(stage), base, offset, mask=inside, other=0.0)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=NUMBERS)
def forward_gfx950(
    hidden,
    weight,
    rows,
    hidden_row_stride,
    weight_row_stride,
    bias,
    tokens,
    inverse,
    kept,
    states,
    targets,
    count,
    vocabulary,
    features,
    part_size,
    target_count,
    start,
    bias_stride,
    kept_stride,
    softcap,
    BIASED: gl.constexpr,
    CAPPED: gl.constexpr,
    KEPT: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    EVEN: gl.constexpr,
    ROWS: gl.constexpr,
    ENTRIES: gl.constexpr,
    FEATURES: gl.constexpr,
):
    """State of a block of rows over one part of the vocabulary; the logits of a tile are in registers only."""
    # A tile's state is taken an eighth of its columns at a time.
    WIDTH: gl.constexpr = ENTRIES // 8
    # A wave has 32 rows, so that their maxima and sums need no other wave.
    gl.static_assert(32 * gl.num_warps() == ROWS)
    slim: gl.constexpr = AMDMFMALayout(4, [32, 32, 16], True, [gl.num_warps(), 1])
    by_row: gl.constexpr = gl.SliceLayout(1, slim)
    # Eight lanes copy a row's 64 features, 16 bytes each; where they are put, lanes that read a column do not collide.
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [8, 8], [gl.num_warps(), 1], [1, 0])
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    part, begin = place(count, vocabulary, part_size, ROWS, GROUP)
    row = begin + gl.arange(0, ROWS, layout=by_row)
    real = row < count
    nearest = gl.minimum(row, count - 1).to(gl.int64)
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, slim))
    scale = gl.load(inverse + nearest)
    maximum = gl.full([ROWS], float("-inf"), gl.float32, layout=by_row)
    total = gl.full([ROWS], 0.0, gl.float32, layout=by_row)
    weighted = gl.full([ROWS], 0.0, gl.float32, layout=by_row)

    left = gl.allocate_shared_memory(hidden.dtype.element_ty, [STAGES, ROWS, FEATURES], swizzled)
    right = gl.allocate_shared_memory(weight.dtype.element_ty, [STAGES, ENTRIES, FEATURES], swizzled)
    feature = gl.arange(0, FEATURES, layout=gl.SliceLayout(0, copied))
    entry = gl.arange(0, ENTRIES, layout=gl.SliceLayout(1, copied))
    index = gl.load(rows + gl.minimum(begin + gl.arange(0, ROWS, layout=gl.SliceLayout(1, copied)), count - 1))
    hidden_rows = hidden + (index[:, None] * hidden_row_stride + feature[None, :])
    # Steps are counted through the whole part: while a tile's state is taken, the next tile's first steps arrive.
    origin = part * part_size
    a_tile = gl.cdiv(features, FEATURES)
    tiles = gl.cdiv(gl.minimum(vocabulary - origin, part_size), ENTRIES)
    steps = tiles * a_tile
    for slot in gl.static_range(STAGES - 1):
        copy(
            hidden_rows,
            weight,
            left,
            right,
            entry,
            feature,
            slot,
            steps,
            features,
            origin,
            vocabulary,
            weight_row_stride,
            STAGES,
            EVEN,
        )
    for tile in range(tiles):
        z = gl.full([ROWS, ENTRIES], 0.0, gl.float32, layout=slim)
        for k in range(a_tile):
            step = tile * a_tile + k
            # This step's tiles have arrived, and every wave has read the step before's.
            async_copy.wait_group(STAGES - 2)
            copy(
                hidden_rows,
                weight,
                left,
                right,
                entry,
                feature,
                step + STAGES - 1,
                steps,
                features,
                origin,
                vocabulary,
                weight_row_stride,
                STAGES,
                EVEN,
            )
            # What is under way need not arrive first, as Triton 3.6 would have it.
            a = async_copy.load_shared_relaxed(left.index(step % STAGES), gl.DotOperandLayout(0, slim, 8))
            b = async_copy.load_shared_relaxed(
                right.index(step % STAGES).permute([1, 0]), gl.DotOperandLayout(1, slim, 8)
            )
            z = mfma(a, b, z)
        parts = eighths(z)
        for eighth in gl.static_range(8):
            maximum, total, weighted = extended(
                gl.convert_layout(parts[eighth], slim),
                origin + tile * ENTRIES + eighth * WIDTH,
                column,
                maximum,
                total,
                weighted,
                nearest,
                real,
                scale,
                bias,
                tokens,
                kept,
                targets,
                vocabulary,
                target_count,
                start,
                bias_stride,
                kept_stride,
                softcap,
                BIASED,
                CAPPED,
                KEPT,
            )
    # No copy may arrive when the memory is another program's.
    async_copy.wait_group(0)
    store_state(states, part, row, real, count, maximum, total, weighted)
