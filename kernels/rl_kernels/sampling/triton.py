"""Triton for NVIDIA and ROCm: the two-level sampler, with one exponential and no noise a logit.

tiles_kernel sums up each tile. cutoff_kernel finds the cutoff by bisection, and reads only the tiles that reach the
threshold it tries. tiles_kernel sums up the allowed tokens of each tile. draw_kernel draws a tile, and a token of the
tile. A program has one row (several in the interpreter, whose time is by the program).
"""

# Triton annotates neither constants passed to kernels nor reductions to scalars as what they are.
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportCallIssue=false

import torch
import triton
from torch import Tensor

from rl_kernels.backends import interpreting
from rl_kernels.sampling.cutoff import Parameters, greedy_is_top_1, tile_width
from rl_kernels.sampling.triton_kernels import cutoff_kernel, draw_kernel, tiles_kernel

_BLOCK_M = 512 if interpreting() else 1


def forward(logits: Tensor, parameters: Parameters) -> tuple[Tensor, ...]:
    """Tokens, log-probabilities (truncated, full), entropy, number of allowed tokens, the cutoff's key and id, full
    logsumexp: [B].
    """
    rows, vocab_size = logits.shape
    temperature, k, p, log_min_p, seed, position = parameters
    heat, count = greedy_is_top_1(temperature, k)
    width = tile_width(vocab_size)
    tiles = -(-vocab_size // width)
    each = min(_BLOCK_M, triton.next_power_of_2(max(1, rows)))
    size = {"BLOCK_M": each, "BLOCK_N": width}
    whole = {"BLOCK_M": each, "BLOCK_N": width, "TILES": triton.next_power_of_2(tiles)}
    programs = triton.cdiv(rows, each)
    full, cut = logits.new_empty(2, 3, rows, tiles, dtype=torch.float32)
    counts = torch.empty(rows, tiles, dtype=torch.int32, device=logits.device)
    token, number, cutoff, last = (torch.empty_like(seed) for _ in range(4))
    logprob, full_logprob, entropy, logsumexp = (torch.empty_like(temperature) for _ in range(4))
    shape = (rows, vocab_size, tiles, *logits.stride())
    if rows:
        with torch.cuda.device_of(logits):
            tiles_kernel[programs, tiles](logits, heat, cutoff, last, *full, counts, *shape, CUT=False, **size)
            cutoff_kernel[(programs,)](logits, heat, full[0], count, p, log_min_p, cutoff, last, *shape, **whole)
            tiles_kernel[programs, tiles](logits, heat, cutoff, last, *cut, counts, *shape, CUT=True, **size)
            draw_kernel[(programs,)](
                logits, heat, cutoff, last, *full, *cut, counts, seed, position, token, logprob, full_logprob, entropy,
                number, logsumexp, *shape, **whole,
            )  # fmt: skip
    full_logprob.masked_fill_(temperature == 0, 0.0).masked_fill_(number == 0, float("-inf"))
    return token, logprob, full_logprob, entropy, number, cutoff, last, logsumexp
