"""One more token for each of many rows on a CPU, with weights in the order in which oneDNN's matrix product reads them.

A product of few rows by a large weight spends much of its time on bringing the weight into that order. During a rollout
the weight stays the same, so that is done once.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import LlamaForCausalLM, MistralForCausalLM, PreTrainedModel, Qwen2ForCausalLM
from transformers.activations import SiLUActivation

from rl_bridge.rollout.row_cache import RowCache

FAMILIES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM)
"""Models that compute what ``PackedStep`` computes: RMSNorm, rotated queries and keys, SwiGLU, two residual sums."""
MOST_BYTES = 4 << 30
"""Bytes of the largest model whose weights are held twice."""
OPS: Any = torch.ops.mkldnn


class _Linear:
    """x @ weight.T + bias for one or several layers that read the same x, with what follows in the same operation."""

    def __init__(self, layers: Iterable[nn.Linear], rows: int) -> None:
        layers = list(layers)
        weight = layers[0].weight if len(layers) == 1 else torch.cat([layer.weight for layer in layers])
        self.weight = OPS._reorder_linear_weight(weight.detach(), rows)
        biases = [x.weight.new_zeros(x.out_features) if x.bias is None else x.bias.detach() for x in layers]
        self.bias = None if all(layer.bias is None for layer in layers) else torch.cat(biases)

    def __call__(self, x: Tensor) -> Tensor:
        return OPS._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    def silu(self, x: Tensor) -> Tensor:
        """SiLU of the layer's output."""
        return OPS._linear_pointwise(x, self.weight, self.bias, "swish", [], "")

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """The layer's output times ``other``."""
        return OPS._linear_pointwise.binary(x, other, self.weight, self.bias, "mul")

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """The layer's output plus ``other``."""
        return OPS._linear_pointwise.binary(x, other, self.weight, self.bias, "add")


class _Layer(NamedTuple):
    """A decoder layer's own norms, and its packed weights."""

    attention_norm: nn.Module
    qkv: _Linear
    out: _Linear
    mlp_norm: nn.Module
    gate: _Linear
    up: _Linear
    down: _Linear
    scale: float
    kind: str


class PackedStep:
    """The model's own forward for one token a row, to the rounding of float32.

    The weights are copied: a change of the model does not reach them.
    """

    def __init__(self, model: PreTrainedModel, rows: int, kinds: Iterable[str]) -> None:
        """``model`` is one that ``packs`` accepts; ``rows``: of most steps. ``kinds``: of layers that have masks."""
        config, inner, rows = model.config, model.model, padded(rows)
        of_layers = getattr(config, "layer_types", None) or [next(iter(kinds))] * len(inner.layers)
        self._embedding, self._norm, self._rotary = inner.embed_tokens, inner.norm, inner.rotary_emb
        self._layers = [_layer(layer, kind, rows) for layer, kind in zip(inner.layers, of_layers, strict=True)]
        self._head = _Linear([model.lm_head], rows)
        attention = inner.layers[0].self_attn
        self._width, self._heads = attention.head_dim, config.num_attention_heads
        self._key_heads = config.num_key_value_heads

    def logits(self, tokens: Tensor, columns: Tensor, cache: RowCache, masks: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Logits [B, V] after a token of each row [B] at its column [B]; the cache has been told of these."""
        heads, key_heads, width, rows = self._heads, self._key_heads, self._width, len(tokens)
        padding = (0, padded(rows) - rows)
        x = self._embedding(pad(tokens, padding))
        cos, sin = (turn[:, 0, None] for turn in self._rotary(x[:rows, None], position_ids=columns[:, None]))
        # The sign of the half that turns the other way.
        sin = torch.cat([-sin[..., : width // 2], sin[..., width // 2 :]], -1)
        for number, layer in enumerate(self._layers):
            qkv = layer.qkv(layer.attention_norm(x))[:rows].view(rows, heads + 2 * key_heads, width)
            qk, v = qkv[:, : heads + key_heads], qkv[:, heads + key_heads :]
            qk = torch.addcmul(qk * cos, qk.roll(width // 2, -1), sin)
            k, v = cache.update(qk[:, heads:, None], v[:, :, None], number)
            mask = masks if isinstance(masks, Tensor) else masks[layer.kind]
            q = qk[:, :heads, None]
            attended = scaled_dot_product_attention(q, k, v, mask, scale=layer.scale, enable_gqa=True)
            x = layer.out.plus(pad(attended.reshape(rows, heads * width), (0, 0, *padding)), x)
            y = layer.mlp_norm(x)
            x = layer.down.plus(layer.up.times(y, layer.gate.silu(y)), x)
        return self._head(self._norm(x))[:rows]


def padded(rows: int) -> int:
    """Rows with those of padding: oneDNN makes code for each number of rows, of which there shall be few.

    >>> [padded(rows) for rows in (1, 9, 61, 300, 767)]
    [1, 16, 64, 320, 768]
    """
    unit = 1 if rows <= 8 else max(16, (1 << (rows - 1).bit_length()) // 16)
    return -(-rows // unit) * unit


def _layer(layer: Any, kind: str, rows: int) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return _Layer(
        layer.input_layernorm,
        _Linear([attention.q_proj, attention.k_proj, attention.v_proj], rows),
        _Linear([attention.o_proj], rows),
        layer.post_attention_layernorm,
        _Linear([mlp.gate_proj], rows),
        _Linear([mlp.up_proj], rows),
        _Linear([mlp.down_proj], rows),
        attention.scaling,
        kind,
    )


def packs(model: PreTrainedModel) -> bool:
    """Whether ``PackedStep`` computes what this model does: a plain float32 model of a known family on a CPU.

    A model with hooks, with exchanged layers (quantised, of PEFT, in shards) or under autocast is called itself.
    """
    if type(model) not in FAMILIES or model.training or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(OPS, "_linear_pointwise") or torch.is_autocast_enabled("cpu"):
        return False
    weights = list(model.parameters())
    kinds = (nn.Parameter, FakeTensor)  # a fake tensor stands for an array in a plan of memory
    if any(type(x) not in kinds or x.device.type != "cpu" or x.dtype != torch.float32 for x in weights):
        return False
    plain = all(_is_plain(module) for module in model.modules())
    linear = [layer for name, layer in model.named_modules() if name.endswith(("_proj", "lm_head"))]
    silu = all(isinstance(layer.mlp.act_fn, (nn.SiLU, SiLUActivation)) for layer in model.model.layers)
    size = sum(x.numel() * x.element_size() for x in weights)
    return plain and silu and all(type(layer) is nn.Linear for layer in linear) and size <= MOST_BYTES


def _is_plain(module: nn.Module) -> bool:
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
