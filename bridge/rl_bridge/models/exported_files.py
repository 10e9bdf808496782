"""Files of an exported model: names that transformers 5 and 4 read, settings of generation as they were, dtypes."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig

from rl_bridge.models.lora import LoRASource
from rl_bridge.models.model_folder import CONFIG
from rl_bridge.models.model_source import FreezingSource, ModelSource, PretrainedSource, ValueSource
from rl_bridge.models.own_model import OwnSource

# config.json: transformers 4 has other names for the rotary frequencies and the dtype, and does not miss them.

_LAYERS_OF_4 = {"gemma3_text": "rope_local_base_freq", "gemma3n_text": "rope_local_base_freq", "olmo3": None}
"""Families whose layers have frequencies of their own, and their name for the base of sliding windows."""
_BASE_OF_4 = {"gpt_neox": "rotary_emb_base", "gpt_neox_japanese": "rotary_emb_base"}
_PART_OF_4 = {"gpt_neox": "rotary_pct", "gpt_neox_japanese": "rotary_pct"}
_SCALING_OF_4 = {"phi3": ("short_factor", "long_factor")}
"""Families that refuse other fields of ``rope_scaling`` beside its type."""
_MAMBA = {"linear_attention": "mamba"}
_TYPES_OF_4 = {
    "granitemoehybrid": _MAMBA | {"full_attention": "attention"},
    "zamba": _MAMBA,
    "zamba2": _MAMBA,
}
"""Families that know the types of their layers by other words."""


def with_older_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """The content of config.json as transformers 5 writes it, with the fields that transformers 4 reads besides.

    These are ``torch_dtype``, and ``rope_theta``, ``rope_scaling`` and ``partial_rotary_factor`` (or a family's own
    names) beside ``rope_parameters``. Without them transformers 4 takes its defaults, and computes another model.

    >>> config = with_older_names({"dtype": "bfloat16", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})
    >>> config["torch_dtype"], config["rope_theta"], config["rope_scaling"]
    ('bfloat16', 1000000.0, None)
    """
    config = {name: _number(value) for name, value in config.items() if name != "auto_map"}  # code that is not there
    parts = {name: with_older_names(value) for name, value in config.items() if isinstance(value, Mapping)}
    older = {} if config.get("dtype") is None else {"torch_dtype": config["dtype"]}
    if (kind := config.get("model_type")) == "qwen3_moe" and "num_local_experts" in config:
        older["num_experts"] = config["num_local_experts"]
    for name in ("layer_types", "layers_block_type") if kind in _TYPES_OF_4 else ():
        if name in config:
            older[name] = [_TYPES_OF_4[str(kind)].get(layer, layer) for layer in config[name]]
    return {**config, **parts, **older, **_older_rotary_names(config)}


def _number(value: Any) -> Any:
    """The value with infinity as JSON of Python writes it, where transformers 5 writes {"__float__": "Infinity"}."""
    if isinstance(value, Mapping) and value.keys() == {"__float__"}:
        return float(value["__float__"])
    return [_number(one) for one in value] if isinstance(value, list) else value


def _older_rotary_names(config: Mapping[str, Any]) -> dict[str, Any]:
    kind, parameters = str(config.get("model_type")), config.get("rope_parameters") or {}
    names: dict[str, Any] = {}
    if any(isinstance(value, Mapping) for value in parameters.values()):
        if kind == "modernbert-decoder":
            bases = {"global_rope_theta": "full_attention", "local_rope_theta": "sliding_attention"}
            return {name: parameters[layer]["rope_theta"] for name, layer in bases.items() if parameters.get(layer)}
        if kind not in _LAYERS_OF_4:
            return {}  # of transformers 5 alone
        local = _LAYERS_OF_4[kind]
        if local is not None and parameters.get("sliding_attention"):
            names[local] = parameters["sliding_attention"]["rope_theta"]
        parameters = parameters.get("full_attention") or {}
    if "rope_theta" not in parameters:
        return names
    names[_BASE_OF_4.get(kind, "rope_theta")] = parameters["rope_theta"]
    if "partial_rotary_factor" in parameters:  # the whole, too: transformers 4 turns a part by default in some families
        names[_PART_OF_4.get(kind, "partial_rotary_factor")] = parameters["partial_rotary_factor"]
    scaling = {n: value for n, value in parameters.items() if n not in ("rope_theta", "partial_rotary_factor")}
    if kind in _SCALING_OF_4:
        scaling = {n: value for n, value in scaling.items() if n in ("rope_type", *_SCALING_OF_4[kind])}
    rope_type = scaling.pop("rope_type", "default")
    types = {"type" if kind in _SCALING_OF_4 else "rope_type": rope_type}
    return names | {"rope_scaling": {**scaling, **types} if scaling or rope_type != "default" else None}


def add_older_names(folder: Path) -> None:
    """Write the fields into the config.json of a folder that transformers 5 has written."""
    file = folder / CONFIG
    config = with_older_names(json.loads(file.read_text("utf-8")))
    file.write_text(json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")


def write_generation_config(generation: GenerationConfig, folder: Path) -> None:
    """Write the settings of generation as they were read.

    transformers reads settings that it refuses to write, as a temperature without ``do_sample``.
    """
    (folder / "generation_config.json").write_text(generation.to_json_string(), "utf-8")


# The dtypes of the weights: those of the folder that the model came from, where nobody says otherwise.

ExportDtype = Literal["input", "float32", "bfloat16", "float16"]
_TORCH = {"F64": torch.float32, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""safetensors' names of the types that a weight was stored in. A trained one has 32 bits at most."""


@dataclass(frozen=True)
class ExportTypes:
    """The dtype of each weight that is written.

    >>> ExportTypes(torch.bfloat16).cast("w", torch.ones(2)).dtype
    torch.bfloat16
    """

    dtype: torch.dtype = torch.float32
    exceptions: Mapping[str, torch.dtype] = field(default_factory=dict)
    """By the name in the model."""

    def cast(self, name: str, tensor: Tensor) -> Tensor:
        """The weight in its dtype; numbers that are no floats stay.

        Raises:
            ValueError: a number that float16 has not.
        """
        if not tensor.is_floating_point():
            return tensor
        cast = tensor.to(self.exceptions.get(name, self.dtype))
        if cast.dtype == torch.float16 and bool((cast.isinf() & tensor.isfinite()).any()):
            raise ValueError(f"weight {name!r} has numbers beyond float16's 65504: take --export-dtype float32")
        return cast


def written_source(source: ModelSource) -> ModelSource:
    """The source of the model that is written: a trained one without adapters, which are merged."""
    while isinstance(source, FreezingSource | LoRASource):
        source = source.source
    return source


def export_types(source: ModelSource, dtype: ExportDtype = "input") -> ExportTypes:
    """The dtypes to write a trained model in. "input": each weight as it was stored; of a new model float32.

    A head or another weight that was not stored has the dtype of most numbers.
    """
    if dtype != "input":
        return ExportTypes(getattr(torch, dtype))
    source = written_source(source)
    source = source.source if isinstance(source, ValueSource) else source
    if not isinstance(source, PretrainedSource) and not (isinstance(source, OwnSource) and source.weights is not None):
        return ExportTypes()
    stored = source.stored()
    types = {name: _TORCH[kind] for name, kind in stored.dtypes.items() if kind in _TORCH}
    sizes: Counter[torch.dtype] = Counter()
    for name, kind in types.items():
        sizes[kind] += prod(stored.shapes[name])
    most = max(sizes, key=lambda kind: sizes[kind], default=torch.float32)
    return ExportTypes(most, {name: kind for name, kind in types.items() if kind != most})
