"""What tensor parallelism refuses, by name and before anything is cut."""

from types import SimpleNamespace

import pytest
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from rl_bridge.parallel.tensor import cut_matrices
from tests.bridge.parallel.one_step import make


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ({}, 3, "num_attention_heads is 4, which 3 tensor ranks do not divide"),
        ({}, 4, "num_key_value_heads is 2, which 4 tensor ranks do not divide"),
        ({"intermediate_size": 27}, 2, "intermediate_size is 27, which 2 tensor ranks do not divide"),
    ],
)
def test_sizes_that_the_ranks_do_not_divide(changes, ranks, message):
    model = make("Qwen2", **changes)
    with pytest.raises(ValueError, match=f"Qwen2Model: {message}"):
        cut_matrices(model, SimpleNamespace(size=lambda: ranks))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("model", [GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2)), nn.Linear(2, 2)])
def test_a_model_without_a_plan(model):
    with pytest.raises(ValueError, match=r"(GPT2Model|Linear) has no tensor-parallel plan; .*llama, qwen2, qwen3"):
        cut_matrices(model, SimpleNamespace(size=lambda: 2))  # pyright: ignore[reportArgumentType]
