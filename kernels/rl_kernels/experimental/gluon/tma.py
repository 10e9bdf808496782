"""Tiles by TMA, for both NVIDIA kernels: hidden states and weight described on the host, asked for in the kernel."""

# pyright: reportAssignmentType=false

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rl_kernels.experimental.gluon.rows import ALIGNMENT, ENTRIES, FEATURES, ROWS, readable

# Rows begin at multiples of as many half-precision numbers.
UNIT = ALIGNMENT // 2
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
# Triton 3.9 renamed it; the old name is there still and raises.
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


def operands(hidden: Tensor, weight: Tensor, rows: slice | Tensor) -> tuple[TensorDescriptor, TensorDescriptor]:
    """TMA reads rows that lie at equal distances: those that count are copied when some do not."""
    return _described(readable(hidden[rows], UNIT), ROWS), _described(weight, ENTRIES)


def _described(x: Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, FEATURES], LAYOUT)


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
