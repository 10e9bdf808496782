"""The Gluon kernel of the forward on Hopper: tiles through a ring of shared buffers to the matrix units."""

# Gluon annotates what its compiler sees: layouts and sizes become constants by being declared so.
# pyright: reportAssignmentType=false, reportArgumentType=false, reportGeneralTypeIssues=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from rl_kernels.triton_math import softcapped

# Triton 3.9 renamed it; the old name is there still and raises.
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def halves(x):
    """The left and the right half of the columns; in registers, nothing moves."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute([0, 2, 1]).split()


@gluon.jit
def fill(hidden, weight, left, right, arrived, step, steps, features, row, first, STAGES: gl.constexpr):
    """Ask for the tiles of one step, unless it is past the last; what the barrier awaits is both."""
    FEATURES: gl.constexpr = hidden.block_type.shape[1]
    ENTRIES: gl.constexpr = weight.block_type.shape[0]
    size: gl.constexpr = 2 * FEATURES * (hidden.block_type.shape[0] + ENTRIES)
    a_tile = gl.cdiv(features, FEATURES)
    stage = step % STAGES
    barrier = arrived.index(stage)
    asked = step < steps
    feature = step % a_tile * FEATURES
    mbarrier.expect(barrier, size, pred=asked)
    load_tile(hidden, [row, feature], barrier, left.index(stage), pred=asked)
    load_tile(weight, [first + step // a_tile * ENTRIES, feature], barrier, right.index(stage), pred=asked)


@gluon.jit
def left_out(words, first, vocabulary, bits):
    """0 for the 32 entries from ``first`` on that are in each row's kept set, −inf for others: to be added."""
    # Past the last word every entry is left out already.
    word = gl.load(words + gl.minimum(first // 32, (vocabulary - 1) // 32))
    return gl.where(((word[:, None] >> bits[None, :]) & 1) == 0, float("-inf"), 0.0)


@gluon.jit
def forward_kernel(
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
    # A tile's state is taken 32 columns at a time: temporaries of the whole tile would not fit beside it.
    WIDTH: gl.constexpr = 32
    gl.static_assert(ENTRIES == 8 * WIDTH)
    whole: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, ENTRIES, 16])
    slim: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, WIDTH, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, slim)
    # Programs that run at the same time share GROUP blocks of rows and one tile of each part of the weight.
    parts = gl.cdiv(vocabulary, part_size)
    program = gl.program_id(0)
    leader = program // (GROUP * parts) * GROUP
    together = gl.minimum(gl.cdiv(count, ROWS) - leader, GROUP)
    within = program % (GROUP * parts)
    part = within // together
    begin = (leader + within % together) * ROWS
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
        first = origin + tile * ENTRIES
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

        one, two = halves(z)
        a, b = halves(one)
        c, d = halves(two)
        eighths = halves(a) + halves(b) + halves(c) + halves(d)
        for eighth in gl.static_range(8):
            x = gl.convert_layout(eighths[eighth], slim)
            here = first + eighth * WIDTH
            entry = here + column
            # What leaves an entry out is added: 0 or −inf.
            excluded = gl.where(entry < vocabulary, 0.0, float("-inf"))
            if BIASED:
                nearby = gl.minimum(entry, vocabulary - 1).to(gl.int64)
                added = gl.load(bias + nearby * bias_stride).to(gl.float32)
                finite = gl.where(added == float("-inf"), 0.0, added)
                excluded += added - finite
                x += finite[None, :]
            x = softcapped(x, softcap, CAPPED) * scale[:, None] + excluded[None, :]
            if KEPT:
                x += left_out(kept + nearest * kept_stride, here, vocabulary, column)
            for which in range(target_count):
                token = gl.load(tokens + nearest * target_count + which) - start
                caught = real & (token >= here) & (token < gl.minimum(here + WIDTH, vocabulary))
                value = gl.sum(gl.where(entry[None, :] == token[:, None], x, 0.0), 1)
                gl.store(targets + nearest * target_count + which, value, mask=caught)
            top = gl.maximum(maximum, gl.max(x, 1))
            # A row that has had nothing yet: differences with −inf would be NaN.
            base = gl.where(top == float("-inf"), 0.0, top)
            moved = gl.where(maximum == float("-inf"), 0.0, maximum - base)
            shrunk = gl.exp(moved)
            # Also −inf becomes −1000, whose exponential is 0 and its product with it; NaN stays.
            x = x - base[:, None]
            x = gl.where(x < -1000.0, -1000.0, x)
            e = gl.exp(x)
            weighted = shrunk * (weighted + moved * total) + gl.sum(x * e, 1)
            total = total * shrunk + gl.sum(e, 1)
            maximum = top
    out = states + part.to(gl.int64) * 3 * count + row
    # A maximum passes over NaN; a sum does not.
    gl.store(out, gl.where(total == total, maximum, total), mask=real)
    gl.store(out + count, total, mask=real)
    gl.store(out + 2 * count, weighted, mask=real)
