"""Models with an adapter that is not the identity."""

import torch
from peft import LoraConfig, get_peft_model

from tests.support.weight_engines import model


def untied(seed):
    made = model(seed)
    made.lm_head.weight = torch.nn.Parameter(torch.randn(made.lm_head.weight.shape) * 0.3)
    made.config.tie_word_embeddings = False
    return made


def adapted(seed, dtype=torch.float32, **config):
    """A peft model whose adapter is not the identity."""
    base = untied(1) if config.pop("untied", False) else model(1, dtype)
    made = get_peft_model(base, LoraConfig(r=4, lora_alpha=16, **config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return made
