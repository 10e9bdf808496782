"""aiter's categorical sampler, for those who ask, on ROCm; written against amd-aiter 0.1.7.post2.dev18.

It takes its noise from outside: an exponential number an entry, here from Philox, so that a token depends on seed and
position alone, as with the other backends. That noise costs an array of the logits' size. Nothing is added to it here,
where aiter's default adds 1e-10.
"""

import torch
from torch import Tensor

from rl_kernels.experimental.sampler_adapter import forward_with
from rl_kernels.sampling.philox import ENTRIES, gumbel


def forward(
    logits: Tensor, temperature: Tensor, k: Tensor, p: Tensor, log_min_p: Tensor, seed: Tensor, position: Tensor
) -> tuple[Tensor, ...]:
    """Tokens, log-probabilities (truncated, full), entropy, kept count, cutoff, last id kept, full logsumexp: [B]."""
    return forward_with(_draw, logits, temperature, k, p, log_min_p, seed, position)


def _draw(x: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    from aiter.ops.sample import random_sample_outer_exponential  # pyright: ignore[reportMissingImports]

    count, vocabulary = x.shape
    index = torch.arange(vocabulary, device=x.device)
    exponentials = torch.exp(-gumbel(seed[:, None], position[:, None], index, ENTRIES))
    # The kernel reads four entries at a time, and past the end of a row takes 0 for the logit and for the noise.
    missing = (0, -vocabulary % 4)
    logits = torch.nn.functional.pad(x, missing, value=float("-inf")).clamp_min(torch.finfo(torch.float32).min)
    noise = torch.nn.functional.pad(exponentials, missing, value=1.0)
    tokens = torch.empty(count, dtype=torch.int32, device=x.device)
    random_sample_outer_exponential(tokens, logits, noise, torch.ones(count, device=x.device), 0.0)
    return tokens
