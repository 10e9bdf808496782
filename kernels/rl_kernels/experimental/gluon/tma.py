"""Tiles by TMA, for both NVIDIA kernels: hidden states and weight described on the host, asked for in the kernel."""

# pyright: reportAssignmentType=false

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rl_kernels.experimental.gluon.rows import ALIGNMENT, BLOCK_K, BLOCK_M, BLOCK_N, readable

# Rows begin at multiples of as many half-precision numbers.
UNIT = ALIGNMENT // 2
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
# Renamed in Triton 3.9, where the old name raises.
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


def operands(hidden: Tensor, weight: Tensor, rows: slice | Tensor) -> tuple[TensorDescriptor, TensorDescriptor]:
    """TMA reads rows that lie at equal distances: those that count are copied when some do not."""
    return _described(readable(hidden[rows], UNIT), BLOCK_M), _described(weight, BLOCK_N)


def _described(x: Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, BLOCK_K], LAYOUT)


@gluon.jit
def fill(hidden, weight, left, right, arrived, step, steps, hidden_size, row, first, STAGES: gl.constexpr):
    """Ask for both tiles of one step, unless it is past the last; the barrier waits for both."""
    BLOCK_K: gl.constexpr = hidden.block_type.shape[1]
    BLOCK_N: gl.constexpr = weight.block_type.shape[0]
    size: gl.constexpr = 2 * BLOCK_K * (hidden.block_type.shape[0] + BLOCK_N)
    a_tile = gl.cdiv(hidden_size, BLOCK_K)
    stage = step % STAGES
    barrier = arrived.index(stage)
    asked = step < steps
    dim = step % a_tile * BLOCK_K
    mbarrier.expect(barrier, size, pred=asked)
    load_tile(hidden, [row, dim], barrier, left.index(stage), pred=asked)
    load_tile(weight, [first + step // a_tile * BLOCK_N, dim], barrier, right.index(stage), pred=asked)
