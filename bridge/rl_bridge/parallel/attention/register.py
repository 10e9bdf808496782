"""Attention "rl_fn" of transformers: SDPA as transformers computes it, and blocks by a plan where a call passes one.

Transformers guesses documents from position_ids and would make their [T, T] mask before any layer could say that a plan
holds the documents apart.

use_rl_fn_attention(model)
    model(input_ids, **documents.forward_kwargs)

The plan reaches the attention of every layer as a keyword argument of the model's call, so that no model is patched.
What SDPA would drop without a word is computed, with a plan and without one, or refused by name.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from rl_bridge.parallel.attention import blocks
from rl_bridge.parallel.attention.ring import AttentionPlan

# A layer's mask as transformers describes it: made when an operation reads it, else only asked what it says.

Function = Callable[..., Any]
OPS: Any = torch.ops.aten
PAD = "pad the rows: packing=False and share_prefixes=False (--no-packing --no-share-prefixes), one rank a sequence"
"""The way on where a plan cannot say what a layer's mask says."""


class LayerMask(torch.Tensor):
    """The mask of eager attention, [N, 1, Tq, Tk], which is added to scores. Any operation on it makes it.

    Models that compute with their mask compute what they do in eager attention: a mask for SDPA is boolean, and None
    where SDPA needs none.
    """

    options: dict[str, Any]
    # Operations go straight to where they are dispatched.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, **options: Any) -> "LayerMask":
        """``options``: what transformers calls a function that makes masks with."""
        queries = options["q_length"] if "q_length" in options else len(options["cache_position"])
        shape = (options["batch_size"], 1, int(queries), int(options["kv_length"]))
        kind = {"dtype": options.get("dtype", torch.float32), "device": torch.device(options.get("device", "cpu"))}
        mask = torch.Tensor._make_wrapper_subclass(cls, shape, **kind)  # type: ignore[attr-defined]
        mask.options = options
        return mask

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        """Compute with masks that are made. A copy of another dtype, as FSDP makes it, or none, is not."""
        options = options or {}
        if function in (OPS.detach.default, OPS._to_copy.default) and set(options) <= {"dtype"}:
            return LayerMask(**arguments[0].options | options)
        arguments, options = tree_map_only(LayerMask, lambda mask: mask.made(), (arguments, options))
        return function(*arguments, **options)

    def __repr__(self, **_: Any) -> str:
        """The mask's size and rules, without its values."""
        return f"LayerMask({tuple(self.shape)}, {', '.join(self.says())})"

    @functools.cached_property
    def for_sdpa(self) -> torch.Tensor | None:
        """The mask as SDPA takes it: boolean, or None where it is causal or all is seen."""
        return _mask_by(sdpa_mask, self.options)

    def made(self) -> torch.Tensor:
        """The mask's values."""
        return _mask_by(eager_mask, self.options | {"allow_is_bidirectional_skip": False})

    @functools.cached_property
    def causal(self) -> bool:
        """Whether no query sees a later key."""
        return "causal_mask_function" in self.says()

    def says(self) -> list[str]:
        """The names of the rules that a key that is seen keeps, all of them."""
        return [_name(function) for function in _conjuncts(self.options["mask_function"])]

    def window(self, longest: int) -> int | None:
        """The sliding window of a causal mask: what it says of documents of at most ``longest`` tokens.

        That neighbours in different documents do not see each other is not asked.

        Raises:
            ValueError: for padding, or for any other rule.
        """
        if self.options.get("attention_mask") is not None:
            raise ValueError("pass attention_mask=None with an attention plan: documents and padding are in the plan")
        window = None
        for function in _conjuncts(self.options["mask_function"]):
            name = _name(function)
            if name == "sliding_window_overlay":
                window = int(inspect.getclosurevars(function).nonlocals["sliding_window"])
            elif name == "chunked_overlay" and longest <= inspect.getclosurevars(function).nonlocals["chunk_size"]:
                continue
            elif name not in ("causal_mask_function", "packed_sequence_mask_function"):
                raise ValueError(f"attention by a plan has no {name}, and a document has {longest} tokens: {PAD}")
        if not self.causal:
            raise ValueError(f"attention by a plan is causal, and this layer's is {', '.join(self.says())}: {PAD}")
        return window


def _mask_by(make: Callable[..., Any], options: dict[str, Any]) -> Any:
    """A mask of transformers. Where ``q_offset`` is a tensor [N], each row's one query has a position of its own."""
    offset = options.get("q_offset")
    if not isinstance(offset, torch.Tensor) or offset.dim() == 0:
        return make(**options)
    rows = len(offset)
    # The rows' queries as those of one row: what a query sees is a matter of its position and the keys'.
    single_row = {"batch_size": 1, "q_length": rows, "q_offset": offset - torch.arange(rows, device=offset.device)}
    return make(**options | single_row | {"allow_is_causal_skip": False}).transpose(0, 2)


def _conjuncts(function: Function) -> Iterator[Function]:
    """The rules that a mask function of transformers joins by "and"."""
    if _name(function) != "and_masks":
        yield function
        return
    for part in inspect.getclosurevars(function).nonlocals["mask_functions"]:
        yield from _conjuncts(part)


def _name(function: Function) -> str:
    """The name of the function of transformers that made this one, or its own."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return name.split(".<locals>")[0]


NAME = "rl_fn"

_SDPA = frozenset(inspect.signature(sdpa_attention_forward).parameters) - {"cache", "kwargs"}
"""Arguments that SDPA computes with."""
_COMPUTED = frozenset({"softcap", "s_aux", "sliding_window"})
"""Arguments that are computed here. Without a plan a sliding window is in the mask."""
_HARMLESS = frozenset(
    {
        # Results, not what is computed.
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "use_cache"),
        *("logits_to_keep", "num_items_in_batch", "past_key_values", "cache_position"),
        # The model has rotated its queries and keys by then.
        *("position_ids", "position_embeddings"),
    }
)
_KNOWN = _SDPA | _COMPUTED | _HARMLESS
_PACKED = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "cu_seqlens", "seq_idx"})
"""Where documents begin: what a plan knows, and SDPA does not."""


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
    """Attention of one layer: q [N, H, T, D], k [N, H / G, T, D] and v [N, H / G, T, Dv] to [N, T, H, Dv].

    Raises:
        ValueError: for an argument of the layer's call that would change results and is not computed here; with a plan,
            for what a plan cannot hold: a mask, dropout, a cache, or tensors that are not the plan's tokens.
    """
    _check_arguments(module, options, attention_plan)
    if attention_plan is not None:
        return _by_plan(module, q, k, v, mask=attention_mask, plan=attention_plan, options=options), None
    mask = attention_mask
    if isinstance(attention_mask, LayerMask):
        # The mask says whether attention is causal, as it does in eager attention, and not the layer.
        mask, options["is_causal"] = attention_mask.for_sdpa, attention_mask.causal
    if options.get("softcap") is None and options.get("s_aux") is None:
        return sdpa_attention_forward(module, q, k, v, mask, **options)
    return _without_sdpa(module, q, k, v, mask=mask, options=options), None


def _by_plan(
    module: torch.nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Any,
    plan: AttentionPlan,
    options: dict[str, Any],
) -> torch.Tensor:
    tokens = plan.rank_plan.tokens
    if q.shape[0] != 1 or q.shape[2] != tokens or k.shape[2] != tokens:
        raise ValueError(
            f"the plan is for one row of {tokens} tokens without a cache, got q {tuple(q.shape)} and k {tuple(k.shape)}"
        )
    window = options.get("sliding_window")
    if isinstance(mask, LayerMask):
        # What the mask says counts, as it does in eager attention.
        window = mask.window(plan.longest)
    elif mask is not None:
        raise ValueError(
            f"pass attention_mask=None with an attention plan: documents and padding are in the plan, and a mask of"
            f" {type(module).__name__}'s own is not. To train such a model, {PAD}"
        )
    if options.get("dropout"):
        raise ValueError(f"attention by a plan has no dropout, got {options['dropout']}: set attention_dropout=0")
    if not _causal(module, options):
        raise ValueError(f"attention by a plan is causal, and this layer's is not: {PAD}")
    if options.get("position_bias") is not None:
        raise ValueError(f"attention by a plan has no position_bias, which {type(module).__name__} has: {PAD}")
    plan.layers.add(id(module))
    q, k, v = (x[0].transpose(0, 1) for x in _lowered(q, k, v))
    score = {"window": window, "softcap": options.get("softcap"), "sinks": _sinks(module, q, options)}
    return plan.attend(q, k, v, _scale(q, options), **score)[None]


def _without_sdpa(
    module: torch.nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    name, causal = type(module).__name__, mask is None and q.shape[2] > 1 and _causal(module, options)
    if options.get("dropout"):
        raise ValueError(f"{name}: attention with sinks or a soft cap has no dropout: set attention_dropout=0")
    if options.get("position_bias") is not None or (mask is not None and mask.requires_grad):
        raise ValueError(f"{name}: attention with sinks or a soft cap has no position_bias and no mask that is learned")
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(f"{name}: {q.shape[2]} queries after a cache, {k.shape[2]} keys in all, need a mask")
    q, k, v = _lowered(q, k, v)
    score = {"softcap": options.get("softcap"), "sinks": _sinks(module, q.transpose(1, 2), options)}
    out = blocks.plain_attention(q, k, v, mask, causal=causal, scale=_scale(q, options), **score)
    return out.transpose(1, 2)


def _check_arguments(module: torch.nn.Module, options: dict[str, Any], plan: AttentionPlan | None) -> None:
    for name, value in options.items():
        if name in _KNOWN or value is None or (name in _PACKED and plan is not None):
            continue
        if name in _PACKED:
            raise ValueError(
                f"{type(module).__name__} got {name}: this attention keeps documents apart by position_ids that begin"
                " again, or by an attention plan (Documents)"
            )
        raise ValueError(
            f'{type(module).__name__} passes {name} to its attention, which "{NAME}" would drop without a word:'
            ' its results would be wrong. model.set_attn_implementation("eager") computes it'
        )


def _causal(module: torch.nn.Module, options: dict[str, Any]) -> bool:
    causal = options.get("is_causal")
    return bool(getattr(module, "is_causal", True) if causal is None else causal)


def _scale(q: torch.Tensor, options: dict[str, Any]) -> float:
    scale = options.get("scaling")
    return q.shape[-1] ** -0.5 if scale is None else scale


def _sinks(module: torch.nn.Module, q: torch.Tensor, options: dict[str, Any]) -> torch.Tensor | None:
    """One of each head of q [*, H, D]."""
    sinks = options.get("s_aux")
    if sinks is not None and sinks.shape != q.shape[-2:-1]:
        raise ValueError(f"{type(module).__name__} has sinks {tuple(sinks.shape)} for {q.shape[-2]} heads of attention")
    return sinks


def _lowered(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """SDPA is among the operations that autocast lowers."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    low = torch.get_autocast_dtype(kind)
    return tuple(x.to(low) for x in tensors)


def mask(**options: Any) -> LayerMask:
    """The mask that transformers passes to every layer: SDPA's, made only by the layers that need one."""
    return LayerMask(**options)


def use_rl_fn_attention(model: PreTrainedModel) -> None:
    """Switch a model to this attention. Without a plan the model computes what it does with "sdpa"."""
    model.set_attn_implementation(NAME)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
