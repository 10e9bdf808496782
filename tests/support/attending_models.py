"""Models of a few parameters whose attention matters: weights large enough that a wrong mask shows."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

FAMILIES = {"Llama": (LlamaConfig, LlamaForCausalLM), "Qwen2": (Qwen2Config, Qwen2ForCausalLM)}
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def tiny(name="Qwen2", attention="rl_fn", seed=0, **options):
    config, model = FAMILIES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = model(config(**SIZES | options))
        with torch.no_grad():
            for parameter in made.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(8.0)
    made.set_attn_implementation(attention)
    return made.eval()


def batch(lengths, seed=0, columns=None):
    """Right-padded ids [N, L], and the mask of what is no padding."""
    columns = max(lengths, default=1) if columns is None else columns
    ids = torch.randint(61, (len(lengths), columns), generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(columns) < torch.tensor(lengths)[:, None]
    return ids.where(mask, 0), mask


def grouped_batch(lengths, groups, seed=0):
    """The batch with a common beginning in each group: the shortest row but two tokens, or what there is of it."""
    ids, mask = batch(lengths, seed)
    for group in set(groups):
        rows = [row for row, number in enumerate(groups) if number == group and lengths[row]]
        common = max(0, min((lengths[row] for row in rows), default=0) - 2)
        for row in rows:
            ids[row, :common] = ids[rows[0], :common]
    return ids, mask


def transformers_checkpointing(model):
    """transformers' own activation checkpointing, whose switch 5.20 has renamed."""
    switch = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    switch()
