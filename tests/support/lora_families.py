"""Tiny models whose layers hold their weights in unlike ways: the kinds of layers that an adapter can be for."""

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "bos_token_id": None}
SIZES |= {
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
SIZES |= {"pad_token_id": None, "eos_token_id": 1}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
GROUPS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 2, "first_k_dense_replace": 1}
SSM = {"mamba_d_state": 4, "mamba_d_conv": 3, "mamba_expand": 2}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
FAMILIES = {
    "llama": {},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "phi3": {"head_dim": 4},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 12, "decoder_sparse_step": 1},
    "qwen3_moe": MOE | {"head_dim": 4, "mlp_only_layers": [1]},
    "olmoe": MOE,
    "deepseek_v3": MOE | MLA | GROUPS | {"num_key_value_heads": 4},
    "glm4_moe": MOE | GROUPS | {"head_dim": 4},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 4},
    "jamba": MOE | SSM | {"mamba_dt_rank": 4, "use_mamba_kernels": False, "attn_layer_period": 2}
    | {"attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "bamba": SSM | {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "attn_layer_indices": [1]},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "qwen3_next": MOE | LINEAR | {"shared_expert_intermediate_size": 12, "head_dim": 4}
    | {"layer_types": ["linear_attention", "full_attention"]},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "jetmoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 4, "num_key_value_heads": 2},
}  # fmt: skip


def tiny(family, seed=0, **changes):
    """A model with weights that make every layer matter."""
    config = CONFIG_MAPPING[family](**(SIZES | FAMILIES[family] | changes))
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model
