"""FlashInfer's categorical sampler, for those who ask, on NVIDIA GPUs; written against flashinfer-python 0.7.2.post1.

FlashInfer draws from the tokens that are allowed here; its own top-k and top-p, which treat ties differently, are not
used. Two limits: a token also depends on the row's place in the batch, as FlashInfer's random stream does; and its
Gumbel noise ends at 15.9, so that tokens less probable than about 1e-7 are drawn at wrong rates.
"""

import torch
from torch import Tensor

from rl_kernels.experimental.sampler_adapter import forward_with
from rl_kernels.sampling.cutoff import Parameters
from rl_kernels.sampling.philox import philox


def forward(logits: Tensor, parameters: Parameters) -> tuple[Tensor, ...]:
    """Tokens, log-probabilities (truncated, full), entropy, number of allowed tokens, the cutoff's key and id, full
    logsumexp: [B].
    """
    return forward_with(_draw, logits, parameters)


def _draw(x: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    from flashinfer.sampling import sampling_from_logits  # pyright: ignore[reportMissingImports]

    return sampling_from_logits(x, seed=_stream(seed, position), offset=torch.zeros_like(seed))


def _stream(seed: Tensor, position: Tensor) -> Tensor:
    """A seed for each (seed, position). As FlashInfer's offsets, neighbouring positions would share three random
    numbers in four.
    """
    zero = torch.zeros_like(position)
    high, low, _, _ = philox(seed, position & 0xFFFFFFFF, (position >> 32) & 0xFFFFFFFF, zero, zero + 2)
    return (high << 32) | low
