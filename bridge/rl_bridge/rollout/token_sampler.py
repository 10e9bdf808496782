"""Sampling a token from logits, with random numbers that depend on the request and the position alone."""

from collections.abc import Sequence

import torch

from rl_bridge.data.requests import RequestId, SamplingParams
from rl_bridge.splitmix64 import mix, signed
from rl_kernels import sample
from rl_kernels.sampling import SampledTokens


def draw(logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, sampling: SamplingParams) -> SampledTokens:
    """A token for each row of logits [N, V], from a seed and the number of the draw [N].

    Log-probabilities are those of the distribution that the tokens come from, after temperature and truncation. The
    tokens that it allowed are there where truncation can have cut some off.
    """
    cuts = {"top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
    # Each that cuts nothing off would cost as much as one that does.
    nothing = {"top_k": lambda k: k >= logits.shape[1], "top_p": lambda p: p == 1, "min_p": lambda p: False}
    cuts = {name: value for name, value in cuts.items() if value is not None and not nothing[name](value)}
    truncated = bool(cuts) and sampling.temperature > 0
    return sample(
        logits,
        temperature=float(sampling.temperature),
        seed=seeds,
        position=positions,
        return_allowed_tokens=truncated,
        **(cuts if truncated else {}),
    )


def request_seeds(ids: Sequence[RequestId], samples: int, device: torch.device) -> torch.Tensor:
    """A 64-bit seed for each request and sample, [requests, samples]: it does not change with the batch around it."""
    if not all(ids):
        raise ValueError(f"a request needs an id of at least one number, got {list(ids)}")
    places = torch.arange(samples, device=device) + 1
    if len({len(id) for id in ids}) > 1:
        return torch.cat([request_seeds([id], samples, device) for id in ids])
    numbers = torch.tensor([[signed(number) for number in id] for id in ids], device=device, dtype=torch.int64)
    state = mix(numbers[:, 0])
    for column in numbers[:, 1:].unbind(1):
        state = mix(state + column + 1)
    return mix(state[:, None] + places)
