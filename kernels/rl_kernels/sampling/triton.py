"""Triton for NVIDIA and ROCm: the two-level sampler, with one exponential and no noise an entry.

tiles_kernel sums up each tile; cutoff_kernel bisects for what is kept, reading only tiles that reach above the
threshold it tries; tiles_kernel again, of what is kept; draw_kernel draws a tile and an entry of it. A program has one
row (several in the interpreter, whose price is by the program).
"""

# Triton annotates neither constants passed to kernels nor reductions to scalars as what they are.
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

import torch
import triton
from torch import Tensor

from rl_kernels.backends import interpreting
from rl_kernels.sampling.cutoff import greedy_is_top_1, tile_width
from rl_kernels.sampling.triton_kernels import cutoff_kernel, draw_kernel, tiles_kernel

_ROWS = 512 if interpreting() else 1


def forward(
    logits: Tensor, temperature: Tensor, k: Tensor, p: Tensor, log_min_p: Tensor, seed: Tensor, position: Tensor
) -> tuple[Tensor, ...]:
    """Tokens, log-probabilities (truncated, full), entropy, kept count, cutoff, last id kept, full logsumexp: [B]."""
    rows, vocabulary = logits.shape
    heat, count = greedy_is_top_1(temperature, k)
    width = tile_width(vocabulary)
    tiles = -(-vocabulary // width)
    each = min(_ROWS, triton.next_power_of_2(max(1, rows)))
    size = {"ROWS": each, "WIDTH": width}
    whole = {"ROWS": each, "WIDTH": width, "TILES": triton.next_power_of_2(tiles)}
    programs = triton.cdiv(rows, each)
    full, cut = logits.new_empty(2, 3, rows, tiles, dtype=torch.float32)
    counts = torch.empty(rows, tiles, dtype=torch.int32, device=logits.device)
    token, number, cutoff, last = (torch.empty_like(seed) for _ in range(4))
    logprob, full_logprob, entropy, logsumexp = (torch.empty_like(temperature) for _ in range(4))
    shape = (rows, vocabulary, tiles, *logits.stride())
    if rows:
        tiles_kernel[programs, tiles](logits, heat, cutoff, last, *full, counts, *shape, CUT=False, **size)
        cutoff_kernel[(programs,)](logits, heat, full[0], count, p, log_min_p, cutoff, last, *shape, **whole)
        tiles_kernel[programs, tiles](logits, heat, cutoff, last, *cut, counts, *shape, CUT=True, **size)
        draw_kernel[(programs,)](
            logits, heat, cutoff, last, *full, *cut, counts, seed, position, token, logprob, full_logprob, entropy,
            number, logsumexp, *shape, **whole,
        )  # fmt: skip
    full_logprob.masked_fill_(temperature == 0, 0.0).masked_fill_(number == 0, float("-inf"))
    return token, logprob, full_logprob, entropy, number, cutoff, last, logsumexp
