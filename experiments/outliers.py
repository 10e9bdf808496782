"""A tiny model that computes what another one does, and that int8 cannot hold well: a few weights are far larger.

Large language models have channels like that by themselves. A row of int8 codes has one scale, which its largest weight
sets, so that the others of the row are left with few codes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import Qwen2ForCausalLM

from rl_bridge.models.small import TinySource


@dataclass(frozen=True, kw_only=True)
class OutlierSource(TinySource):
    """A ``TinySource`` with its first channel's gain divided, and the weights that read the channel multiplied."""

    factor: float = 64.0
    """A power of two, so that the model's float32 results are the same bits."""

    def whole(self) -> Qwen2ForCausalLM:
        """The model with its weights, in this process."""
        model = super().whole()
        with torch.no_grad():
            layers: Any = model.model.layers
            for layer in layers:
                attention, mlp = layer.self_attn, layer.mlp
                for norm, readers in (
                    (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
                    (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
                ):
                    norm.weight[0] /= self.factor
                    for reader in readers:
                        reader.weight[:, 0] *= self.factor
        return model
