"""Layers of a model, and activations kept for a layer's backward pass: all, a part, its inputs alone."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from rl_bridge.parallel.offloading import ActivationOffload

# The modules of a model that are sharded, gathered and recomputed one at a time: its layers.


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers, in order: of a transformers model by its own declaration, else what direct ModuleLists hold.

    >>> layers_of(nn.Linear(2, 2))
    []
    """
    declared: set[str] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            declared |= set(module._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in declared]
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            layers += [layer for layer in child if layer not in layers]
    return layers


Activations = Literal["keep", "selective", "every_other", "full", "offload", "offload_inputs"]
"""keep: every layer keeps what its backward pass reads. selective: results of matrix products and attention alone, the
rest is computed again. every_other: every second layer keeps its inputs alone, and is computed again. full: every layer
does. offload: nothing is computed again, and what is kept waits in host memory. offload_inputs: as full, and the
inputs wait in host memory."""

_PRODUCTS = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::linear",
    "mkldnn::_linear_pointwise",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_flash_attention_forward",
    "torch_attn::_varlen_attn",
)
"""Operations with the most arithmetic a byte."""


def keep_activations(model: nn.Module, activations: Activations) -> None:
    """Have every layer of the model keep what ``activations`` says. Numbers are the same, or equal to rounding.

    transformers' own switch works only in training mode, which a policy without dropout never is in; a wrapper module
    would rename the parameters.

    Raises:
        ValueError: a model without layers, for which there is nothing to gain.
    """
    if activations == "keep":
        return
    layers = layers_of(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no layers to checkpoint")
    offload = ActivationOffload()
    for number, layer in enumerate(layers):
        forward = layer.forward
        if activations in ("full", "offload_inputs") or (activations == "every_other" and number % 2 == 0):
            forward = partial(_again, forward, {})
        if activations == "selective":
            forward = partial(_again, forward, {"context_fn": _products_kept})
        if activations in ("offload", "offload_inputs"):
            forward = partial(offload.run, layer, forward)
        layer.forward = forward


def _again(forward: Callable[..., Any], options: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """The layer's forward pass, which runs once more in the backward pass."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)


def _products_kept() -> Any:
    return create_selective_checkpoint_contexts(_is_kept)


def _is_kept(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    product = operation._schema.name in _PRODUCTS
    return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE
