"""Sampling a token from logits, with random numbers that depend on the request and the position alone."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch

from rl_bridge.data.requests import RequestId, SamplingParams
from rl_bridge.functional import from_jax
from rl_bridge.splitmix64 import GOLDEN, logical_shift, mix, signed
from rl_fn import min_p, top_k, top_p


def token_sampler(
    sampling: SamplingParams,
) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """A function (logits [N, V], uniforms [N]) → (tokens [N], log-probabilities [N]) for these parameters.

    The log-probability is that of the distribution the token was sampled from, after temperature and truncation.
    """
    requested: tuple[tuple[Callable[..., Any], Any], ...]
    requested = ((top_k, sampling.top_k), (top_p, sampling.top_p), (min_p, sampling.min_p))
    transforms = [partial(_transform(function), value) for function, value in requested if value is not None]

    def sample_tokens(logits: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits.float()
        if sampling.temperature == 0:
            return logits.argmax(-1), torch.zeros(logits.shape[0], device=logits.device)
        logits = logits / sampling.temperature
        for transform in transforms:
            logits = transform(logits)
        logprobs = torch.log_softmax(logits, -1)
        # Inverse CDF in float64: with 10⁵ tokens the float32 sum is off by more than many tokens weigh.
        cumulative = torch.exp(logprobs.double()).cumsum(-1)
        tokens = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)
        return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]

    return sample_tokens


@cache
def _transform(function: Callable[..., Any]) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """The lowered transform, value first; lowered once for all calls."""
    lowered = from_jax(function)
    return lambda value, logits: lowered(logits, value)


def uniform_numbers(seeds: torch.Tensor, position: int) -> torch.Tensor:
    """One float64 in [0, 1) for each 64-bit seed: splitmix64 of (seed, position), its upper 53 bits."""
    bits = mix(mix(seeds) + signed((position + 1) * GOLDEN))
    return logical_shift(bits, 11).to(torch.float64) * 2.0**-53


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
