"""aiter's categorical sampler, for those who ask, on ROCm; written against amd-aiter 0.1.7.post2.dev18.

aiter takes its noise as an argument, an exponential number a logit. Here the noise is Philox's, so that a token depends
on seed and position alone, as with the other backends; it costs an array of the logits' size. aiter's default of adding
1e-10 to the noise is switched off.
"""

import torch
from torch import Tensor

from rl_kernels.experimental.sampler_adapter import forward_with
from rl_kernels.sampling.cutoff import Parameters
from rl_kernels.sampling.philox import TOKENS, gumbel


def forward(logits: Tensor, parameters: Parameters) -> tuple[Tensor, ...]:
    """Tokens, log-probabilities (truncated, full), entropy, number of allowed tokens, the cutoff's key and id, full
    logsumexp: [B].
    """
    return forward_with(_draw, logits, parameters)


def _draw(x: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    from aiter.ops.sample import random_sample_outer_exponential  # pyright: ignore[reportMissingImports]

    count, vocab_size = x.shape
    index = torch.arange(vocab_size, device=x.device)
    exponentials = torch.exp(-gumbel(seed[:, None], position[:, None], index, TOKENS))
    # aiter's kernel reads four logits at a time, and past the end of a row takes 0 for the logit and for the noise.
    missing = (0, -vocab_size % 4)
    logits = torch.nn.functional.pad(x, missing, value=float("-inf")).clamp_min(torch.finfo(torch.float32).min)
    noise = torch.nn.functional.pad(exponentials, missing, value=1.0)
    tokens = torch.empty(count, dtype=torch.int32, device=x.device)
    random_sample_outer_exponential(tokens, logits, noise, torch.ones(count, device=x.device), 0.0)
    return tokens
