"""Layers that a configuration says more of than a few short rows can show: states, columns, and chunks of attention."""

from typing import Any

import torch
from transformers import PreTrainedModel

from rl_bridge.weights.manifest import without_peft


def has_states(model: torch.nn.Module) -> bool:
    """Whether layers keep states of the tokens before, as linear attention and short convolutions do, by the config.

    >>> has_states(torch.nn.Linear(2, 2))
    False
    """
    inner = without_peft(model)
    if not isinstance(inner, PreTrainedModel):
        return False
    config = inner.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    attends = all("attention" in kind and "linear" not in kind for kind in kinds)
    return bool(getattr(inner, "_is_stateful", False)) or not attends


def counts_columns(model: torch.nn.Module) -> bool:
    """Whether layers take a token's place in its row for its position, whatever ``position_ids`` say, by the config.

    Llama 4 and Inkling sharpen attention by the logarithm of that place in layers without rotary positions. Below
    ``floor_scale`` tokens nothing of it shows.

    >>> counts_columns(torch.nn.Linear(2, 2))
    False
    """
    config = _config(model)
    tuned = getattr(config, "attn_temperature_tuning", None) and not all(getattr(config, "no_rope_layers", None) or [1])
    return bool(tuned) or getattr(config, "log_scaling_n_floor", None) is not None


def cut_by_chunks(model: torch.nn.Module) -> int | None:
    """The chunk beyond which a layer's attention begins anew, if rows of the model may be longer; None: they may not.

    >>> cut_by_chunks(torch.nn.Linear(2, 2))
    """
    config = _config(model)
    size = getattr(config, "attention_chunk_size", None)
    if size is None or "chunked_attention" not in (getattr(config, "layer_types", None) or ()):
        return None
    positions = getattr(config, "max_position_embeddings", None)
    return size if positions is None or positions > size else None


def unpackable(model: torch.nn.Module) -> str | None:
    """Why no documents may lie one behind another in a row of the model, by its configuration; None: it says nothing.

    >>> unpackable(torch.nn.Linear(2, 2))
    """
    if counts_columns(model):
        return "layers without rotary positions scale attention by a token's place in the row, not by position_ids"
    if (size := cut_by_chunks(model)) is not None:
        return f"attention by a plan has no chunks, and rows may be longer than attention_chunk_size={size}"
    return None


def _config(model: torch.nn.Module) -> Any:
    inner = without_peft(model)
    return inner.config.get_text_config(decoder=True) if isinstance(inner, PreTrainedModel) else None
