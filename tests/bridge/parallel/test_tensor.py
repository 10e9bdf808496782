"""What tensor parallelism refuses, by name and before anything is cut, and the part of a value that a rank takes."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from rl_bridge.parallel import tensor_styles
from rl_bridge.parallel.tensor_parallel import cut_matrices
from tests.bridge.families import zoo
from tests.support.one_step import make


def refused(model, ranks, message):
    with pytest.raises(ValueError, match=message):
        cut_matrices(model, SimpleNamespace(size=lambda: ranks))  # pyright: ignore[reportArgumentType]
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ({}, 3, "num_attention_heads is 4, which 3 tensor ranks do not divide"),
        ({}, 4, "num_key_value_heads is 2, which 4 tensor ranks do not divide"),
        # The width of the keys is 8.
        ({"num_key_value_heads": 1, "head_dim": 8}, 2, "num_key_value_heads is 1, which 2 tensor ranks do not divide"),
        ({"intermediate_size": 27}, 2, "the number of rows of layers.0.mlp.gate_proj.weight is 27, which 2 tensor"),
    ],
)
def test_sizes_that_the_ranks_do_not_divide(changes, ranks, message):
    refused(make("Qwen2", **changes), ranks, f"Qwen2Model: {message}")


@pytest.mark.parametrize(
    ("family", "changes", "ranks", "message"),
    [
        ("mixtral", {"num_local_experts": 3}, 2, "the number of experts of layers.0.mlp.experts is 3, which 2 tensor"),
        ("phi3", {"intermediate_size": 27}, 2, r"the number of columns of layers.0.mlp.down_proj.weight is 27, which"),
        ("laguna", {"num_attention_heads_per_layer": [2, 3]}, 2, "num_attention_heads_per_layer is 3, which 2 tensor"),
    ],
)
def test_sizes_of_other_styles(family, changes, ranks, message, monkeypatch):
    monkeypatch.setitem(zoo.OVERRIDES, family, zoo.OVERRIDES.get(family, {}) | changes)
    zoo._config.cache_clear()
    try:
        model = zoo.tiny(family)
    finally:
        zoo._config.cache_clear()
    refused(model, ranks, message)


def test_a_parameter_that_the_plan_does_not_know():
    model = make("Llama")
    model.model.layers[1].self_attn.k_norm = nn.LayerNorm(4)
    refused(model, 2, r"LlamaModel: the tensor-parallel plan does not know layers\.1\.self_attn\.k_norm\.weight")


def test_a_style_that_is_not_known():
    model = make("Llama")
    model.config.base_model_tp_plan = {"layers.*.mlp": "sequence_parallel"}
    refused(model.model, 2, r"LlamaModel: the plan's style 'sequence_parallel' for layers\.0\.mlp is not known")


@pytest.mark.parametrize("model", [GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2)), nn.Linear(2, 2)])
def test_a_model_without_a_plan(model: PreTrainedModel):
    refused(model, 2, r"(GPT2Model|Linear) has no tensor-parallel plan; .*llama, .*qwen2, .*qwen3")


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 8)], ids=str)
def test_ranks_take_the_parts_of_the_last_axis_in_their_order(shape, ranks, monkeypatch):
    whole = torch.randn(shape)
    monkeypatch.setattr(tensor_styles.dist, "get_world_size", lambda group: ranks)
    parts = []
    for rank in range(ranks):
        monkeypatch.setattr(tensor_styles.dist, "get_rank", lambda group, rank=rank: rank)
        parts.append(tensor_styles.Split.forward(SimpleNamespace(), whole, "a group"))
        # Concatenate's gradient is cut as Split's value is.
        gradient = SimpleNamespace(start=rank * 8 // ranks, width=8 // ranks)
        assert torch.equal(tensor_styles.Concatenate.backward(gradient, whole)[0], parts[-1])
    assert all(part.shape[-1] == 8 // ranks and part.is_contiguous() for part in parts)
    assert torch.equal(torch.cat(parts, -1), whole)
