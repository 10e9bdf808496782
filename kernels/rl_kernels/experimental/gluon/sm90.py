"""Hopper: tiles through a ring of shared buffers to the matrix units, by whose warpgroups the logits are held."""

# Gluon annotates what its compiler sees: layouts and sizes become constants by being declared so.
# pyright: reportAssignmentType=false, reportArgumentType=false, reportGeneralTypeIssues=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from rl_kernels.experimental.gluon.state import NUMBERS, eighths, extended, place, store_state
from rl_kernels.experimental.gluon.tma import fill

# 192 KiB of shared buffers, 128 registers a thread for its logits.
STAGES, WARPS = 4, 8


@gluon.jit(do_not_specialize=(*NUMBERS, "features"))
def forward_sm90(
    hidden,
    weight,
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
):
    """State of a block of rows over one part of the vocabulary; the logits of a tile are in registers only."""
    ROWS: gl.constexpr = hidden.block_type.shape[0]
    FEATURES: gl.constexpr = hidden.block_type.shape[1]
    ENTRIES: gl.constexpr = weight.block_type.shape[0]
    # A tile's state is taken an eighth of its columns at a time: temporaries of all would not fit into registers.
    WIDTH: gl.constexpr = ENTRIES // 8
    whole: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, ENTRIES, 16])
    slim: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, WIDTH, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, slim)
    part, begin = place(count, vocabulary, part_size, ROWS, GROUP)
    row = begin + gl.arange(0, ROWS, layout=by_row)
    real = row < count
    nearest = gl.minimum(row, count - 1).to(gl.int64)
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, slim))
    scale = gl.load(inverse + nearest)
    maximum = gl.full([ROWS], float("-inf"), gl.float32, layout=by_row)
    total = gl.full([ROWS], 0.0, gl.float32, layout=by_row)
    weighted = gl.full([ROWS], 0.0, gl.float32, layout=by_row)

    left = gl.allocate_shared_memory(hidden.dtype, [STAGES, ROWS, FEATURES], hidden.layout)
    right = gl.allocate_shared_memory(weight.dtype, [STAGES, ENTRIES, FEATURES], weight.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(arrived.index(slot), count=1)
    # The unit that copies has to see the barriers, too.
    fence_async_shared()
    # Steps are counted through the whole part: while a tile's state is taken, the next tile's first steps arrive.
    origin = part * part_size
    a_tile = gl.cdiv(features, FEATURES)
    tiles = gl.cdiv(gl.minimum(vocabulary - origin, part_size), ENTRIES)
    steps = tiles * a_tile
    for slot in gl.static_range(STAGES):
        fill(hidden, weight, left, right, arrived, slot, steps, features, begin, origin, STAGES)
    for tile in range(tiles):
        z = gl.full([ROWS, ENTRIES], 0.0, gl.float32, layout=whole)
        for k in range(a_tile):
            step = tile * a_tile + k
            stage = step % STAGES
            mbarrier.wait(arrived.index(stage), step // STAGES & 1)
            z = warpgroup_mma(left.index(stage), right.index(stage).permute([1, 0]), z, is_async=True)
            # The step before has been read when no more than this one is under way.
            z = warpgroup_mma_wait(1, deps=[z])
            if k > 0:
                fill(hidden, weight, left, right, arrived, step - 1 + STAGES, steps, features, begin, origin, STAGES)
        z = warpgroup_mma_wait(0, deps=[z])
        done = (tile + 1) * a_tile - 1
        fill(hidden, weight, left, right, arrived, done + STAGES, steps, features, begin, origin, STAGES)
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
    store_state(states, part, row, real, count, maximum, total, weighted)
