"""Critics and reward models: the trunk of a language model with a head of one number in place of the vocabulary."""

import copy
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from rl_bridge.models.reading import config_of, made
from rl_bridge.models.source import ModelSource, PretrainedSource, device_of
from rl_bridge.parallel.moving import materialize, part_of
from rl_bridge.weights.source import is_peft

HEAD = "score"
"""transformers' name of the head of its decoder families."""


@dataclass(frozen=True)
class ValueSource:
    """A transformers ``*ForSequenceClassification`` with one label, whose trunk is that of ``source``.

    The head's weight is zero, so that every value starts at 0; or drawn from ``seed``, the same on every layout. For
    LoRA, ``LoRASource`` goes around this source.
    """

    source: ModelSource
    """Of a causal language model without adapters."""
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
        device = device_of(model) if device is None else device
        if any(parameter.is_meta for parameter in model.parameters()):
            materialize(model, device)
        self.source.load(self._language_model(model), device)
        head: Any = getattr(model, HEAD).weight
        whole = torch.zeros(head.shape, device="cpu")
        if self.seed is not None:
            generator = torch.Generator().manual_seed(self.seed)
            whole.normal_(0.0, whole.shape[1] ** -0.5, generator=generator)
        with torch.no_grad():
            (head.to_local() if isinstance(head, DTensor) else head).copy_(whole[part_of(head)])

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
        """As ``AutoModelForSequenceClassification`` makes it.

        Raises:
            ValueError: there is no such model, or its head has more numbers than one.
        """
        folder = self.folder()
        config = config_of(self.name, folder)
        require_one_label(config, self.name)
        model = made(self.name, lambda: scorer_of(config))
        return with_head(model).eval()


def scorer_of(config: Any) -> PreTrainedModel:
    """As ``AutoModelForSequenceClassification`` makes it, in float32."""
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
