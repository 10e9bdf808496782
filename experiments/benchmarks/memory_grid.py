"""The grid of models and settings that plans are compared with measurements on."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from rl_bridge.models.model_source import fill
from rl_bridge.models.stored_tensors import TensorsInHand
from rl_bridge.pipelines.objective_options import objective_options
from rl_bridge.pipelines.training import LoRAOptions
from rl_tools.plan.workload import Workload
from rl_train.policy_configs import quickstart
from rl_train.policy_options import PolicyPipeline


@dataclass(frozen=True)
class NewModel:
    """A model of a configuration in hand, with random weights."""

    config: Any

    def empty(self) -> PreTrainedModel:
        """As transformers makes it, in float32."""
        return AutoModelForCausalLM.from_config(self.config, dtype=torch.float32, trust_remote_code=False).eval()

    def load(self, model: PreTrainedModel, device: torch.device | None = None) -> None:
        """Draw the weights from torch's generator."""
        with torch.device("cpu"):
            whole = self.empty()
        fill(model, TensorsInHand(whole.state_dict()), device)


def models() -> dict[str, NewModel]:
    """Three families of different widths, depths, groups of heads, with tied and untied heads; SmolLM2's shapes."""
    common = {"max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    return {
        "qwen2": NewModel(
            Qwen2Config(
                vocab_size=512,
                hidden_size=64,
                intermediate_size=192,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
                tie_word_embeddings=True,
                **common,
            )
        ),
        "llama": NewModel(
            LlamaConfig(
                vocab_size=1000,
                hidden_size=48,
                intermediate_size=128,
                num_hidden_layers=5,
                num_attention_heads=3,
                num_key_value_heads=1,
                tie_word_embeddings=False,
                **common,
            )
        ),
        "qwen3": NewModel(
            Qwen3Config(
                vocab_size=300,
                hidden_size=96,
                head_dim=32,
                intermediate_size=256,
                num_hidden_layers=2,
                num_attention_heads=6,
                num_key_value_heads=6,
                tie_word_embeddings=True,
                **common,
            )
        ),
        "smollm2": NewModel(
            LlamaConfig(
                vocab_size=49152,
                hidden_size=576,
                intermediate_size=1536,
                num_hidden_layers=30,
                num_attention_heads=9,
                num_key_value_heads=3,
                tie_word_embeddings=True,
                **common,
            )
        ),
    }


def workload(model: str) -> Workload:
    """Rows that fill several micro-batches of the smaller settings."""
    if model == "smollm2":
        return Workload(prompts=2, responses=4, prompt_tokens=24, new_tokens=24)
    return Workload(prompts=8, responses=4, prompt_tokens=16, new_tokens=48)


def settings(model: str) -> Iterator[tuple[str, PolicyPipeline]]:
    """Options of a run, each alone and some together."""
    start, rows = quickstart(), workload(model)
    policy = replace(
        start.policy,
        prompts_per_step=rows.prompts,
        updates_per_step=2,
        sampling=replace(start.policy.sampling, n=rows.responses, max_new_tokens=rows.new_tokens),
    )
    many, few = (192, 96) if model == "smollm2" else (1024, 256)
    base = replace(start, micro_batch_tokens=many, policy=policy)
    low = replace(base, dtype="bfloat16", policy=replace(policy, recompute_old_logprobs=True))
    yield "plain", base
    yield "smaller micro-batches", replace(base, micro_batch_tokens=few)
    yield "checkpointing", replace(base, gradient_checkpointing=True)
    yield "LoRA", replace(base, lora=LoRAOptions(rank=4))
    yield "bfloat16", low
    yield "bfloat16, checkpointing", replace(low, gradient_checkpointing=True)
    yield (
        "LoRA, checkpointing, smaller",
        replace(base, lora=LoRAOptions(rank=4), gradient_checkpointing=True, micro_batch_tokens=few),
    )
    yield "no reference", replace(base, track_kl=False)
    yield "critic", replace(base, objective=objective_options("ppo"))
    yield "fused head", replace(base, fused_loss=True)
    yield "packed, no shared prefixes", replace(base, packing=True, share_prefixes=False)
    yield "padded, no shared prefixes", replace(base, share_prefixes=False)
