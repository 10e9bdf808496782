"""The error budget of a quantised rollout: quantiser error → log-probability error → truncation rate."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

import rl_fn
from rl_bridge.data.requests import Prompt, SamplingParams
from rl_bridge.data.token_batch import collate
from rl_bridge.engines import InferenceEngine, NeedParallel, TrainEngine
from rl_bridge.functional import from_jax
from rl_bridge.models.source import ModelSource
from rl_bridge.tracking.intervals import over_units
from rl_bridge.trainers.modules.scoring import ScoringConfig, TokenScorer
from rl_bridge.weights.compressed_tensors import tensors_of
from rl_bridge.weights.quantized import BLOCK, LAYOUTS, Precision, Quantize, precision_map


class WeightErrors(NamedTuple):
    """‖Ŵ − W‖ / ‖W‖ of each quantised weight, W as it is sent."""

    mean: float
    largest: float
    where: str
    weights: int


class RolloutErrors(NamedTuple):
    """Of the log-probabilities that tokens were sampled with, against the trainer's own: μ and π."""

    tokens: int
    prompts: int
    """Prompts that the tokens are of: what there are that many of, since the tokens of a prompt are alike."""
    mean: float
    """Of |log π − log μ| over all tokens, in nats."""
    low: float | None
    """With ``high``, the mean's 95 % interval over prompts and draws; None for fewer than three prompts."""
    high: float | None
    largest: float
    k3: float
    """Estimate of KL(μ‖π), in nats a token."""
    effective_sample_share: float
    truncated_share: float
    """Of tokens whose π/μ is above the cap of truncated importance sampling."""
    masked_share: float
    """Of tokens whose π/μ is outside IcePop's interval of 0.5 and 5."""


@torch.no_grad()
def weight_errors(source: ModelSource, precision: Precision, *, dtype: torch.dtype) -> WeightErrors:
    """What quantisation does to the weights of a model that are sent as ``dtype``."""
    with torch.device("meta"):
        model = source.empty()
    send = precision_map(precision, model, dtype=dtype)
    if not isinstance(send, Quantize):
        return WeightErrors(0.0, 0.0, "", 0)
    found: dict[str, float] = {}
    for name, tensor in tensors_of(source, model):
        if name in send.names:
            (_, codes), (_, scale) = send(name, tensor)
            found[name] = relative_error(tensor.to(dtype), codes, scale, precision)
    where = max(found, key=lambda name: found[name])
    return WeightErrors(sum(found.values()) / len(found), found[where], where, len(found))


def relative_error(weight: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, precision: str) -> float:
    """‖codes · scale − W‖ / ‖W‖; 0 for a weight of zeros."""
    if LAYOUTS[precision].granularity == "block":
        scale = scale.repeat_interleave(BLOCK, 0)[: weight.shape[0]].repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]
    exact = weight.double()
    norm = float(exact.norm())
    return float((codes.double() * scale.double() - exact).norm()) / norm if norm else 0.0


def rollout_errors(
    rollout: InferenceEngine,
    source: ModelSource,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    cap: float = 2.0,
) -> RolloutErrors:
    """Sample from a rollout, and score the tokens with the model in float32, as a trainer does."""
    trajectories = rollout.generate(prompts, sampling)
    pad = tokenizer.pad_token_id
    batch = collate(trajectories, pad if isinstance(pad, int) else 0)
    trainer = TrainEngine(lambda: TokenScorer(source, ScoringConfig(temperature=sampling.temperature)))
    trainer.build(colocate_with=[rollout])
    try:
        logprobs: torch.Tensor = trainer.token_logprobs(NeedParallel(batch))
    finally:
        trainer.release()
    assert batch.rollout_logprobs is not None
    gap = (logprobs - batch.rollout_logprobs)[batch.mask]
    metrics: Any = from_jax(rl_fn.mismatch_metrics)(logprobs, batch.rollout_logprobs, batch.mask)
    ratio = gap.exp()
    prompt = torch.tensor([trajectory.group for trajectory in trajectories])
    nobody = torch.zeros(len(prompts), dtype=torch.float64)
    apart = (logprobs - batch.rollout_logprobs).abs().where(batch.mask, 0.0).double().sum(-1)
    sums, counts = nobody.index_add(0, prompt, apart), nobody.index_add(0, prompt, batch.mask.double().sum(-1))
    interval = over_units(sums.tolist(), counts.tolist())
    return RolloutErrors(
        tokens=len(gap),
        prompts=len(prompts),
        mean=float(gap.abs().mean()),
        low=interval["low"],
        high=interval["high"],
        largest=float(gap.abs().max()),
        k3=float(metrics.k3),
        effective_sample_share=float(metrics.effective_sample_share),
        truncated_share=float((ratio > cap).float().mean()),
        masked_share=float(((ratio < 0.5) | (ratio > 5)).float().mean()),
    )
