"""Small sizes for the fields of configurations, and what single families need besides."""

from typing import Any

HIDDEN, HEADS, HEAD = 32, 4, 8
ROPE = {"rope_type": "default", "rope_theta": 10000.0}

SIZES: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "lru_width", "embedding_size", "attention_hidden_size"), HIDDEN
    ),
    **dict.fromkeys(("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("n_head", "n_heads", "attention_heads", "num_heads"), HEADS),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), HEAD),
    "num_key_value_heads": 2,
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "dff"), 48),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers"), 1),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions"), 128),
    **dict.fromkeys(("sliding_window", "attention_window_size", "window_size", "sliding_window_size"), 5),
    # Mixtures: four experts, two of them for a token; the first layer is dense where a family has such layers.
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 24),
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("index_head_dim", "state_size", "mamba_d_state", "mamba_d_head"), 8),
    # Sums of many: a score of few heads is often zero, and ties would be broken by the width of the batch.
    "index_n_heads": 16,
    "index_topk": 4,
    # Recurrences: chunks shorter than the tests' rows.
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_n_heads": 8,
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 4),
}
"""What fields of these names become where a family's configuration has them."""

_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.3,
}
_SOFT_CAPS = {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
_TWO_KINDS = {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
}
_MAMBA = {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2}

_TOWER = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
    "num_position_embeddings": 16,
    "patch_size": 4,
}

OVERRIDES: dict[str, dict[str, Any]] = {
    "blt": {
        "encoder_hash_byte_group_vocab": 64,
        **{
            name: {
                "hidden_size": HIDDEN,
                "hidden_size_global": HIDDEN,
                "num_attention_heads": HEADS,
                "num_hidden_layers": 1,
                "intermediate_size": 48,
                "vocab_size": 112,
                "max_position_embeddings": 128,
            }
            for name in ("patcher_config", "encoder_config", "decoder_config", "global_config")
        },
    },
    "codegen": {"rotary_dim": 4},
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"logit_scale": 0.5},
    "cohere2_moe": {"logit_scale": 0.5},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), ROPE | {"mrope_section": [1, 1, 2]}),
        "num_key_value_heads": 2,
    },
    "cpmant": {"dim_ff": 48, "dim_head": HEAD, "prompt_length": 4},
    "deepseek_v2": {"topk_method": "group_limited_greedy", "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    "deepseek_v4": {
        "o_groups": 2,
        "o_lora_rank": 8,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    },
    "dots1": {
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "layer_types": ["full_attention", "sliding_attention"],
        "num_hidden_layers": 2,
    },
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "embedding_multiplier": 2.0,
        "lm_head_multiplier": 0.5,
        "key_multiplier": 1.5,
        "attention_out_multiplier": 0.7,
        "attention_in_multiplier": 1.2,
        "ssm_multipliers": [1.1, 0.9, 0.8, 1.2, 0.7],
        "ssm_in_multiplier": 1.3,
        "ssm_out_multiplier": 0.8,
    },
    "fuyu": {"patch_size": 2},
    "gemma2": _SOFT_CAPS,
    "gemma3_text": {"query_pre_attn_scalar": 16},
    "gemma3": {"vision_config": _VISION | {"patch_size": 14}, "mm_tokens_per_image": 4},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "intermediate_size": 48,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 112,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
    },
    "gemma4_text": {
        "vocab_size_per_layer_input": 112,
        "hidden_size_per_layer_input": 8,
        "per_layer_config": {"1": {"head_dim": 16}},
    },
    "gemma4_unified_text": {"per_layer_config": {"1": {"head_dim": 16}}},
    "git": {"vision_config": _VISION | {"patch_size": 14}},
    "got_ocr2": {"vision_config": _VISION | {"image_size": 32, "patch_size": 16, "output_channels": 8, "mlp_dim": 16}},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "attention_layers": ...},
    "gptj": {"rotary_dim": 4},
    "granite": _MULTIPLIERS,
    "granite_swa": _MULTIPLIERS,
    "granitemoe": _MULTIPLIERS,
    "granitemoe_swa": _MULTIPLIERS,
    "granitemoehybrid": _MULTIPLIERS | {"layer_types": ["mamba", "attention"]},
    "granitemoeshared": _MULTIPLIERS | {"shared_intermediate_size": 24},
    "hunyuan_v1_dense": {"head_dim": HEAD, "num_key_value_heads": 2},
    "hunyuan_v1_moe": {"head_dim": HEAD, "num_key_value_heads": 2, "num_experts": 4, "moe_topk": 2},
    "inkling_text": {
        "logits_mup_width_multiplier": 1.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": HEAD,
        "d_rel": 4,
        "rel_extent": 16,
    },
    "jetmoe": {"kv_channels": HEAD},
    "kimi_linear": {
        "linear_head_dim": HEAD,
        "linear_num_heads": HEADS,
        "num_experts_per_token": 2,
        "num_expert_group": 2,
    },
    "lfm2": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "full_attn_idxs": ...,
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "llama4": {
        "vision_config": _VISION
        | {"patch_size": 14, "vision_output_dim": HIDDEN, "projector_input_dim": 16, "projector_output_dim": 16}
    },
    "llama4_text": {
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 1, 1, 0],
        "layer_types": ["chunked_attention", "chunked_attention", "chunked_attention", "full_attention"],
        "moe_layers": [1, 3],
        "attention_chunk_size": 5,
        "floor_scale": 4,
        "intermediate_size_mlp": 48,
        "num_experts_per_tok": 1,
    },
    "longcat_flash": {
        "num_layers": 1,
        "num_hidden_layers": ...,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 24,
        "zero_expert_num": 2,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2},
    "minicpm3": {"dim_model_base": 16},
    "minimax_m3_vl_text": {
        "dense_intermediate_size": 48,
        "index_block_size": 4,
        "index_topk_blocks": 2,
        "rotary_dim": 4,
    },
    "ministral": {"head_dim": HEAD, "num_key_value_heads": 2},
    "modernbert-decoder": {"local_attention": 8},
    "nemotron": {"head_dim": HEAD, "num_key_value_heads": 2},
    "nemotron_h": _MAMBA | {"moe_shared_expert_intermediate_size": 24},
    "phi4_multimodal": {
        "vision_config": _VISION | {"patch_size": 14, "crop_size": 28},
        "audio_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_blocks": 1,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 16,
            "depthwise_separable_out_channel": 16,
            "nemo_conv_channels": 8,
        },
    },
    "qwen2": _TWO_KINDS,
    "qwen2_moe": _TWO_KINDS,
    "qwen3": _TWO_KINDS,
    "qwen3_5": {"vision_config": _TOWER},
    "qwen3_5_moe": {"vision_config": _TOWER},
    "qwen4_exp": {"vision_config": _TOWER},
    "qwen4_exp_text": {
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "ple_layer_ids": [1],
        "ple_embed_dim": 16,
        "ngram_vocab_size_base": 50,
        "heads_per_ngram": 2,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 2,
        "hc_lowrank": 8,
        "hc_count": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "axial_pos_embds": False,
        "attn_layers": ["local", "lsh"],
        "num_hidden_layers": ...,
        "attention_head_size": HEAD,
        "feed_forward_size": 48,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "hash_seed": 0,
    },
    "rembert": {"input_embedding_size": 16, "output_embedding_size": 24},
    "roc_bert": {
        "shape_vocab_size": 16,
        "pronunciation_vocab_size": 16,
        "shape_embed_dim": 8,
        "pronunciation_embed_dim": 8,
    },
    "smollm3": {"layer_types": ["full_attention", "full_attention"], "no_rope_layers": [1, 0]},
    "starcoder2": {"sliding_window": 5},
    "vaultgemma": _SOFT_CAPS,
    "xlm": {"emb_dim": HIDDEN, "causal": True, "pad_index": 0},
    "xlnet": {"d_inner": 48, "d_head": HEAD},
    "xmod": {"default_language": "en_XX"},
    # transformers zeroes the padding token's row again when it loads.
    "youtu": {"pad_token_id": None},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "hybrid_layer_ids": [1, 3],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_headdim": 8,
        "mamba_ngroups": 2,
        "n_mamba_heads": 8,
        "mamba_d_state": 8,
    },
    "zaya": {
        "num_experts_per_tok": 1,
        "layer_types": ["hybrid", "hybrid_sliding"],
        "sliding_window": 5,
        "router_hidden_size": 16,
    },
}
"""Fields of single families, beside ``SIZES``; ``...`` leaves a field to the family's own rule."""

_DRAFTER = "it drafts for another model, whose hidden states it reads"
_UNMAPPED = "its causal language model alone is of a type that is not in transformers' mapping"
_MUSIC = "it is a composite of a text encoder, an audio encoder and a decoder of audio codes"

REASONS: dict[str, str] = {
    "emu3": _UNMAPPED,
    "mllama": _UNMAPPED,
    "dbrx": "its attention reads a rope_theta that its configuration refuses",
    "gemma3n": "its vision tower needs the package timm",
    "gemma4_assistant": _DRAFTER,
    "gemma4_unified_assistant": _DRAFTER,
    "musicgen": _MUSIC,
    "musicgen_melody": _MUSIC,
}
