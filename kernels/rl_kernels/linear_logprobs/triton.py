"""A GEMM of cuBLAS or hipBLASLt for each block of logits, and one Triton pass over the block: the backend of GPUs.

Forward, the pass writes nothing but the rows' states: a logit is written once, by the GEMM, and read once. Backward,
the pass turns the logits into their gradient, and two GEMMs follow.
"""

from functools import partial

import torch
import triton
from torch import Tensor

from rl_kernels.common.arguments import Problem
from rl_kernels.common.blocks import blocks, cost, row_blocks, tiles
from rl_kernels.common.matmul import matmul
from rl_kernels.common.row_state import RowState, empty_state
from rl_kernels.common.token_masks import allowed_tile
from rl_kernels.linear_logprobs.backward import Block
from rl_kernels.linear_logprobs.backward import backward as in_blocks
from rl_kernels.linear_logprobs.triton_kernels import dlogits_kernel, state_kernel

# Logits of a row whose gradient one program computes: as many as its registers hold.
BLOCK_N = 1024


def forward(problem: Problem, workspace: int) -> RowState:
    """State of the weight's part of the vocabulary; in rows left out the empty state."""
    hidden, weight, bias, rows, start = problem
    total = empty_state(rows.inv_temperature, rows.tokens)
    width = rows.inv_temperature.element_size()
    price = cost(hidden, weight, rows.allowed_tokens, width, width)
    size = blocks(len(weight), weight.shape[1], workspace, price)
    block = min(state_block(width), triton.next_power_of_2(size.vocab))
    for index in row_blocks(len(hidden), rows.mask, size.tokens):
        here, tokens, scale = hidden[index], rows.tokens[index], rows.inv_temperature[index]
        state = RowState(*(field[index] for field in total))
        for first, last in tiles(len(weight), size.vocab):
            logits = matmul(here, weight[first:last].T, scale.dtype)
            allowed = allowed_tile(rows.allowed_tokens, index, start + first, start + last)
            with torch.cuda.device_of(logits):
                state_kernel[(len(here),)](
                    logits,
                    scale if allowed is None else allowed.view(torch.uint8),
                    scale if bias is None else bias[first:last],
                    tokens,
                    scale,
                    *state,
                    start + first,
                    last - first,
                    logits.stride(0),
                    0 if allowed is None else allowed.stride(0),
                    0 if allowed is None else allowed.stride(1),
                    0 if bias is None else bias.stride(0),
                    tokens.shape[1],
                    rows.softcap or 1.0,
                    BIASED=bias is not None,
                    CAPPED=rows.softcap is not None,
                    ALLOWED=allowed is not None,
                    BLOCK_N=block,
                    num_warps=8,  # pyright: ignore[reportCallIssue]
                )
            # Freed before the next block's logits are made.
            del logits, allowed
        for field, value in zip(total, state, strict=True):
            field[index] = value
    return total


def state_block(width: int) -> int:
    """Logits of a row that a program takes at once, of ``width`` bytes each: as many as its registers hold."""
    return 2048 if width == 4 else 1024


def _dlogits(logits: Tensor, block: Block) -> Tensor:
    allowed, bias, scale = block.allowed, block.bias, block.inv_temperature
    count, vocab = logits.shape
    gradient = logits if logits.dtype == block.dtype else torch.empty_like(logits, dtype=block.dtype)
    width = min(BLOCK_N, triton.next_power_of_2(vocab))
    with torch.cuda.device_of(logits):
        dlogits_kernel[(count, triton.cdiv(vocab, width))](
            logits,
            gradient,
            scale if allowed is None else allowed.view(torch.uint8),
            scale if bias is None else bias,
            block.tokens,
            block.own,
            scale,
            block.coefficients.a,
            block.coefficients.b,
            block.logsumexp,
            vocab,
            logits.stride(0),
            gradient.stride(0),
            0 if allowed is None else allowed.stride(0),
            0 if allowed is None else allowed.stride(1),
            0 if bias is None else bias.stride(0),
            block.tokens.shape[1],
            block.softcap or 1.0,
            BIASED=bias is not None,
            CAPPED=block.softcap is not None,
            ALLOWED=allowed is not None,
            BLOCK_N=width,
            num_warps=8,  # pyright: ignore[reportCallIssue]
        )
    return gradient


# A logit becomes its gradient in place, where the dtypes agree.
backward = partial(in_blocks, dlogits=_dlogits, numbers=1)
