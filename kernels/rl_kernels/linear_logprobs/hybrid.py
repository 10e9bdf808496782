"""The vendor's matrix product a block at a time, and one Triton pass over each block: what is chosen on a GPU.

The pass writes nothing but a row's state, so that beyond the product a logit is written once and read once. The
backward is Triton's, which works in the same way.
"""

import torch
import triton
from torch import Tensor

from rl_kernels.linear_logprobs.blocks import blocks, cost, row_blocks, tiles
from rl_kernels.linear_logprobs.kernels import state_kernel
from rl_kernels.linear_logprobs.products import product
from rl_kernels.linear_logprobs.triton import backward
from rl_kernels.row_state import RowState, empty_state
from rl_kernels.scaling import kept_tile

__all__ = ["SPECIALISATIONS", "backward", "forward"]


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
    block = min(_block(width), triton.next_power_of_2(size.entries))
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


def _block(width: int) -> int:
    """Entries that a program takes at once: as many as its registers hold."""
    return 2048 if width == 4 else 1024


def _specialisation(dtype: str, everything: bool):
    """What kernels/benchmarks/ahead_of_time.py compiles: the plain kernel, or the one with every option."""
    wide = "fp64" if dtype == "fp64" else "fp32"
    pointers = dict.fromkeys(("logits", "inverse", "maximum", "total", "weighted", "targets"), f"*{wide}")
    pointers |= {"tokens": "*i64"}
    pointers |= {"bias": f"*{dtype}", "kept": "*u8"} if everything else {"bias": "*fp32", "kept": "*fp32"}
    constants = dict.fromkeys(("BIASED", "CAPPED", "KEPT"), everything) | {"BLOCK": _block(8 if dtype == "fp64" else 4)}
    types = {
        n: pointers.get(n, "fp32" if n == "softcap" else "i32") for n in state_kernel.arg_names if n not in constants
    }
    return state_kernel.__name__, types, constants, {"aligned": (*pointers, "row_stride")}


SPECIALISATIONS = {
    f"state {dtype}{', every option' if everything else ''}": _specialisation(dtype, everything)
    for dtype, everything in (("fp32", False), ("bf16", True), ("fp64", True))
}
