"""Models that have a structure and no numbers, for a rehearsal."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rl_bridge.models.filling import fill_computed_buffers
from rl_bridge.models.kinds import require_causal
from rl_bridge.models.reading import config_of, made, require_place
from rl_bridge.models.source import ModelSource, PretrainedSource, device_of
from rl_bridge.models.values import PretrainedValueSource, require_one_label, scorer_of, with_head
from rl_bridge.parallel.moving import materialize


@dataclass(frozen=True)
class ConfigSource:
    """The structure that a config.json describes. It has no weights to load."""

    name: str
    """Folder with a config.json, the file itself, or a hub id."""

    def empty(self) -> PreTrainedModel:
        """As ``AutoModelForCausalLM`` makes it, in float32.

        Raises:
            ValueError: there is no such configuration, or it is of no causal language model.
        """
        config = _config(self.name)
        require_causal(config, self.name)
        return made(
            self.name,
            lambda: AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False).eval(),
        )

    def load(self, model: PreTrainedModel, device: torch.device | None = None) -> None:
        """Refused: a plan loads nothing."""
        raise ValueError(f"{self.name} is planned from its config.json: there are no weights to load")


@dataclass(frozen=True)
class ConfigValueSource(ConfigSource):
    """The same for a model of values or rewards."""

    def empty(self) -> PreTrainedModel:
        """As ``AutoModelForSequenceClassification`` makes it, in float32.

        Raises:
            ValueError: there is no such configuration, or it is of a model with another head than one number.
        """
        config = _config(self.name)
        require_one_label(config, self.name)
        return with_head(made(self.name, lambda: scorer_of(config))).eval()


def _config(name: str) -> Any:
    path = Path(name)
    return config_of(name, path.parent if path.is_file() else str(require_place(name)))


@dataclass(frozen=True)
class WithoutNumbers:
    """The structure of ``source``, and weights of the right sizes, without values."""

    source: Any

    def empty(self) -> Any:
        """As the source makes it."""
        return self.source.empty()

    def load(self, model: Any, device: torch.device | None = None) -> None:
        """Make room for the weights, and compute what is computed."""
        device = device_of(model) if device is None else device
        if any(parameter.is_meta for parameter in model.parameters()):
            materialize(model, device)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta and name not in module._non_persistent_buffers_set:
                    module._buffers[name] = torch.empty_like(buffer, device=device)
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        fill_computed_buffers(base, device)


def without_numbers(source: ModelSource) -> ModelSource:
    """The source with sizes alone."""
    return WithoutNumbers(source)  # type: ignore[return-value]


def beside(name: str, *, rehearsed: bool, values: bool = False) -> ModelSource:
    """A model beside the trained one, of tokens or of ``values``: its structure for a rehearsal, else with weights."""
    if rehearsed:
        return without_numbers(ConfigValueSource(name) if values else ConfigSource(name))
    return PretrainedValueSource(name) if values else PretrainedSource(name)
