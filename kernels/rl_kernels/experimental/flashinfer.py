"""FlashInfer's categorical sampler, for those who ask, on NVIDIA GPUs; written against flashinfer-python 0.7.2.post1.

It draws from the kept set found here: its own top-k and top-p, which keep ties differently, are not used. Unlike with
the other backends a token also depends on the row's place in the batch, as FlashInfer's random stream does; and its
Gumbel noise ends at 15.9, so that entries less probable than about 1e-7 are drawn at other rates than they should be.
"""

import torch
from torch import Tensor

from rl_kernels.experimental.sampler_adapter import forward_with
from rl_kernels.sampling.philox import philox


def forward(
    logits: Tensor, temperature: Tensor, k: Tensor, p: Tensor, log_min_p: Tensor, seed: Tensor, position: Tensor
) -> tuple[Tensor, ...]:
    """Tokens, log-probabilities (truncated, full), entropy, kept count, cutoff, last id kept, full logsumexp: [B]."""
    return forward_with(_draw, logits, temperature, k, p, log_min_p, seed, position)


def _draw(x: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    from flashinfer.sampling import sampling_from_logits  # pyright: ignore[reportMissingImports]

    return sampling_from_logits(x, seed=_stream(seed, position), offset=torch.zeros_like(seed))


def _stream(seed: Tensor, position: Tensor) -> Tensor:
    """A seed for each pair: as FlashInfer's offset, neighbouring positions would share three numbers in four."""
    zero = torch.zeros_like(position)
    high, low, _, _ = philox(seed, position & 0xFFFFFFFF, (position >> 32) & 0xFFFFFFFF, zero, zero + 2)
    return (high << 32) | low
