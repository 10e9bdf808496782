"""A tiny model of several architectures."""

import torch
import transformers

SMALL = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "Qwen2": {},
    "Llama": {"tie_word_embeddings": True},
    "Gemma2": {"final_logit_softcapping": 2.0},
    "Cohere": {"logit_scale": 0.25},
    "Granite": {"logits_scaling": 4.0},
    "Phi": {"num_key_value_heads": 2},  # its head has a bias
    "GPT2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32},
}


def tiny(name, **changes):
    torch.manual_seed(0)
    options = {k: v for k, v in SMALL.items() if name != "GPT2" or k.startswith(("vocab", "pad", "bos", "eos"))}
    config = getattr(transformers, f"{name}Config")(**(options | MODELS[name] | changes))
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()
