"""The sampling parameters of a request to vLLM by name, for an engine in this process and for a server alike."""

from collections.abc import Collection
from typing import Any

from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.rollout.inside_vllm.sampler_hooks import EXTRA, DrawsOf
from rl_bridge.rollout.sampling import pinned, truncation

LEAST = 0.01
"""vLLM's least temperature besides 0: it raises others to it."""


def require_temperature(sampling: SamplingParams) -> None:
    """Refuse a temperature in the place of which vLLM takes another.

    Raises:
        ValueError: with the way on.
    """
    if 0 < sampling.temperature < LEAST:
        raise ValueError(
            f"vLLM draws at no temperature between 0 and {LEAST:g}, and takes {LEAST:g} for those, got "
            f"sampling.temperature {sampling.temperature:g}: take 0, for the most likely tokens, or {LEAST:g} or more; "
            "or a rollout in process"
        )


def request_fields(
    sampling: SamplingParams, *, seed: int, drawn: int = 0, limit: int, stop: Collection[int] = ()
) -> dict[str, Any]:
    """The fields of vLLM's ``SamplingParams`` for one sequence, as JSON.

    Args:
        sampling: temperature and truncation.
        seed: 64 bits, of the request and the sample. ``Draws`` reads it: vLLM's own ``seed`` ends an engine on a CPU
            where a prompt is read in pieces.
        drawn: tokens that the policy has drawn already in this sequence.
        limit: tokens that may be drawn.
        stop: ids that end the sequence.

    Raises:
        ValueError: a temperature that vLLM does not have.
    """
    require_temperature(sampling)
    cuts = truncation(sampling)
    return {
        **pinned(sampling),
        "min_p": 0.0,  # Draws cuts by min-p, behind top-p
        "max_tokens": limit,
        "stop_token_ids": sorted(stop),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
        "extra_args": {EXTRA: list(DrawsOf(seed, drawn, bool(cuts), cuts.get("min_p", 0.0)))},
    }


def probe_fields(*, max_tokens: int, seed: int, temperature: float) -> dict[str, Any]:
    """Likewise of a request that draws exactly ``max_tokens`` tokens."""
    sampling = SamplingParams(max_new_tokens=max_tokens, temperature=temperature)
    return request_fields(sampling, seed=seed, limit=max_tokens)
