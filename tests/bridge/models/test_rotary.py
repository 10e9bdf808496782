"""ROLL-3, MUSB-3: up to the bound of rotary kinds that look at the longest row, rows do not see those beside them."""

import numpy as np
import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
)

from rl_bridge.models.row_checks import longest_sequence, rotary_bound

SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 48,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [1.0 + n for n in range(8)]}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16, **FACTORS}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
OF_LAYERS = {"sliding_attention": PLAIN, "full_attention": DYNAMIC}
MSCALES = {"short_mscale": 1.0, "long_mscale": 1.5}

MODELS = {
    "phi3, longrope": (
        lambda: Phi3ForCausalLM(Phi3Config(**SMALL, rope_parameters=LONG, original_max_position_embeddings=16)),
        16,
    ),
    "llama, longrope": (lambda: LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=LONG)), 16),
    "phi-moe, longrope": (
        lambda: PhimoeForCausalLM(
            PhimoeConfig(**SMALL, rope_parameters=LONG | MSCALES, original_max_position_embeddings=16)
        ),
        16,
    ),
    "llama, dynamic": (lambda: LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=DYNAMIC)), 47),
    "cohere, dynamic": (lambda: CohereForCausalLM(CohereConfig(**SMALL, rope_parameters=DYNAMIC)), 47),
    "gemma 3, dynamic in one kind of layer": (
        lambda: Gemma3ForCausalLM(
            Gemma3TextConfig(
                **SMALL,
                head_dim=16,
                sliding_window=8,
                layer_types=["sliding_attention", "full_attention"],
                rope_parameters=OF_LAYERS,
            )
        ),
        47,
    ),
}


def made(make):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().eval().requires_grad_(False)


def first_row(model, length, *, beside):
    """Logits of a row of ``length`` tokens with one of ``beside`` tokens under it, padded on the right."""
    tokens = torch.arange(2 * beside).view(2, beside) % 37 + 1
    return model(input_ids=tokens, use_cache=False, attention_mask=torch.ones_like(tokens)).logits[0, :length]


@pytest.mark.parametrize("name", MODELS)
def test_a_row_within_the_bound_is_the_same_beside_any_other_within_it(name):
    model = made(MODELS[name][0])
    bound = rotary_bound(model)
    assert bound == MODELS[name][1]
    np.testing.assert_allclose(first_row(model, 9, beside=bound), first_row(model, 9, beside=12), atol=1e-5)
    # The bound is needed, and a longer call before changes nothing up to it.
    longer = first_row(model, 9, beside=bound + 20)
    assert float((longer - first_row(model, 9, beside=12)).abs().max()) > 1e-3
    whole = first_row(made(MODELS[name][0]), bound, beside=bound)
    first_row(model, 9, beside=bound + 20)
    np.testing.assert_allclose(first_row(model, bound, beside=bound), whole, atol=1e-6)


@pytest.mark.parametrize("engine", [8, 192, None])
@pytest.mark.parametrize("name", [*MODELS, "llama, linear"])
def test_an_engine_draws_no_longer_sequence_than_the_trainer_reads(name, engine):
    """vLLM multiplies the positions by the factor."""
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    others = (lambda: LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=linear)), 48)
    make, bound = MODELS.get(name, others)
    with torch.device("meta"):
        assert longest_sequence(make(), engine) == min(bound, engine or bound)


@pytest.mark.parametrize("rope", [PLAIN, YARN])
def test_other_kinds_have_no_bound(rope):
    model = made(lambda: LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=rope)))
    assert rotary_bound(model) is None
    np.testing.assert_allclose(first_row(model, 9, beside=70), first_row(model, 9, beside=12), atol=1e-5)
