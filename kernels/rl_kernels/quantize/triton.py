"""Triton for NVIDIA and ROCm: a list of weights in a few launches, each weight read from memory once.

A program has some rows, or a block, in registers: it finds the largest magnitudes and writes codes and scales. Rows
wider than a tile are read twice, the second time from cache; a scale for a whole tensor takes two sweeps of it.
"""

# Triton annotates neither constants passed to kernels nor reductions to scalars as what they are.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

import torch
import triton
from torch import Tensor

from rl_kernels.quantize.scheme import Scheme
from rl_kernels.quantize.table import Group, groups
from rl_kernels.quantize.triton_kernels import absmax_kernel, quantize_kernel

LARGEST_BLOCK = 128
# Rows of a block at a time where it is not aligned.
_PIECE = 32


def forward(weights: list[Tensor], out: list[Tensor], scales: list[Tensor], scheme: Scheme) -> None:
    """Write codes into ``out`` and scales, shaped as rl_fn's, into ``scales``."""
    if scheme.granularity == "block" and scheme.block > LARGEST_BLOCK:
        raise NotImplementedError(
            f"quantize: backend 'triton' takes blocks up to {LARGEST_BLOCK}, got {scheme.block}; available: torch"
        )
    found, shared = groups(weights, out, scales, scheme)
    device = weights[0].device
    with torch.cuda.device_of(weights[0]):
        tables = {g: torch.tensor(matrices, dtype=torch.int64).to(device) for g, (matrices, _) in found.items()}
        absmax = torch.zeros(shared if scheme.granularity == "tensor" else 1, dtype=torch.int32, device=device)
        likes = {t.dtype: t for t in weights}
        codes = {t.dtype: t if t.dtype == torch.int8 else t.view(torch.uint8) for t in out}
        # Every largest magnitude before the first code: matrices of a stack may be in different groups.
        if scheme.granularity == "tensor":
            for group, (matrices, programs) in found.items():
                absmax_kernel[(programs,)](
                    tables[group], likes[group.weight], absmax, len(matrices), ALIGNED=group.aligned,
                    BLOCK_M=group.height, BLOCK_N=group.width, num_warps=warps_of(group),
                )  # fmt: skip
        for group, (matrices, programs) in found.items():
            rows, columns = tile_of(group, scheme.granularity)
            quantize_kernel[(programs,)](
                tables[group], likes[group.weight], codes[group.out], absmax, len(matrices), scheme.largest,
                GRANULARITY=scheme.granularity, WHOLE=group.whole, FP8=scheme.name == "fp8", NATIVE=converts(device),
                UNSIGNED_ZERO=group.out == torch.float8_e4m3fnuz, ALIGNED=group.aligned, BLOCK_M=rows, BLOCK_N=columns,
                BLOCK=scheme.block, num_warps=warps_of(group),
            )  # fmt: skip


def tile_of(group: Group, granularity: str) -> tuple[int, int]:
    """Rows and columns of a program's tile, powers of two."""
    if granularity == "block":
        side = triton.next_power_of_2(group.width)
        return side if group.whole else min(side, _PIECE), side
    return group.height, group.width


def warps_of(group: Group) -> int:
    """More threads where each has an address an element to keep beside it."""
    return 16 if group.whole and not group.aligned else 8


def converts(device: torch.device) -> bool:
    """Whether the device has a conversion to e4m3fn that Triton knows: NVIDIA's from Ada on."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)
