"""A tiny random model of every causal family that transformers knows, with weights so large that a fault shows.

``FAMILIES`` are the model types of transformers' mapping. ``tiny`` makes one of them, ``folder`` writes it as
transformers does, and ``reason`` says of the others why there is no causal language model of text in them, or none so
small.
"""

import copy
import functools
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from tests.bridge.families.shapes import OVERRIDES, REASONS, SIZES

FAMILIES: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""Model types, in the order of transformers' mapping."""

VOCABULARY = 112
PAD, BOS, EOS = 0, 1, 2

MATRIX = 1.5
"""A matrix is drawn with this deviation over the root of its fan-in."""


def reason(model_type: str) -> str | None:
    """Why there is no tiny causal language model of this type; None where there is one."""
    return REASONS.get(model_type)


def tiny(model_type: str, seed: int = 0, **fields: Any) -> PreTrainedModel:
    """The model in float32, in evaluation mode, with eager attention: the same in every process.

    ``fields`` of the configuration take the place of the small ones.

    Raises:
        ValueError: for a type of which ``reason`` says why there is none.
    """
    if reason(model_type) is not None:
        raise ValueError(f"no tiny {model_type!r}: {reason(model_type)}")
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        changed = config(model_type)
        for name, value in fields.items():
            setattr(changed, name, value)
        model = AutoModelForCausalLM.from_config(changed, **options)
        draw(model, torch.Generator().manual_seed(seed))
    return model.eval()


def folder(model_type: str, path: str | Path, seed: int = 0) -> Path:
    """The folder that transformers' own ``save_pretrained`` writes of the tiny model.

    Of a type whose language model has a type of its own the folder holds the whole, pictures' tower included, as the
    hub's folders do.
    """
    model = tiny(model_type, seed)
    if model.config.model_type != model_type and "text_config" in config(model_type).to_dict():
        model = _around(model, config(model_type), seed)
    model.save_pretrained(path)
    return Path(path)


@torch.no_grad()
def _around(model: PreTrainedModel, whole: PretrainedConfig, seed: int) -> PreTrainedModel:
    """The model of pictures and text with this language model in it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        around = AutoModelForImageTextToText.from_config(whole, dtype=torch.float32)
    state = around.state_dict()
    for name, value in model.state_dict().items():
        places = (f"language_model.{name}", name.replace("model.", "model.language_model.", 1), name)
        state[next(place for place in places if place in state)].copy_(value)
    return around.eval()


def config(model_type: str) -> PretrainedConfig:
    """The family's own configuration, with small sizes; each kind of layer that it lists is there at least once."""
    return copy.deepcopy(_config(model_type))


@functools.cache
def _config(model_type: str) -> PretrainedConfig:
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # The defaults' ids of special tokens are beyond the small vocabulary.
    try:
        return _shrunk(model_type)
    finally:
        transformers_logging.set_verbosity(verbosity)


def _shrunk(model_type: str) -> PretrainedConfig:
    overrides = OVERRIDES.get(model_type, {})
    kind: Any = CONFIG_MAPPING[model_type]
    default = kind()
    fields = default.to_dict()
    values: dict[str, Any] = {name: size for name, size in SIZES.items() if fields.get(name) is not None}
    values |= {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    values |= _layers(fields)
    if "is_decoder" in fields:
        values["is_decoder"] = True
    if default.is_encoder_decoder:
        values["is_encoder_decoder"] = False
    if "kv_lora_rank" in fields:
        values["num_key_value_heads"] = values["num_attention_heads"]  # Latent attention has keys for every head.
    text = fields.get("text_config")
    if isinstance(text, dict) and text["model_type"] in FAMILIES:
        values = {"text_config": _config(text["model_type"]).to_dict()}
    return kind(**{name: value for name, value in (values | overrides).items() if value is not ...})


def _layers(fields: dict[str, Any]) -> dict[str, Any]:
    """The number of layers and what a configuration lists layer by layer, for the first layer of each kind."""
    names = [
        name for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers") if name in fields
    ]
    if not names:
        return {}
    layers = fields[names[0]]
    listed = {name: value for name, value in fields.items() if isinstance(value, list) and len(value) == layers > 3}
    kinds: dict[Any, int] = {}
    for layer in range(layers):
        kinds.setdefault(tuple(str(value[layer]) for value in listed.values()), layer)
    kept = sorted(kinds.values())[:4] if listed else [0, 1]
    if len(kept) < 2:
        kept = [*kept, *(layer for layer in range(2) if layer not in kept)][:2]
    return {name: len(kept) for name in names} | {
        name: [value[layer] for layer in kept] for name, value in listed.items()
    }


def draw(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Give the parameters large random values, so that a wrong mask, a lost bias or a lost sink changes the logits."""

    def noise(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator)

    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point():
                continue
            kept = any(word in name for word in ("A_log", "time_mix", "time_decay", "time_first", "dt_bias"))
            if kept:
                parameter.add_(0.1 * noise(parameter))
            elif "sink" in name or id(parameter) in embeddings:
                parameter.copy_(noise(parameter))
            elif parameter.ndim < 2:
                parameter.add_(0.25 * noise(parameter))
            else:
                parameter.copy_(noise(parameter) * MATRIX * parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if "bias" in name.rsplit(".", 1)[-1] and buffer.is_floating_point() and buffer.ndim == 1:
                buffer.add_(0.1 * noise(buffer))
