"""LoRA adapters of vLLM: the tensors that fit a checkpoint, and the blank adapter that a server starts with."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rl_bridge.models.stored_tensors import SafetensorsFolder
from rl_bridge.weights.manifest import Manifest, TensorSpec

PREFIX = "base_model.model."
"""The text that peft puts before the names of the model that it wraps."""


def expected_adapter(sent: Manifest, checkpoint: Mapping[str, TensorSpec], rank: int) -> Manifest:
    """Names and shapes of an adapter of the sent configuration: an A and a B for each matrix that it is for.

    vLLM takes an adapter that lacks the factors of a matrix, and goes on without them.

    Args:
        sent: the adapter that a source wants to send.
        checkpoint: the header of the checkpoint that the engine started from.
        rank: the largest that the engine has room for.

    Raises:
        ValueError: an adapter that vLLM computes otherwise than peft, or not at all.
    """
    config = sent.adapter
    if config is None:
        raise ValueError("an adapter without its configuration")
    _require_plain(config, rank)
    specs: dict[str, TensorSpec] = {}
    dtypes = sorted({spec.dtype for spec in sent.tensors.values()}, key=str)
    if len(dtypes) != 1 or not dtypes[0].is_floating_point:
        raise ValueError(f"an adapter's tensors are of one floating dtype, got {dtypes}")
    [dtype] = dtypes
    for name, spec in checkpoint.items():
        module = name.removesuffix(".weight")
        if len(spec.shape) != 2 or module == name or not _targeted(module, config["target_modules"]):
            continue
        module_rank = int(of_module(module, config, "r"))
        (out, width) = spec.shape
        specs[f"{PREFIX}{module}.lora_A.weight"] = TensorSpec((module_rank, width), dtype)
        specs[f"{PREFIX}{module}.lora_B.weight"] = TensorSpec((out, module_rank), dtype)
    # In the order of the stream, as far as it goes.
    order = [name for name in sent.tensors if name in specs]
    return Manifest({name: specs[name] for name in [*order, *(specs.keys() - set(order))]}, config)


def _require_plain(config: Mapping[str, Any], rank: int) -> None:
    plain = {"peft_type": ("LORA", "PeftType.LORA"), "use_dora": (False, None), "lora_bias": (False, None)}
    plain |= {
        "bias": ("none", None),
        "modules_to_save": (None, []),
        "target_parameters": (None, []),
        "layers_to_transform": (None, []),
        "exclude_modules": (None, []),
        "fan_in_fan_out": (False, None),
    }
    for name, allowed in plain.items():
        value = config.get(name)
        if value not in allowed and getattr(value, "value", value) not in allowed:
            raise ValueError(f"vLLM takes plain LoRA adapters, and this one has {name}={value!r}: send it merged")
    ranks = [config["r"], *(config.get("rank_pattern") or {}).values()]
    if max(ranks) > rank:
        raise ValueError(f"an adapter of rank {max(ranks)} for an engine with adapter_rank={rank}")


def _targeted(module: str, targets: Any) -> bool:
    """Whether peft adapts the module: ``targets`` is a list of names' ends, or a pattern of the whole name."""
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == target or module.endswith(f".{target}") for target in targets)


_PATTERNS = {"r": "rank_pattern", "lora_alpha": "alpha_pattern"}


def of_module(module: str, config: Mapping[str, Any], name: str) -> float:
    """``r`` or ``lora_alpha`` of a module in peft: that of the first pattern that matches its name's end, or of all."""
    for pattern, value in (config.get(_PATTERNS[name]) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return config[name]


NAME = "rl_fn"
"""The adapter's name in a server's requests, which have it from their start: the blank adapter is replaced later."""


def blank_adapter(checkpoint: Path, into: Path) -> None:
    """Write an adapter of rank 1 that changes nothing: for the first projection of a layer, with both factors 0.

    Raises:
        ValueError: the checkpoint has no such matrix.
    """
    shapes = SafetensorsFolder.of_folder(checkpoint).shapes
    names = [name for name, shape in shapes.items() if re.search(r"layers.*_proj\.weight$", name) and len(shape) == 2]
    if not names:
        raise ValueError(f"{checkpoint} has no matrix layers.….…_proj.weight that an adapter could be for")
    module = min(names).removesuffix(".weight")
    out, width = shapes[f"{module}.weight"]
    into.mkdir()
    factors = {"lora_A": torch.zeros(1, width), "lora_B": torch.zeros(out, 1)}
    save_file(
        {f"{PREFIX}{module}.{name}.weight": factor for name, factor in factors.items()},
        into / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 1, "lora_alpha": 1, "bias": "none"}
    targets = [module.rpartition(".")[2]]
    (into / "adapter_config.json").write_text(json.dumps({**config, "target_modules": targets}))
