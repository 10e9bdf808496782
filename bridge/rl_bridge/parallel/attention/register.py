"""Attention "rl_fn" of transformers: SDPA as transformers computes it, and blocks by a plan where a call passes one.

    use_rl_fn_attention(model)
    model(input_ids, **documents.forward_kwargs)

The plan reaches the attention of every layer as a keyword argument of the model's call, so that no model is patched.
"""

import functools
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rl_bridge.parallel.attention.ring import AttentionPlan

NAME = "rl_fn"
# What changes scores or probabilities otherwise than a plan says.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "cache")


def attention(
    module: torch.nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention_mask: Any,
    *,
    attention_plan: AttentionPlan | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer: q [N, H, T, D], k and v [N, H / G, T, D] to [N, T, H, D].

    Raises:
        ValueError: with a plan, for what a plan cannot hold: a mask, a window shorter than a document, dropout, a
            cache, or tensors that are not the plan's tokens.
    """
    if attention_plan is None:
        if isinstance(attention_mask, functools.partial):
            attention_mask = attention_mask()
        return sdpa_attention_forward(module, q, k, v, attention_mask, **options)
    _check_supported(module, q, k, attention_mask, attention_plan, options)
    if torch.is_autocast_enabled(q.device.type):
        # SDPA is among the operations that autocast lowers.
        low = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(low), k.to(low), v.to(low)
    scale = options.get("scaling")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    return attention_plan.attend(q, k, v, scale)[None], None


def _check_supported(
    module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, mask: Any, plan: AttentionPlan, options: dict[str, Any]
) -> None:
    tokens = plan.rank_plan.tokens
    if q.shape[0] != 1 or q.shape[2] != tokens or k.shape[2] != tokens:
        raise ValueError(
            f"the plan is for one row of {tokens} tokens without a cache, got q {tuple(q.shape)} and k {tuple(k.shape)}"
        )
    if isinstance(mask, functools.partial):
        # Transformers' guess at documents, from position_ids: the plan knows better.
        mask = mask.keywords.get("attention_mask")
    if mask is not None:
        raise ValueError("pass attention_mask=None with an attention plan: documents and padding are in the plan")
    if options.get("dropout"):
        raise ValueError(f"attention by a plan has no dropout, got {options['dropout']}: set attention_dropout=0")
    window = options.get("sliding_window")
    if window is not None and window < plan.longest:
        raise ValueError(f"attention by a plan has no sliding window: {window} < a document of {plan.longest} tokens")
    causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise ValueError("attention by a plan is causal, and this layer's is not")
    for name in _UNSUPPORTED:
        if options.get(name) is not None:
            raise ValueError(f"attention by a plan has no {name}")


def mask(**options: Any) -> Any:
    """The mask that transformers passes to every layer: SDPA's, made only by the layers that need one.

    Transformers guesses documents from position_ids and would make their [T, T] mask before any layer could say that a
    plan holds the documents apart.
    """
    if options.get("attention_mask") is None and not options.get("allow_is_causal_skip", True):
        return functools.partial(sdpa_mask, **options)
    return sdpa_mask(**options)


def use_rl_fn_attention(model: PreTrainedModel) -> None:
    """Switch a model to this attention. Without a plan the model computes what it does with "sdpa"."""
    model.set_attn_implementation(NAME)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
