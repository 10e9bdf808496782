"""Blackwell: tiles through a ring of shared buffers to the matrix unit, whose sums are in tensor memory, two tiles of
them: while one is multiplied, the state of the other is taken.
"""

# Gluon annotates what its compiler sees: layouts and sizes become constants by being declared so.
# pyright: reportAssignmentType=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    fence_async_shared,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
)

from rl_kernels.experimental.gluon.state import NUMBERS, extended, place, store_state
from rl_kernels.experimental.gluon.tma import fill

# 192 KiB of shared buffers, all of tensor memory.
STAGES, WARPS = 4, 4
# Triton 3.9 renamed it.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def multiply(
    hidden, weight, left, right, arrived, read, sums, step, k, steps, hidden_size, row, first, STAGES: gl.constexpr
):
    """Begin one step's matmul when its tiles have arrived; replace the tiles of a finished matmul."""
    # Matmuls under way while one waits.
    BEHIND: gl.constexpr = STAGES // 2
    stage = step % STAGES
    mbarrier.wait(arrived.index(stage), step // STAGES & 1)
    tcgen05_mma(
        left.index(stage), right.index(stage).permute([1, 0]), sums, use_acc=k > 0, mbarriers=[read.index(stage)]
    )
    done = step - BEHIND
    if done >= 0:
        mbarrier.wait(read.index(done % STAGES), done // STAGES & 1)
        fill(hidden, weight, left, right, arrived, done + STAGES, steps, hidden_size, row, first, STAGES)


@gluon.jit(do_not_specialize=(*NUMBERS, "hidden_size"))
def forward_sm100(
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
    """State of a block of rows over one part of the vocabulary; the logits of two tiles are in tensor memory only."""
    BLOCK_M: gl.constexpr = hidden.block_type.shape[0]
    BLOCK_K: gl.constexpr = hidden.block_type.shape[1]
    BLOCK_N: gl.constexpr = weight.block_type.shape[0]
    # A tile's state is taken an eighth of its columns at a time: temporaries of all would not fit into registers.
    WIDTH: gl.constexpr = BLOCK_N // 8
    # A thread has one row, which is its lane of tensor memory.
    gl.static_assert(32 * gl.num_warps() == BLOCK_M)
    slim: gl.constexpr = gl.BlockedLayout([1, WIDTH], [32, 1], [gl.num_warps(), 1], [0, 1])
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
    sums = allocate_tensor_memory(
        gl.float32, [2, BLOCK_M, BLOCK_N], TensorMemoryLayout([BLOCK_M, BLOCK_N], col_stride=1)
    )
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    finished = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(arrived.index(slot), count=1)
        mbarrier.init(read.index(slot), count=1)
    for which in gl.static_range(2):
        mbarrier.init(finished.index(which), count=1)
    # Makes the barriers visible to the units that copy and multiply.
    fence_async_shared()
    origin = part * part_size
    a_tile = gl.cdiv(hidden_size, BLOCK_K)
    tiles = gl.cdiv(gl.minimum(vocab_size - origin, part_size), BLOCK_N)
    steps = tiles * a_tile
    for slot in gl.static_range(STAGES):
        fill(hidden, weight, left, right, arrived, slot, steps, hidden_size, begin, origin, STAGES)
    # A tile's steps, and the state of the tile before: an eighth of each in turn, so that matmuls are under way
    # meanwhile.
    for tile in range(tiles + 1):
        # Every thread has read the sums that this tile overwrites.
        barrier()
        before = tile - 1
        for eighth in gl.static_range(8):
            if tile < tiles:
                for k in range(a_tile * eighth // 8, a_tile * (eighth + 1) // 8):
                    multiply(
                        hidden,
                        weight,
                        left,
                        right,
                        arrived,
                        read,
                        sums.index(tile % 2),
                        tile * a_tile + k,
                        k,
                        steps,
                        hidden_size,
                        begin,
                        origin,
                        STAGES,
                    )
                if eighth == 7:
                    tcgen05_commit(finished.index(tile % 2))
            if tile > 0:
                if eighth == 0:
                    mbarrier.wait(finished.index(before % 2), before // 2 & 1)
                maximum, total, weighted = extended(
                    sums.index(before % 2).slice(eighth * WIDTH, WIDTH).load(slim),
                    origin + before * BLOCK_N + eighth * WIDTH,
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
