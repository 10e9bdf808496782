"""Where a model comes from: its structure first, on any device, and its weights later, each worker its own part."""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from rl_bridge.models.conversion import ConvertedTensors
from rl_bridge.models.filling import fill_computed_buffers, fill_parameters, require_fit
from rl_bridge.models.kinds import require_causal, require_floats
from rl_bridge.models.reading import config_of, folder_of, made
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

    def __post_init__(self) -> None:
        """A relative path is one from here, wherever the process is when the weights are read."""
        object.__setattr__(self, "_place", Path(self.name).absolute())

    def empty(self) -> PreTrainedModel:
        """As ``AutoModelForCausalLM`` makes it. Raises ValueError where there is no model of that name."""
        folder = self.folder()
        config = config_of(self.name, folder)
        require_causal(config, self.name)
        model = made(
            self.name,
            lambda: AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False),
        )
        if (folder / "generation_config.json").is_file():
            with torch.device("cpu"):
                model.generation_config = made(self.name, lambda: GenerationConfig.from_pretrained(folder))
            _require_stop_tokens(model, folder / "generation_config.json")
        return model.eval()

    def load(self, model: PreTrainedModel, device: torch.device | None = None) -> None:
        """Read the files. Raises ValueError where there are none, or where they do not fit the model."""
        stored = self.stored()
        with _named(self.name):
            fill(model, stored, device)

    def check(self, model: PreTrainedModel) -> None:
        """What ``load`` would raise for names, shapes and types, from the headers of the files alone."""
        stored = self.stored()
        with _named(self.name):
            require_fit(model, stored)

    def stored(self) -> ConvertedTensors:
        """The tensors of the files under the model's names.

        Raises:
            ValueError: there are no files, their weights are codes, or transformers' conversion does not take them.
        """
        with torch.device("meta"):
            plain = self.empty()  # the model to be filled may be sharded, or its head may be missing
        stored = ConvertedTensors(SafetensorsFolder.of_folder(self.folder()), plain)
        # A buffer may be of whole numbers.
        parameters = {name for name, _ in plain.named_parameters(remove_duplicate=False)} & stored.dtypes.keys()
        require_floats({name: stored.dtypes[name] for name in parameters}, self.name)
        return stored

    def folder(self) -> Path:
        """Where the files are; those of a hub id are downloaded first, if they are not here already."""
        place: Path = self._place  # type: ignore[attr-defined]
        return folder_of(str(place) if place.is_dir() else self.name)


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Say of which model's files an error tells."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _require_stop_tokens(model: PreTrainedModel, file: Path) -> None:
    """Refuse ids that no token has: a completion would never end with one."""
    ids: Any = getattr(model.generation_config, "eos_token_id", None)
    embeddings = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[arg-type]
    for token in [ids] if isinstance(ids, int) else ids or ():
        if not 0 <= token < embeddings:
            raise ValueError(f"{file}: eos_token_id {token} is no token of the model, which has {embeddings}")


class StateSource:
    """A model in hand: its structure is made again, and its values are copied. For small models or the same process."""

    def __init__(self, model: PreTrainedModel) -> None:
        """The model must not be sharded."""
        self.model = model

    def empty(self) -> PreTrainedModel:
        """The same class and configuration."""
        model = type(self.model)(copy.deepcopy(self.model.config))
        for parameter in model.parameters():  # and no buffer: a constant that a family keeps in less stays rounded
            parameter.data = parameter.data.float()
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
