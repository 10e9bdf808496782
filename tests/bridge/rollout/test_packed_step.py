"""Packed weights compute what the model's own forward does, and only where that is known."""

import itertools

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rl_bridge.parallel.attention import use_rl_fn_attention
from rl_bridge.rollout.cached_model import Arrangement, CachedModel
from rl_bridge.rollout.packed_step import packs

SMALL = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.5,
}
MIXED = ["full_attention", "sliding_attention", "full_attention"]
WINDOW = {"sliding_window": 4, "use_sliding_window": True, "layer_types": MIXED}
LONG = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
FAMILIES = {
    "llama with every bias": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True)),
    "llama with wide heads and yarn": lambda: LlamaForCausalLM(
        LlamaConfig(**SMALL, head_dim=10, rope_parameters=LONG, tie_word_embeddings=True)
    ),
    "qwen2 with windows": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL, **WINDOW)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=3)),
}
PROMPTS = [[5, 6, 7, 8, 9], [10], [11, 12]]


def made(family):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = FAMILIES[family]().eval().requires_grad_(False)
        for parameter in model.parameters():
            # Norms of one and biases of zero hide that they are left out.
            parameter.add_(0.1 * torch.randn_like(parameter))
    use_rl_fn_attention(model)
    return model


def added(model, steps=4):
    """Logits of every step in which all rows get a token, and the rows: 18 of them, so 14 of padding."""
    cached, rows = CachedModel(model), [list(prompt) for prompt in PROMPTS for _ in range(6)]
    cached.read(PROMPTS, [n // 6 for n in range(len(rows))], 0, 6)
    found = []
    for step in range(steps):
        tokens = torch.tensor([20 + (step + 3 * n) % 30 for n in range(len(rows))])
        columns = torch.tensor([len(row) for row in rows])
        rows = [[*row, int(token)] for row, token in zip(rows, tokens, strict=True)]
        found.append(cached.add(tokens, columns, [len(row) for row in rows]))
    return torch.stack(found), rows


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_step_is_the_models_own(family):
    model = made(family)
    assert packs(model)
    packed, rows = added(model)
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    own, _ = added(model)
    assert len(calls) > 4
    np.testing.assert_allclose(packed, own, rtol=2e-5, atol=2e-5 * float(own.abs().max()))
    whole = torch.stack([model(input_ids=torch.tensor([row]), use_cache=False).logits[0, -1] for row in rows])
    np.testing.assert_allclose(packed[-1], whole, rtol=2e-5, atol=2e-5 * float(own.abs().max()))


def hooked(model):
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)


def exchanged(model):
    layer = model.model.layers[2].self_attn
    layer.o_proj = torch.nn.Sequential(layer.o_proj)


def another_activation(model):
    model.model.layers[0].mlp.act_fn = torch.nn.GELU()


@pytest.mark.parametrize(
    "changed",
    [hooked, exchanged, another_activation, lambda model: model.train(), lambda model: model.bfloat16()],
    ids=["hook", "layer", "activation", "training", "bfloat16"],
)
def test_other_models_are_called_themselves(changed):
    model = made("mistral")
    changed(model)
    assert not packs(model)
    with torch.autocast("cpu"):
        assert not packs(made("mistral"))


class Narrow(MistralForCausalLM):
    """Of a user's own: its forward takes nothing that it does not name."""

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None):
        return super().forward(input_ids, attention_mask, position_ids, past_key_values, use_cache=use_cache)


def test_no_more_is_arranged_than_was_found_right_and_the_model_takes():
    model = made("llama with every bias")
    for right in itertools.product((False, True), repeat=3):
        read_packed, together, positions = right
        done = CachedModel(model, Arrangement("rl_fn", *right)).arrangement
        assert done[1:] == (read_packed and positions, together and positions, positions)
    narrow = Narrow(MistralConfig(**SMALL, sliding_window=None))
    use_rl_fn_attention(narrow)
    assert CachedModel(narrow).arrangement[1:] == (False, True, True)
