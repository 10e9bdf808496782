"""Where a model comes from: structure first, weights later; the whole, partly frozen, or with a head of one number."""

import contextlib
import copy
import difflib
import fnmatch
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GenerationConfig, PreTrainedModel

from rl_bridge.common.terminal import remark
from rl_bridge.models.conversion import ConvertedTensors
from rl_bridge.models.model_folder import CONFIG, config_of, folder_of, made, require_causal, require_floats
from rl_bridge.models.stored_tensors import (
    SafetensorsFolder,
    StoredTensors,
    TensorsInHand,
    fill_computed_buffers,
    fill_parameters,
    require_fit,
)
from rl_bridge.parallel.fsdp import materialize, part_of
from rl_bridge.parallel.heads import GivesLogits
from rl_bridge.weights.manifest import is_peft, local

# Whole models: the structure first, on any device, and the weights later, each worker its own part.


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
        """The model that ``AutoModelForCausalLM`` makes. Raises ValueError where there is no model of that name."""
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
        """Raise the errors of ``load`` for names, shapes and types, from the headers of the files alone.

        A folder with code of its own is remarked on.
        """
        if code := getattr(model.config, "auto_map", None):
            remark(
                f"{self.name}: the code that its {CONFIG} names ({', '.join(map(str, code.values()))}) is not run: the "
                f"model is transformers' {type(model).__name__}, also where it is exported"
            )
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
    """Load the weights: make what is on the meta device, fill it, compute the buffers that are not stored."""
    device = made_on(model, device)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta and name not in module._non_persistent_buffers_set:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    fill_parameters(model, stored)
    fill_computed_buffers(model, device)


def made_on(model: PreTrainedModel, device: torch.device | None) -> torch.device:
    """The device of ``ModelSource.load``, on which parameters that were on the meta device have memory now."""
    device = device_of(model) if device is None else device
    if any(parameter.is_meta for parameter in model.parameters()):
        materialize(model, device)
    return device


def device_of(model: PreTrainedModel) -> torch.device:
    """The device that a sharded model computes on; the CPU for a model that is not sharded."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            kind = parameter.device_mesh.device_type
            return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
    return torch.device("cpu")


# Parameters that are not trained, chosen by patterns of their names.

_WRAPPER = "base_model.model."
"""The prefix that peft puts before the names of the model that it wraps."""


@dataclass(frozen=True)
class FreezingSource:
    """The model of ``source``, in which parameters whose names match a pattern are not trained.

    Patterns are those of file names: ``model.embed_tokens.*``, ``*.layers.[0-3].*``. Of a tensor with two names, such
    as tied output embeddings, either name freezes both. A peft model's names go without peft's prefix.
    """

    source: ModelSource
    patterns: tuple[str, ...]

    def empty(self) -> PreTrainedModel:
        """The model, its matching parameters without a gradient.

        Raises:
            ValueError: a pattern that matches no parameter, with near names; nothing is left to train; or the head of a
                value model is left at zero, so that nothing behind it has a gradient.
        """
        model = self.source.empty()
        named = [(name.removeprefix(_WRAPPER), p) for name, p in model.named_parameters(remove_duplicate=False)]
        for pattern in self.patterns:
            matches = [parameter for name, parameter in named if fnmatch.fnmatchcase(name, pattern)]
            if not matches:
                raise ValueError(f"freeze pattern {pattern!r} matches no parameter of the model{_near(pattern, named)}")
            for parameter in matches:
                parameter.requires_grad_(False)
        if not any(parameter.requires_grad for _, parameter in named):
            raise ValueError(f"freeze patterns {', '.join(map(repr, self.patterns))} leave no parameter to train")
        head = [parameter for name, parameter in named if name.startswith(f"{HEAD}.")]
        if _begins_at_zero(self.source) and not any(parameter.requires_grad for parameter in head):
            raise ValueError(
                f"freeze patterns {', '.join(map(repr, self.patterns))} hold the head {HEAD!r} at zero, where every "
                "value begins: nothing would have a gradient; freeze the trunk alone, as model.*"
            )
        return model

    def load(self, model: PreTrainedModel, device: torch.device | None = None) -> None:
        """Load as ``source`` does."""
        self.source.load(model, device)


def _begins_at_zero(source: Any) -> bool:
    """Whether a model has the head of zeros of ``ValueSource``, with or without adapters around it."""
    while not isinstance(source, ValueSource) and hasattr(source, "source"):
        source = source.source
    return isinstance(source, ValueSource) and source.seed is None


def _near(pattern: str, named: Sequence[tuple[str, torch.nn.Parameter]]) -> str:
    """The names that look most like the pattern, each with its own number in place of the layer's star."""
    near = difflib.get_close_matches(pattern, list(dict.fromkeys(name for name, _ in named)), n=3, cutoff=0.3)
    return f"; near names are {', '.join(near)}" if near else f"; the first is {named[0][0]}"


# Critics and reward models: the trunk of a language model with a head of one number in place of the vocabulary.

HEAD = "score"
"""transformers' name of the head of its decoder families."""


@dataclass(frozen=True)
class ValueSource:
    """A transformers ``*ForSequenceClassification`` with one label, whose trunk is that of ``source``.

    The head's weight is zero, so that every value starts at 0; or drawn from ``seed``, the same on every layout. For
    LoRA, ``LoRASource`` goes around this source.
    """

    source: ModelSource
    """A causal language model without adapters."""
    seed: int | None = None
    pad_token: int | None = None
    """For the configuration, in place of its own: transformers reads a row's score before such tokens at its end."""

    def empty(self) -> PreTrainedModel:
        """The model with the configuration of ``source``'s.

        Raises:
            ValueError: transformers has no such class for the family, or the model of ``source`` has adapters.
        """
        base = self.source.empty()
        if is_peft(base):
            raise ValueError("the trunk of a value model is plain: put LoRASource around ValueSource")
        if isinstance(base, GivesLogits):
            raise ValueError(
                f"{type(base).__name__} is a class of your own, which gives logits: a value model reads hidden states; "
                "take a model in Hugging Face format as critic or reward model"
            )
        config = copy.deepcopy(base.config)
        config.num_labels = 1
        if self.pad_token is not None:
            config.get_text_config().pad_token_id = self.pad_token
        try:
            model = scorer_of(config)
        except ValueError as error:
            raise ValueError(
                f"there is no value model of the family {config.model_type!r}: transformers has no "
                "*ForSequenceClassification of it; take a model of another family as critic or reward model"
            ) from error
        return with_head(model).eval()

    def load(self, model: PreTrainedModel, device: torch.device | None = None) -> None:
        """Load the trunk as ``source`` does, then fill the head."""
        device = made_on(model, device)
        self.source.load(self._language_model(model), device)
        head: Any = getattr(model, HEAD).weight
        whole = torch.zeros(head.shape, device="cpu")
        if self.seed is not None:
            generator = torch.Generator().manual_seed(self.seed)
            whole.normal_(0.0, whole.shape[1] ** -0.5, generator=generator)
        with torch.no_grad():
            local(head).copy_(whole[part_of(head)])

    def _language_model(self, model: PreTrainedModel) -> PreTrainedModel:
        """The language model that ``source`` knows, around the trunk of ``model``; its output embeddings take no room.

        Tied ones are the trunk's own. Others are left out, with whatever is stored for them.
        """
        with torch.device("meta"):
            base = self.source.empty()
        head: Any = base.get_output_embeddings()
        tied = head.weight is base.get_input_embeddings().weight
        setattr(base, base.base_model_prefix, model.base_model)
        if tied:
            head.weight = model.get_input_embeddings().weight
            return base
        name = next(name for name, module in base.named_modules() if module is head)
        base.set_output_embeddings(nn.Identity())
        ignored = base._keys_to_ignore_on_load_unexpected or []
        base._keys_to_ignore_on_load_unexpected = [*ignored, rf"^{re.escape(name)}\."]
        return base


@dataclass(frozen=True)
class PretrainedValueSource(PretrainedSource):
    """A folder or hub id that holds a value model with its head, such as a trained reward model."""

    def empty(self) -> PreTrainedModel:
        """The model that ``AutoModelForSequenceClassification`` makes, with its head.

        Raises:
            ValueError: there is no such model, or its head has more numbers than one.
        """
        folder = self.folder()
        config = config_of(self.name, folder)
        require_one_label(config, self.name)
        model = made(self.name, lambda: scorer_of(config))
        return with_head(model).eval()


def scorer_of(config: Any) -> PreTrainedModel:
    """The model that ``AutoModelForSequenceClassification`` makes, in float32."""
    return AutoModelForSequenceClassification.from_config(config, dtype=torch.float32, trust_remote_code=False)


def require_one_label(config: Any, name: str) -> None:
    """Raise ValueError for another head than one number; transformers gives a language model's two labels."""
    if config.num_labels != 1:
        language = any("CausalLM" in kind for kind in config.architectures or ())
        hint = ": it is a language model, and `rl-fn train reward-model` makes a reward model of it" if language else ""
        raise ValueError(f"a value model has one label, that in {name!r} has {config.num_labels}{hint}")


def with_head(model: PreTrainedModel) -> PreTrainedModel:
    """The model, if its head is one number of a token's hidden state.

    Raises:
        ValueError: another head.
    """
    head = getattr(model, HEAD, None)
    if not (isinstance(head, nn.Linear) and head.out_features == 1 and head.bias is None):
        raise ValueError(f"{type(model).__name__} has no linear head {HEAD!r} with one output and no bias: {head}")
    return model
