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


@gluon.jit(do_not_specialize=(*NUMBERS, "hidden_size"))
def forward_sm90(
    hidden,
    weight,
    bias,
    tokens,
    inv_temperature,
    allowed,
    states,
    targets,
    count,
    vocab_size,
    hidden_size,
    part_size,
    target_count,
    start,
    bias_stride,
    allowed_stride,
    softcap,
    BIASED: gl.constexpr,
    CAPPED: gl.constexpr,
    ALLOWED: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    """State of a block of rows over one part of the vocabulary; the logits of a tile are in registers only."""
    BLOCK_M: gl.constexpr = hidden.block_type.shape[0]
    BLOCK_K: gl.constexpr = hidden.block_type.shape[1]
    BLOCK_N: gl.constexpr = weight.block_type.shape[0]
    # A tile's state is taken an eighth of its columns at a time: temporaries of all would not fit into registers.
    WIDTH: gl.constexpr = BLOCK_N // 8
    whole: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16])
    slim: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, WIDTH, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, slim)
    part, begin = place(count, vocab_size, part_size, BLOCK_M, GROUP)
    row = begin + gl.arange(0, BLOCK_M, layout=by_row)
    real = row < count
    nearest = gl.minimum(row, count - 1).to(gl.int64)
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, slim))
    scale = gl.load(inv_temperature + nearest)
    maximum = gl.full([BLOCK_M], float("-inf"), gl.float32, layout=by_row)
    total = gl.full([BLOCK_M], 0.0, gl.float32, layout=by_row)
    weighted = gl.full([BLOCK_M], 0.0, gl.float32, layout=by_row)

    left = gl.allocate_shared_memory(hidden.dtype, [STAGES, BLOCK_M, BLOCK_K], hidden.layout)
    right = gl.allocate_shared_memory(weight.dtype, [STAGES, BLOCK_N, BLOCK_K], weight.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(arrived.index(slot), count=1)
    # Makes the barriers visible to the unit that copies.
    fence_async_shared()
    # Steps are counted through the whole part: while a tile's state is taken, the next tile's first steps arrive.
    origin = part * part_size
    a_tile = gl.cdiv(hidden_size, BLOCK_K)
    tiles = gl.cdiv(gl.minimum(vocab_size - origin, part_size), BLOCK_N)
    steps = tiles * a_tile
    for slot in gl.static_range(STAGES):
        fill(hidden, weight, left, right, arrived, slot, steps, hidden_size, begin, origin, STAGES)
    for tile in range(tiles):
        z = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, layout=whole)
        for k in range(a_tile):
            step = tile * a_tile + k
            stage = step % STAGES
            mbarrier.wait(arrived.index(stage), step // STAGES & 1)
            z = warpgroup_mma(left.index(stage), right.index(stage).permute([1, 0]), z, is_async=True)
            # The step before has been read when no more than this one is under way.
            z = warpgroup_mma_wait(1, deps=[z])
            if k > 0:
                fill(hidden, weight, left, right, arrived, step - 1 + STAGES, steps, hidden_size, begin, origin, STAGES)
        z = warpgroup_mma_wait(0, deps=[z])
        done = (tile + 1) * a_tile - 1
        fill(hidden, weight, left, right, arrived, done + STAGES, steps, hidden_size, begin, origin, STAGES)
        parts = eighths(z)
        for eighth in gl.static_range(8):
            maximum, total, weighted = extended(
                gl.convert_layout(parts[eighth], slim),
                origin + tile * BLOCK_N + eighth * WIDTH,
                column,
                maximum,
                total,
                weighted,
                nearest,
                real,
                scale,
                bias,
                tokens,
                allowed,
                targets,
                vocab_size,
                target_count,
                start,
                bias_stride,
                allowed_stride,
                softcap,
                BIASED,
                CAPPED,
                ALLOWED,
            )
    store_state(states, part, row, real, count, maximum, total, weighted)
