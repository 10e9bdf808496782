"""Where a model comes from: its structure first, on any device, and its weights later, each worker its own part."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from huggingface_hub import snapshot_download
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from rl_bridge.models.filling import fill_computed_buffers, fill_parameters, require_fit
from rl_bridge.models.kinds import require_causal, require_floats
from rl_bridge.models.stored_tensors import SafetensorsFolder, StoredTensors, TensorsInHand
from rl_bridge.parallel.moving import materialize


class ModelSource(Protocol):
    """Picklable: it travels to every worker, which makes and loads its own part of the model."""

    def empty(self) -> PreTrainedModel:
        """The model without values, in float32, on torch's default device (an engine makes it on ``meta``)."""
        ...

    def load(self, model: PreTrainedModel, device: torch.device | None = None) -> None:
        """Give every parameter and buffer of ``model`` its value.

        Parameters may be DTensors, of which only the own part is read. What is on the meta device is made on
        ``device``; None is the device of a sharded model's mesh, or else the CPU.

        Raises:
            ValueError: a weight that is missing, unknown or of another shape, by its name.
        """
        ...


@dataclass(frozen=True)
class PretrainedSource:
    """A folder or hub id in Hugging Face format, with safetensors. A worker reads only what it holds."""

    name: str

    def empty(self) -> PreTrainedModel:
        """As ``AutoModelForCausalLM`` makes it. Raises ValueError where there is no model of that name."""
        folder = self.folder()
        try:
            config = AutoConfig.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise ValueError(f"no model can be loaded from {self.name!r}: {error}") from error
        require_causal(config, self.name)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if (folder / "generation_config.json").is_file():
            with torch.device("cpu"):
                model.generation_config = GenerationConfig.from_pretrained(folder)
        return model.eval()

    def load(self, model: PreTrainedModel, device: torch.device | None = None) -> None:
        """Read the files. Raises ValueError where there are none, or where they do not fit the model."""
        fill(model, self._stored(model), device)

    def check(self, model: PreTrainedModel) -> None:
        """What ``load`` would raise for names, shapes and types, from the headers of the files alone."""
        require_fit(model, self._stored(model))

    def _stored(self, model: PreTrainedModel) -> SafetensorsFolder:
        stored = SafetensorsFolder.of_folder(self.folder())
        # A buffer may be of whole numbers.
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)} & stored.dtypes.keys()
        require_floats({name: stored.dtypes[name] for name in parameters}, self.name)
        return stored

    def folder(self) -> Path:
        """Where the files are; those of a hub id are downloaded first, if they are not here already."""
        if Path(self.name).is_dir():
            return Path(self.name)
        try:
            return Path(snapshot_download(self.name, allow_patterns=["*.json", "*.safetensors"]))
        except (OSError, ValueError) as error:
            raise ValueError(f"no model can be loaded from {self.name!r}: {error}") from error


class StateSource:
    """A model in hand: its structure is made again, and its values are copied. For small models or the same process."""

    def __init__(self, model: PreTrainedModel) -> None:
        """The model must not be sharded."""
        self.model = model

    def empty(self) -> PreTrainedModel:
        """The same class and configuration."""
        model = type(self.model)(copy.deepcopy(self.model.config)).float()
        model.generation_config = copy.deepcopy(self.model.generation_config)
        return model.eval()

    def load(self, model: PreTrainedModel, device: torch.device | None = None) -> None:
        """Copy the values."""
        fill(model, TensorsInHand(self.model.state_dict()), device)


def fill(model: PreTrainedModel, stored: StoredTensors, device: torch.device | None = None) -> None:
    """What every ``load`` does: make what is on the meta device, fill it, compute the buffers that are not stored."""
    device = device_of(model) if device is None else device
    if any(parameter.is_meta for parameter in model.parameters()):
        materialize(model, device)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta and name not in module._non_persistent_buffers_set:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    fill_parameters(model, stored)
    fill_computed_buffers(model, device)


def device_of(model: PreTrainedModel) -> torch.device:
    """The device that a sharded model computes on; the CPU for a model that is not sharded."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            kind = parameter.device_mesh.device_type
            return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
    return torch.device("cpu")
