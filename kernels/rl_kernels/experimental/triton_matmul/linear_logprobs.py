"""One Triton kernel forward, matrix product included: the logits never leave the chip. The backward is ``triton``'s.

A token's result does not depend on the other tokens: the parts of the vocabulary whose states are merged depend on its
size alone.
"""

import torch
import triton
from torch import Tensor

from rl_kernels.common.arguments import Problem
from rl_kernels.common.row_state import RowState
from rl_kernels.experimental.on_chip_forward import GROUP
from rl_kernels.experimental.on_chip_forward import forward as in_parts
from rl_kernels.experimental.triton_matmul.configurations import architecture, configuration
from rl_kernels.experimental.triton_matmul.triton_kernels import forward_kernel
from rl_kernels.linear_logprobs.triton import backward

__all__ = ["backward", "forward"]


def forward(problem: Problem, workspace: int) -> RowState:
    """State of the weight's part of the vocabulary; in rows left out the empty state."""
    hidden, weight, bias, rows, start = problem
    vocab_size, hidden_size = weight.shape
    scale = rows.inv_temperature
    width = scale.element_size() if hidden.dtype != weight.dtype else hidden.element_size()
    tile = configuration(architecture(hidden.device), width, hidden_size, vocab_size)

    def launch(index: slice | Tensor, allowed: Tensor | None, states: Tensor, targets: Tensor, part: int) -> None:
        if isinstance(index, slice):
            index = torch.arange(index.start, index.stop, device=hidden.device)
        with torch.cuda.device_of(hidden):
            forward_kernel[(triton.cdiv(len(index), tile.block_m) * len(states),)](
                hidden,
                weight,
                scale if bias is None else bias,
                index,
                rows.tokens,
                scale,
                scale if allowed is None else allowed,
                states,
                targets,
                len(index),
                vocab_size,
                hidden_size,
                part,
                rows.tokens.shape[1],
                start,
                hidden.stride(0),
                hidden.stride(1),
                weight.stride(0),
                weight.stride(1),
                0 if bias is None else bias.stride(0),
                0 if allowed is None else allowed.stride(0),
                rows.softcap or 1.0,
                BIASED=bias is not None,
                CAPPED=rows.softcap is not None,
                ALLOWED=allowed is not None,
                # The interpreter multiplies the bits of bfloat16 as integers.
                WIDENED=hidden.dtype != weight.dtype or not hidden.is_cuda,
                EVEN=hidden_size % tile.block_k == 0,
                GROUP=GROUP,
                BLOCK_M=tile.block_m,
                BLOCK_N=tile.block_n,
                BLOCK_K=tile.block_k,
                num_warps=tile.warps,  # pyright: ignore[reportCallIssue]
                num_stages=tile.stages,  # pyright: ignore[reportCallIssue]
            )

    return in_parts(problem, workspace, launch)
