"""One number for each token, from hidden states and a linear head, wherever parallelism has put these."""

import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import PreTrainedModel

from rl_bridge.parallel.fsdp import reshard_without_backward
from rl_bridge.parallel.layers import without_peft

_METHOD = "_token_values_of_ids"


def token_values(model: PreTrainedModel, ids: Tensor, **forward_kwargs: Any) -> Tensor:
    """The head's number after each token, [B, T] float32. All ranks of a mesh call the function.

    Args:
        model: a ``*ForSequenceClassification`` with one label, plain or peft's, parallel or not, under autocast or not.
        ids: [B, T].
        **forward_kwargs: of the model: attention_mask, position_ids, …
    """
    gathering = getattr(model, _METHOD, None)
    if gathering is None:
        return of_ids(model, ids, forward_kwargs)
    values = gathering(ids, forward_kwargs)
    reshard_without_backward(model)
    return values


def scored_places(model: PreTrainedModel, ids: Tensor, lengths: Tensor) -> Tensor:
    """Where the classifiers of transformers read a row's score: at its last token that is not the model's padding.

    Args:
        model: whose configuration names the pad token. Without one it is the last token.
        ids: [B, T], rows with padding of any kind on the right.
        lengths: [B] tokens of each row.

    Returns:
        [B]; 0 of a row of padding alone.
    """
    places = torch.arange(ids.shape[1], device=ids.device)
    counted = places < lengths[:, None]
    pad = model.config.get_text_config().pad_token_id
    if pad is not None:
        counted = counted & (ids != pad)
    return (places * counted).amax(1)


def of_ids(model: PreTrainedModel, ids: Tensor, forward_kwargs: dict[str, Any]) -> Tensor:
    """What ``token_values`` does once the weights are gathered."""
    inner: Any = without_peft(model)
    hidden = inner.base_model(input_ids=ids, **{"use_cache": False, **forward_kwargs}).last_hidden_state
    # In float32 whatever the model computes in: a return is a number that bfloat16 rounds to three digits.
    with torch.autocast(hidden.device.type, enabled=False):
        values = _applied(inner.score, hidden.float())[..., 0]
    # FSDP2 hangs its hook on what leaves here, and warns of views.
    return values.clone()


def gather_head_for_values(model: PreTrainedModel) -> None:
    """Have FSDP gather the root's weights for ``token_values`` as it does for ``forward``."""
    object.__setattr__(model, _METHOD, types.MethodType(of_ids, model))
    register_fsdp_forward_method(model, _METHOD)


def _applied(head: Any, hidden: Tensor) -> Tensor:
    """The head's numbers, [B, T, 1], in float32 where its weights were gathered in another precision, too."""
    if isinstance(head, nn.Linear):
        return nn.functional.linear(hidden, head.weight.float())
    return head(hidden.to(head.weight.dtype)).float()  # a layer of peft around it
