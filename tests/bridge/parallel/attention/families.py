"""Tiny models whose attention has windows, soft caps, sinks or unlike widths, with weights so large that each shows."""

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from rl_bridge.data.token_batch import shared_prefixes
from rl_bridge.parallel.documents import Documents
from tests.support.attending_models import SIZES, grouped_batch

WINDOW = 5
BOTH = {"layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    "gpt_oss": EXPERTS | BOTH | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "gemma2": {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8, **BOTH},
    "vaultgemma": {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8, **BOTH},
    "gemma3_text": {"query_pre_attn_scalar": 8, **BOTH},
    "mistral": {},
    "phimoe": EXPERTS,
    "granite_swa": BOTH,
    "granitemoe_swa": EXPERTS | BOTH | {"shared_intermediate_size": 24},
    "mimo_v2_flash": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, **BOTH}
    | {"v_head_dim": 4, "n_group": 1, "topk_group": 1},
    "cohere2": BOTH,
    "olmo3": BOTH,
    "exaone4": {"sliding_window_pattern": None, **BOTH},
}
LENGTHS, GROUPS = [17, 9, 1, 12, 3, 8], [1, 1, 2, 1, 3, 3]
"""Documents shorter and longer than the window, and prefixes longer and shorter than it."""


def tiny(family, attention="rl_fn"):
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    sizes = SIZES | {"head_dim": 8, "sliding_window": WINDOW} | special | FAMILIES.get(family, {})
    config = CONFIG_MAPPING[family](**sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "sink" in name:
                    parameter.normal_()
                elif parameter.ndim > 1:
                    parameter.normal_().mul_(1.5 * parameter.shape[-1] ** -0.5)
    model.set_attn_implementation(attention)
    return model.eval()


def outputs(model, way, mesh=None):
    """Logits of the batch, 0 in its padding, and the gradients of a loss of all of them.

    The ways: each document "alone", rows "padded", documents "packed", their prefixes "shared".
    """
    ids, mask = grouped_batch(LENGTHS, GROUPS)
    lengths, groups = mask.sum(1), torch.tensor(GROUPS)
    if way == "alone":
        logits = torch.zeros((*ids.shape, model.config.vocab_size))
        for row, length in enumerate(lengths):
            logits[row, :length] = model(ids[row : row + 1, :length], use_cache=False).logits[0]
    elif way == "padded":
        logits = model(ids, use_cache=False).logits.masked_fill(~mask[..., None], 0.0)
    else:
        shared = {"groups": groups, "shared": shared_prefixes(ids, lengths, groups)} if way == "shared" else {}
        documents = Documents(lengths, mesh, **shared)
        logits = documents.put(model(documents.take(ids), **documents.forward_kwargs).logits, ids.shape)
    logits.square().mean().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
