"""Families whose tensor-parallel plan is right here, and what is added to the plans of transformers."""

from transformers import PretrainedConfig

# Model types for which the plan gives what one process gives; a test walks over all that have a plan.
# fmt: off
FAMILIES = frozenset((
    "apertus", "arcee", "aria_text", "axk1", "axk2", "cohere", "cohere2", "cohere2_moe", "cohere_compass_text",
    "cwm", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4",
    "exaone_moe", "flex_olmo", "gemma", "gemma2", "gemma3_text", "gemma4_text", "gemma4_unified_text", "glm",
    "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_neox", "gpt_oss", "granite", "granite_swa",
    "granitemoe_swa", "helium", "hrm_text", "hy_v3", "hy_v4", "hyperclovax", "jais2", "kimi_linear", "laguna",
    "llama", "mellum", "mimo_v2_flash", "minicpm3", "minimax", "minimax_m2", "minimax_m3_vl_text", "ministral",
    "ministral3", "mistral", "mixtral", "nanochat", "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "phi", "phi3",
    "qwen2", "qwen2_moe", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss",
    "smollm3", "solar_open", "starcoder2", "vaultgemma", "youtu",
))
# fmt: on

# The parts of a module with cut matrices that compute before the cut: their activations and gradients are whole.
WHOLE = frozenset({"q_a_proj", "q_a_layernorm", "kv_a_layernorm", "indexer"})

_OWN_HEADS = "replicated_with_grad_allreduce"
_ADDED = {
    # The activation has parameters, and works on a cut activation.
    "apertus": {"layers.*.mlp.act_fn": _OWN_HEADS},
    # Norms of heads that a configuration may ask for: of cohere a row for each head, of the others one for all.
    "cohere": {"layers.*.self_attn.q_norm.weight": "colwise", "layers.*.self_attn.k_norm.weight": "colwise"},
    "glm4_moe": {"layers.*.self_attn.q_norm": _OWN_HEADS, "layers.*.self_attn.k_norm": _OWN_HEADS},
    "phi": {"layers.*.self_attn.q_layernorm": _OWN_HEADS, "layers.*.self_attn.k_layernorm": _OWN_HEADS},
    # Mixtures of which transformers cuts the attention alone.
    "cohere2_moe": {"layers.*.mlp.experts": "moe_tp_experts"},
    "exaone_moe": {"layers.*.mlp.experts": "moe_tp_experts"},
    "minimax_m3_vl_text": {"layers.*.mlp.experts": "moe_tp_experts"},
    "qwen2_moe": {"layers.*.mlp.experts": "moe_tp_experts"},
    # Of this family transformers has a plan for experts only, whose exchange is another.
    "gpt_oss": {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.sinks": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.experts": "moe_tp_experts",
    },
}
for _family, _experts in (("qwen2_moe", "shared_expert"), ("exaone_moe", "shared_experts")):
    for _matrix, _style in (("gate_proj", "colwise"), ("up_proj", "colwise"), ("down_proj", "rowwise")):
        _ADDED[_family][f"layers.*.mlp.{_experts}.{_matrix}"] = _style


def plan_of(config: PretrainedConfig) -> dict[str, str]:
    """The styles of a model without its head, by names of modules and parameters with "*" for a layer's number."""
    return {**(config.base_model_tp_plan or {}), **_ADDED.get(config.model_type, {})}
