"""Gluon for Hopper (sm_90), Blackwell (sm_100) and CDNA4 (gfx950), on request: the forward's tiles are copied into a
ring of shared buffers, and multiplied while the next ones are on their way. The backward is ``triton``'s.

Never run on a GPU. The three kernels compile with Triton 3.9 and 3.6 without spills. Their source, run program by
program in an emulator (tests/kernels/experimental/gluon_emulator), gives what float64 gives, reads no buffer before its
copy has arrived, and overwrites none before it was read. That shows indices, masks, phases and algebra; it does not
show the hardware's synchronisation, fences and layouts, nor speed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from rl_kernels.common.arguments import Problem
from rl_kernels.common.row_state import RowState
from rl_kernels.experimental.gluon import gfx950, sm90, sm100, tma
from rl_kernels.experimental.gluon.gfx950 import forward_gfx950
from rl_kernels.experimental.gluon.rows import ALIGNMENT, BLOCK_K, BLOCK_M, BLOCK_N, fits, padded
from rl_kernels.experimental.gluon.sm90 import forward_sm90
from rl_kernels.experimental.gluon.sm100 import forward_sm100
from rl_kernels.experimental.on_chip_forward import GROUP
from rl_kernels.experimental.on_chip_forward import forward as in_parts
from rl_kernels.experimental.triton_matmul.configurations import architecture
from rl_kernels.linear_logprobs.triton import backward

__all__ = ["backward", "forward"]


class Architecture(NamedTuple):
    """A kernel, its stages and warps; what it reads tiles from, how rows must lie, and whether it takes their index."""

    kernel: Any
    stages: int
    warps: int
    operands: Callable[[Tensor, Tensor, slice | Tensor], tuple[Any, ...]]
    unit: int
    gathers: bool = False


KERNELS = {
    "sm_90": Architecture(forward_sm90, sm90.STAGES, sm90.WARPS, tma.operands, tma.UNIT),
    "sm_100": Architecture(forward_sm100, sm100.STAGES, sm100.WARPS, tma.operands, tma.UNIT),
    "gfx950": Architecture(forward_gfx950, gfx950.STAGES, gfx950.WARPS, gfx950.operands, gfx950.UNIT, gathers=True),
}


def forward(problem: Problem, workspace: int) -> RowState:
    """State of the weight's part of the vocabulary; in rows left out the empty state."""
    hidden, weight, bias, rows, start = problem
    name = architecture(hidden.device)
    lacking = [f"kernel for {name}"] if name not in KERNELS else _lacking(hidden, weight, KERNELS[name])
    if lacking:
        raise NotImplementedError(
            f"linear_logprobs: backend 'gluon' has no {', '.join(lacking)}; backends that have: triton, torch"
        )
    kernel, stages, warps, operands, unit, gathers = KERNELS[name]
    vocab_size, hidden_size = weight.shape

    def launch(index: slice | Tensor, allowed: Tensor | None, states: Tensor, targets: Tensor, part: int) -> None:
        scale = rows.inv_temperature[index]
        with torch.cuda.device_of(hidden):
            kernel[(triton.cdiv(len(scale), BLOCK_M) * len(states),)](
                *operands(hidden, weight, index),
                scale if bias is None else bias,
                rows.tokens[index],
                scale,
                scale if allowed is None else allowed,
                states,
                targets,
                len(scale),
                vocab_size,
                hidden_size,
                part,
                rows.tokens.shape[1],
                start,
                0 if bias is None else bias.stride(0),
                0 if allowed is None else allowed.stride(0),
                rows.softcap or 1.0,
                BIASED=bias is not None,
                CAPPED=rows.softcap is not None,
                ALLOWED=allowed is not None,
                GROUP=GROUP,
                STAGES=stages,
                **own_constants(name, hidden_size),
                num_warps=warps,
            )

    in_place = fits(hidden, unit) and (gathers or rows.mask is None)
    copied = 0 if in_place else hidden.element_size() * padded(hidden_size, unit)
    return in_parts(problem, workspace, launch, copied)


def own_constants(name: str, hidden_size: int) -> dict[str, Any]:
    """What TMA's descriptors say in the other kernels."""
    if name != "gfx950":
        return {}
    return {"EVEN": hidden_size % BLOCK_K == 0, "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K}


def _lacking(hidden: Tensor, weight: Tensor, on: Architecture) -> list[str]:
    found = []
    hidden_size = weight.shape[1]
    if hidden.dtype != weight.dtype or hidden.dtype not in (torch.bfloat16, torch.float16):
        found.append(f"{hidden.dtype} by {weight.dtype} (both bfloat16, or both float16)")
    if hidden_size == 0:
        found.append("hidden size 0")
    # A copy of the weight would be as large as what this operation is there to avoid.
    if len(weight) and not fits(weight, on.unit):
        found.append(
            f"weight with strides {weight.stride()} at this address (rows must be contiguous and begin at multiples of "
            f"{on.unit} elements, the first at one of {ALIGNMENT} bytes)"
        )
    if on.gathers and hidden_size % on.unit:
        found.append(f"hidden size {hidden_size} (multiples of {on.unit})")
    if on.gathers and weight.stride(0) > gfx950.FARTHEST:
        found.append(f"weight whose rows begin {weight.stride(0)} elements apart ({gfx950.FARTHEST} at most)")
    return found
