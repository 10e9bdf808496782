"""The vendor's matrix product a block at a time, and one Triton pass over each block: what is chosen on a GPU.

The pass writes nothing but a row's state, so that beyond the product a logit is written once and read once. The
backward is Triton's, which works in the same way.
"""

from functools import partial

import torch
import triton
from torch import Tensor

from rl_kernels.common.blocks import blocks, cost, row_blocks, tiles
from rl_kernels.common.matmul import product
from rl_kernels.common.row_state import RowState, empty_state
from rl_kernels.common.scaling import kept_tile
from rl_kernels.linear_logprobs.backward import backward as in_blocks
from rl_kernels.linear_logprobs.triton_kernels import dlogits_kernel, state_kernel

# Entries whose gradient a program computes: as many as its registers hold.
BLOCK = 1024


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
    total = empty_state(inverse, tokens)
    width = inverse.element_size()
    size = blocks(len(weight), weight.shape[1], workspace, cost(hidden, weight, allowed_tokens, width, width))
    block = min(state_block(width), triton.next_power_of_2(size.entries))
    for rows in row_blocks(len(hidden), mask, size.rows):
        here, wanted, scale = hidden[rows], tokens[rows], inverse[rows]
        state = RowState(*(field[rows] for field in total))
        for first, last in tiles(len(weight), size.entries):
            logits = product(here, weight[first:last].T, inverse.dtype)
            kept = kept_tile(allowed_tokens, rows, start + first, start + last)
            state_kernel[(len(here),)](
                logits,
                scale if kept is None else kept.view(torch.uint8),
                scale if bias is None else bias,
                wanted,
                scale,
                *state,
                start + first,
                first,
                last - first,
                logits.stride(0),
                0 if kept is None else kept.stride(0),
                0 if kept is None else kept.stride(1),
                0 if bias is None else bias.stride(0),
                tokens.shape[1],
                softcap or 1.0,
                BIASED=bias is not None,
                CAPPED=softcap is not None,
                KEPT=kept is not None,
                BLOCK=block,
                num_warps=8,  # pyright: ignore[reportCallIssue]
            )
            # Not alive beside the next block's.
            del logits, kept
        for field, value in zip(total, state, strict=True):
            field[rows] = value
    return total


def state_block(width: int) -> int:
    """Entries that a program takes at once: as many as its registers hold."""
    return 2048 if width == 4 else 1024


def _dlogits(logits, kept, bias, local, own, inverse, coefficients, base, softcap, dtype):
    count, entries = logits.shape
    gradient = logits if logits.dtype == dtype else torch.empty_like(logits, dtype=dtype)
    block = min(BLOCK, triton.next_power_of_2(entries))
    dlogits_kernel[(count, triton.cdiv(entries, block))](
        logits,
        gradient,
        inverse if kept is None else kept.view(torch.uint8),
        inverse if bias is None else bias,
        local,
        own,
        inverse,
        coefficients.a,
        coefficients.b,
        base,
        entries,
        logits.stride(0),
        gradient.stride(0),
        0 if kept is None else kept.stride(0),
        0 if kept is None else kept.stride(1),
        0 if bias is None else bias.stride(0),
        local.shape[1],
        softcap or 1.0,
        BIASED=bias is not None,
        CAPPED=softcap is not None,
        KEPT=kept is not None,
        BLOCK=block,
        num_warps=8,  # pyright: ignore[reportCallIssue]
    )
    return gradient


# The loop over blocks is every backend's; a logit becomes its gradient where it lies.
backward = partial(in_blocks, dlogits=_dlogits, numbers=1)
