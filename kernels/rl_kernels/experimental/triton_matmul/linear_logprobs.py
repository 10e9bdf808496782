"""Triton for NVIDIA and ROCm: one kernel forward, whose logits are never in memory; backward, a block's logits by a
matrix product, one fused pass to their gradient, two products.

A row's result does not depend on the other rows: the parts of the vocabulary whose states are merged depend on its size
alone.
"""

import torch
import triton
from torch import Tensor

from rl_kernels.common.row_state import RowState
from rl_kernels.experimental.on_chip_forward import GROUP
from rl_kernels.experimental.on_chip_forward import forward as in_parts
from rl_kernels.experimental.triton_matmul.configurations import architecture, configuration
from rl_kernels.experimental.triton_matmul.triton_kernels import forward_kernel
from rl_kernels.linear_logprobs.triton import backward

__all__ = ["backward", "forward"]


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
    vocabulary, features = weight.shape
    width = inverse.element_size() if hidden.dtype != weight.dtype else hidden.element_size()
    tile = configuration(architecture(hidden.device), width, features, vocabulary)

    def launch(rows: slice | Tensor, kept: Tensor | None, states: Tensor, targets: Tensor, part: int) -> None:
        index = torch.arange(rows.start, rows.stop, device=hidden.device) if isinstance(rows, slice) else rows
        forward_kernel[(triton.cdiv(len(index), tile.rows) * len(states),)](
            hidden,
            weight,
            inverse if bias is None else bias,
            index,
            tokens,
            inverse,
            inverse if kept is None else kept,
            states,
            targets,
            len(index),
            vocabulary,
            features,
            part,
            tokens.shape[1],
            start,
            hidden.stride(0),
            hidden.stride(1),
            weight.stride(0),
            weight.stride(1),
            0 if bias is None else bias.stride(0),
            0 if kept is None else kept.stride(0),
            softcap or 1.0,
            BIASED=bias is not None,
            CAPPED=softcap is not None,
            KEPT=kept is not None,
            # The interpreter multiplies the bits of bfloat16 as integers.
            WIDENED=hidden.dtype != weight.dtype or not hidden.is_cuda,
            EVEN=features % tile.features == 0,
            GROUP=GROUP,
            ROWS=tile.rows,
            ENTRIES=tile.entries,
            FEATURES=tile.features,
            num_warps=tile.warps,  # pyright: ignore[reportCallIssue]
            num_stages=tile.stages,  # pyright: ignore[reportCallIssue]
        )

    return in_parts(hidden, weight, tokens, inverse, allowed_tokens, mask, start, workspace, launch)
