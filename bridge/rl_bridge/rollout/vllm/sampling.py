"""``SamplingParams`` and a request's seed as an engine of vLLM takes them."""

# pyright: reportMissingImports=false

from collections.abc import Collection

from vllm.sampling_params import RequestOutputKind
from vllm.sampling_params import SamplingParams as EngineSampling

from rl_bridge.data.requests import SamplingParams
from rl_bridge.rollout.pinned import pinned, truncation
from rl_bridge.rollout.vllm.draws import EXTRA, DrawsOf


def vllm_sampling(
    sampling: SamplingParams, *, seed: int, drawn: int = 0, limit: int, stop: Collection[int], whole: bool = True
) -> EngineSampling:
    """What an engine is asked for one sequence.

    Args:
        sampling: temperature and truncation.
        seed: 64 bits, of the request and the sample. ``Draws`` reads it, not vLLM.
        drawn: tokens that the policy has drawn already in this sequence.
        limit: tokens that may be drawn.
        stop: ids that end the sequence.
        whole: the engine gives out finished sequences; else each as far as it is, after each step.
    """
    cuts = truncation(sampling)
    return EngineSampling(
        **pinned(sampling) | {"min_p": 0.0},  # Draws cuts by min-p, behind top-p
        max_tokens=limit,
        stop_token_ids=sorted(stop),
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY if whole else RequestOutputKind.CUMULATIVE,
        extra_args={EXTRA: tuple(DrawsOf(seed, drawn, bool(cuts), cuts.get("min_p", 0.0)))},
    )
