"""A LoRA adapter that changes nothing: a server's requests name it from their start, and its place is taken later."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import save_file

from rl_bridge.models.stored_tensors import SafetensorsFolder
from rl_bridge.rollout.vllm.adapters import PREFIX

NAME = "rl_fn"


def blank_adapter(checkpoint: Path, into: Path) -> None:
    """Write one of rank 1 for the first projection of a layer in the checkpoint, both of whose factors are 0.

    Raises:
        ValueError: the checkpoint has no such matrix.
    """
    shapes = SafetensorsFolder.of_folder(checkpoint).shapes
    found = [name for name, shape in shapes.items() if re.search(r"layers.*_proj\.weight$", name) and len(shape) == 2]
    if not found:
        raise ValueError(f"{checkpoint} has no matrix layers.….…_proj.weight that an adapter could be for")
    module = min(found).removesuffix(".weight")
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
