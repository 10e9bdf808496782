"""CDNA4: hidden states (gathered where a mask leaves some out) and rows of the weight are copied into a ring in the LDS
without passing through registers. Each wave multiplies them into the logits of its own tokens.
"""

# Gluon annotates what its compiler sees: layouts and sizes become constants by being declared so.
# pyright: reportAssignmentType=false, reportArgumentType=false, reportGeneralTypeIssues=false

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import AMDMFMALayout
from triton.experimental.gluon.language.amd.cdna4 import async_copy, mfma

from rl_kernels.experimental.gluon.rows import BLOCK_N, fits, readable
from rl_kernels.experimental.gluon.state import NUMBERS, eighths, extended, place, store_state

# 144 KiB of buffers, 128 registers a lane for its logits.
STAGES, WARPS = 3, 4
# Rows begin, and the hidden size ends, at multiples of as many elements: then a lane copies 16 bytes at a time.
UNIT = 16
# Elements from a row of the weight to the next, at most: offsets from a tile's first row reach 2³¹ bytes.
FARTHEST = 2**31 // (2 * BLOCK_N) - UNIT


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
    weight_row,
    dim,
    step,
    steps,
    hidden_size,
    origin,
    vocab_size,
    weight_row_stride,
    STAGES: gl.constexpr,
    EVEN: gl.constexpr,
):
    """Ask for the tiles of one step; past the last step, for the last one's again, so that the number of copies under
    way is known.
    """
    BLOCK_K: gl.constexpr = left.shape[2]
    BLOCK_N: gl.constexpr = right.shape[1]
    a_tile = gl.cdiv(hidden_size, BLOCK_K)
    stage = step % STAGES
    step = gl.minimum(step, steps - 1)
    done = step % a_tile * BLOCK_K
    first = origin + step // a_tile * BLOCK_N
    base = weight + (first.to(gl.int64) * weight_row_stride + done)
    # Rows past the last read the last one.
    offset = gl.minimum(weight_row, vocab_size - 1 - first)[:, None] * weight_row_stride + dim[None, :]
    if EVEN:
        async_copy.global_load_to_shared(left.index(stage), hidden_rows + done)
        async_copy.buffer_load_to_shared(right.index(stage), base, offset)
    else:
        inside = (dim < hidden_size - done)[None, :]
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
    EVEN: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
):
    """State of a block of rows over one part of the vocabulary; the logits of a tile are in registers only."""
    # A tile's state is taken an eighth of its columns at a time.
    WIDTH: gl.constexpr = BLOCK_N // 8
    # A wave has 32 rows, so that their maxima and sums need no other wave.
    gl.static_assert(32 * gl.num_warps() == BLOCK_M)
    slim: gl.constexpr = AMDMFMALayout(4, [32, 32, 16], True, [gl.num_warps(), 1])
    by_row: gl.constexpr = gl.SliceLayout(1, slim)
    # Eight lanes copy 64 entries of a token's hidden state, 16 bytes each; these are stored so that lanes that read a
    # column do not collide.
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [8, 8], [gl.num_warps(), 1], [1, 0])
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    part, begin = place(count, vocab_size, part_size, BLOCK_M, GROUP)
    row = begin + gl.arange(0, BLOCK_M, layout=by_row)
    real = row < count
    nearest = gl.minimum(row, count - 1).to(gl.int64)
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, slim))
    scale = gl.load(inv_temperature + nearest)
    maximum = gl.full([BLOCK_M], float("-inf"), gl.float32, layout=by_row)
    total = gl.full([BLOCK_M], 0.0, gl.float32, layout=by_row)
    weighted = gl.full([BLOCK_M], 0.0, gl.float32, layout=by_row)

    left = gl.allocate_shared_memory(hidden.dtype.element_ty, [STAGES, BLOCK_M, BLOCK_K], swizzled)
    right = gl.allocate_shared_memory(weight.dtype.element_ty, [STAGES, BLOCK_N, BLOCK_K], swizzled)
    dim = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, copied))
    weight_row = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, copied))
    index = gl.load(rows + gl.minimum(begin + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, copied)), count - 1))
    hidden_rows = hidden + (index[:, None] * hidden_row_stride + dim[None, :])
    # Steps are counted through the whole part: while a tile's state is taken, the next tile's first steps arrive.
    origin = part * part_size
    a_tile = gl.cdiv(hidden_size, BLOCK_K)
    tiles = gl.cdiv(gl.minimum(vocab_size - origin, part_size), BLOCK_N)
    steps = tiles * a_tile
    for slot in gl.static_range(STAGES - 1):
        copy(
            hidden_rows,
            weight,
            left,
            right,
            weight_row,
            dim,
            slot,
            steps,
            hidden_size,
            origin,
            vocab_size,
            weight_row_stride,
            STAGES,
            EVEN,
        )
    for tile in range(tiles):
        z = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, layout=slim)
        for k in range(a_tile):
            step = tile * a_tile + k
            # This step's tiles have arrived, and every wave has read the step before's.
            async_copy.wait_group(STAGES - 2)
            copy(
                hidden_rows,
                weight,
                left,
                right,
                weight_row,
                dim,
                step + STAGES - 1,
                steps,
                hidden_size,
                origin,
                vocab_size,
                weight_row_stride,
                STAGES,
                EVEN,
            )
            # Relaxed: Triton 3.6 would otherwise wait for the copies under way.
            a = async_copy.load_shared_relaxed(left.index(step % STAGES), gl.DotOperandLayout(0, slim, 8))
            b = async_copy.load_shared_relaxed(
                right.index(step % STAGES).permute([1, 0]), gl.DotOperandLayout(1, slim, 8)
            )
            z = mfma(a, b, z)
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
    # No copy may arrive when the memory is another program's.
    async_copy.wait_group(0)
    store_state(states, part, row, real, count, maximum, total, weighted)
