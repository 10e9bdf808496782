"""Gluon for Hopper (sm_90), Blackwell (sm_100) and CDNA4 (gfx950), for those who ask: Triton's algebra and backward,
with the forward's tiles copied into a ring of shared buffers and multiplied while the next are on their way.

Never run on a GPU. What is known: the three kernels compile with Triton 3.9 and 3.6 without spills; their source, run
program by program in an emulator (tests/kernels/gluon_emulator), gives what float64 gives, and no buffer is read before
it has arrived or overwritten before it was read, in the order that the source says. So indices, masks, phases and
algebra are shown; the hardware's own synchronisation, fences and layouts are not, nor its speed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from rl_kernels.common.row_state import RowState
from rl_kernels.experimental.gluon import gfx950, sm90, sm100, tma
from rl_kernels.experimental.gluon.gfx950 import forward_gfx950
from rl_kernels.experimental.gluon.rows import ALIGNMENT, ENTRIES, FEATURES, ROWS, fits, padded
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


def forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    inverse: Tensor,
    softcap: float | None,
    allowed_tokens: Tensor | None,
    mask: Tensor | None,
    start: int,
    workspace: int,
) -> RowState:
    """State of the entries start, start + 1, … that ``weight`` holds; that of no entry in rows left out."""
    name = architecture(hidden.device)
    lacking = [f"kernel for {name}"] if name not in KERNELS else _lacking(hidden, weight, KERNELS[name])
    if lacking:
        raise NotImplementedError(
            f"linear_logprobs: backend 'gluon' has no {', '.join(lacking)}; backends that have: triton, torch"
        )
    kernel, stages, warps, operands, unit, gathers = KERNELS[name]
    vocabulary, features = weight.shape

    def launch(rows: slice | Tensor, kept: Tensor | None, states: Tensor, targets: Tensor, part: int) -> None:
        scale = inverse[rows]
        kernel[(triton.cdiv(len(scale), ROWS) * len(states),)](
            *operands(hidden, weight, rows),
            scale if bias is None else bias,
            tokens[rows],
            scale,
            scale if kept is None else kept,
            states,
            targets,
            len(scale),
            vocabulary,
            features,
            part,
            tokens.shape[1],
            start,
            0 if bias is None else bias.stride(0),
            0 if kept is None else kept.stride(0),
            softcap or 1.0,
            BIASED=bias is not None,
            CAPPED=softcap is not None,
            KEPT=kept is not None,
            GROUP=GROUP,
            STAGES=stages,
            **own_constants(name, features),
            num_warps=warps,
        )

    in_place = fits(hidden, unit) and (gathers or mask is None)
    copied = 0 if in_place else hidden.element_size() * padded(features, unit)
    return in_parts(hidden, weight, tokens, inverse, allowed_tokens, mask, start, workspace, launch, copied)


def own_constants(name: str, features: int) -> dict[str, Any]:
    """What TMA's descriptors say in the other kernels."""
    if name != "gfx950":
        return {}
    return {"EVEN": features % FEATURES == 0, "ROWS": ROWS, "ENTRIES": ENTRIES, "FEATURES": FEATURES}


def _lacking(hidden: Tensor, weight: Tensor, on: Architecture) -> list[str]:
    found = []
    features = weight.shape[1]
    if hidden.dtype != weight.dtype or hidden.dtype not in (torch.bfloat16, torch.float16):
        found.append(f"{hidden.dtype} by {weight.dtype} (both bfloat16, or both float16)")
    if features == 0:
        found.append("product over no features")
    # A copy of the weight would be as large as what this operation is there to avoid.
    if len(weight) and not fits(weight, on.unit):
        found.append(
            f"weight with strides {weight.stride()} at this address (rows must be contiguous and begin at multiples of "
            f"{on.unit} elements, the first at one of {ALIGNMENT} bytes)"
        )
    if on.gathers and features % on.unit:
        found.append(f"product over {features} features (multiples of {on.unit})")
    if on.gathers and weight.stride(0) > gfx950.FARTHEST:
        found.append(f"weight whose rows begin {weight.stride(0)} elements apart ({gfx950.FARTHEST} at most)")
    return found
