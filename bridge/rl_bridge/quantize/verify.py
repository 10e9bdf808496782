"""The error budget of a model's quantised rollout, measured and told."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rl_bridge.data.requests import Prompt, SamplingParams
from rl_bridge.engines import InferenceEngine
from rl_bridge.models.loading import pretrained
from rl_bridge.models.source import ModelSource
from rl_bridge.quantize.budget import rollout_errors, weight_errors
from rl_bridge.rollout.inprocess import InProcessRollout
from rl_bridge.tracking.intervals import LEAST


def verify(
    model: str,
    precision: Any,
    *,
    engine: str,
    prompts: Sequence[Prompt],
    samples: int,
    tokens: int,
    temperature: float,
    cap: float,
    seed: int,
) -> dict[str, Any]:
    """The budget as ``--json`` writes it: ``weights`` always, ``rollout`` where an engine samples.

    Raises:
        ValueError: the model cannot be loaded, or the engine cannot compute in this precision.
    """
    source, tokenizer = pretrained(model)
    found: dict[str, Any] = {"model": model, "precision": precision, "engine": engine, "cap": cap}
    found["weights"] = weight_errors(source, precision, dtype=torch.float32)._asdict()
    if engine == "none":
        return found
    sampling = SamplingParams(n=samples, max_new_tokens=tokens, temperature=temperature, seed=seed)
    rollout = InferenceEngine(_factory(engine, source, tokenizer, precision)).build()
    try:
        found["rollout"] = rollout_errors(rollout, source, tokenizer, prompts, sampling, cap=cap)._asdict()
    finally:
        rollout.release()
    return found


def _factory(engine: str, source: ModelSource, tokenizer: PreTrainedTokenizerBase, precision: Any) -> Callable[[], Any]:
    if engine == "in_process":
        if precision != "int8":
            raise ValueError(f"a rollout in this process computes in int8; {precision} needs --engine vllm")
        return partial(InProcessRollout, source, tokenizer, precision="int8")
    from rl_bridge.rollout.vllm.options import VLLMOptions
    from rl_bridge.rollout.vllm.rollout import VLLMRollout

    return partial(VLLMRollout, source, tokenizer, VLLMOptions(precision=precision))


def lines(found: dict[str, Any]) -> list[str]:
    """The budget in words."""
    weights, rollout = found["weights"], found.get("rollout")
    told = [f"{found['model']}, {found['precision']}, engine: {found['engine']}"]
    if weights["weights"]:
        told.append(
            f"quantiser error        {weights['mean']:.3%} of a weight's norm in the mean of {weights['weights']}, "
            f"at most {weights['largest']:.3%} ({weights['where']})"
        )
    else:
        told.append("quantiser error        none: no weight has codes")
    if rollout is None:
        return [*told, "log-probability error  not measured: no engine sampled"]
    low, high, prompts = rollout["low"], rollout["high"], rollout["prompts"]
    few = f"no interval from {prompts} prompts, it takes {LEAST}"
    interval = few if low is None else f"95 % [{low:.4f}, {high:.4f}] over prompts"
    return [
        *told,
        f"log-probability error  {rollout['mean']:.4f} nats in the mean of {rollout['tokens']} tokens of "
        f"{prompts} prompts ({interval}), at most "
        f"{rollout['largest']:.4f}; KL {rollout['k3']:.2e}",
        f"truncation rate        {rollout['truncated_share']:.3%} of tokens at cap {found['cap']:g}; "
        f"{rollout['masked_share']:.3%} outside 0.5 … 5; effective sample {rollout['effective_sample_share']:.3f}",
    ]
