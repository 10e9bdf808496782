"""Language models of a class of the user's own: any torch module with ``forward`` as ``OwnLanguageModel`` has it.

    source = own_source(Tiny, tokenizer, weights="tiny.safetensors")

``OwnModel`` stands around the module as a model of transformers, so that engines, sharding, adapters and syncs have
nothing to know of it. Of such a model the logits alone are known. Whether rows may be packed is compared when a model
gets its weights (``rl_bridge.parallel.probe``), as for every other class.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import CausalLMOutput

from rl_bridge.common.random_numbers import drawing_from
from rl_bridge.common.user_marks import content_of, mark_of
from rl_bridge.models.model_folder import OWN, require_floats
from rl_bridge.models.model_source import device_of, fill
from rl_bridge.models.own_class import Factory, FileFactory, made_by, name_of, require_form, vocabulary_of
from rl_bridge.models.own_logits import require_logits
from rl_bridge.models.stored_tensors import (
    ONE_FILE,
    SafetensorsFolder,
    TensorsInHand,
    computed_buffers,
    require_fit,
)
from rl_bridge.parallel.attention import AttentionPlan
from rl_bridge.parallel.heads import GivesLogits
from rl_bridge.weights.manifest import class_of

# The form of a class, and a module of it as a model of transformers.


class OwnLanguageModel(Protocol):
    """A model class of one's own: ``forward`` takes token ids to the logits of each next token.

    ``input_ids`` and ``position_ids`` are [N, T]; the logits are [N, T, V] of any floating-point type, and
    ``logits[n, t]`` are those of the token after ``input_ids[n, t]``. A class is a ``torch.nn.Module`` that is made
    without arguments (``functools.partial(Tiny, layers=4)`` has them already).

    With ``attention_mask`` None a token sees itself and all tokens before it in its row. Else the mask is boolean,
    [N, 1, T, T], True where the token of that row sees the token of that column: what
    ``scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, is_causal=attention_mask is None)`` reads. Masks
    come with documents that lie one behind another in a row; ``position_ids`` then begin anew with each. Distances, as
    of a sliding window, are those of ``position_ids``: between the columns of a mask another document may lie.

    An attribute ``max_positions`` of the module, if there is one, bounds the tokens of a row. Weights that no buffer
    and no parameter holds are not moved to where the model computes, and are refused.

    >>> class Bigram(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.table = nn.Embedding(14, 14)
    ...     def forward(self, input_ids, position_ids, attention_mask=None):
    ...         return self.table(input_ids)
    >>> vocabulary_of(Bigram)
    14
    """

    def forward(self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits [N, T, V]."""
        ...


class OwnConfig(PretrainedConfig):
    """The configuration of a model of one's own: as much as is known of it."""

    model_type = "own_model"


class OwnModel(GivesLogits):
    """A module of the user's as a model of transformers.

    It has the module's own dictionaries of parameters, buffers and sub-modules: names are those of the user's class,
    and whatever sharding, adapters or a sync put in the place of a tensor is put into the module.
    """

    config_class = OwnConfig
    base_model_prefix = ""

    def __init__(self, module: nn.Module, config: OwnConfig) -> None:
        """``config``: with ``vocab_size``, the number of logits of a token."""
        super().__init__(config)
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = module.__dict__[name]
        self.__dict__["_own"] = module  # no sub-module: each of its tensors would have two names
        self.generation_config = None  # only the tokenizer's end of a sequence ends a completion
        self.train(module.training)

    @property
    def own(self) -> nn.Module:
        """The module of the user's class."""
        return self.__dict__["_own"]

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        attention_plan: AttentionPlan | None = None,
        **options: Any,
    ) -> CausalLMOutput:
        """Logits of the module, for rows [N, T] or for documents packed by a plan; other options are of a cache.

        Raises:
            NotImplementedError: documents that lie on several sequence ranks, for which no mask can be made.
            ValueError: logits that are not [N, T, V].
        """
        if attention_plan is not None:
            attention_mask = mask_of(attention_plan, input_ids.shape[1])
            # The class cannot tell whether it reads the mask: its numbers are compared instead.
            attention_plan.uses += 1
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None].expand_as(input_ids)
        logits = self.own(input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask)
        return CausalLMOutput(logits=require_form(logits, input_ids, class_of(self).__name__))  # type: ignore[arg-type]

    def remade(self) -> "OwnModel":
        """A new model of the class, whose weights are the class's own."""
        source = OwnSource(_factories[self.config.factory], self.config.vocab_size)
        with torch.device("cpu"), drawing_from(0):
            return source.empty()

    def train(self, mode: bool = True) -> "OwnModel":
        """Set the mode of the module too, which is not among the sub-modules."""
        self.own.training = mode
        return super().train(mode)

    def set_attn_implementation(self, attn_implementation: Any, allow_all_kernels: bool = False) -> None:
        """Attention is the class's own whatever it is called: the name alone is noted."""
        self.config._attn_implementation = attn_implementation

    def get_input_embeddings(self) -> nn.Module:
        """A layer of as many rows as a token has logits, without numbers: the class alone knows what embeds tokens."""
        return nn.Embedding.from_pretrained(torch.empty(self.config.vocab_size, 0, device="meta"))

    def get_output_embeddings(self) -> None:
        """Not known."""


def mask_of(plan: AttentionPlan, tokens: int) -> Tensor:
    """The mask of a plan, [1, 1, T, T] bool: True where the token of a row sees that of a column.

    A token sees those before it in its segment, itself, and all of the segments that its segment continues.

    >>> from rl_bridge.parallel.attention.plan import segments_of
    >>> mask_of(AttentionPlan(segments_of([1, 2]), torch.device("cpu")), 3)[0, 0].int()
    tensor([[1, 0, 0],
            [0, 1, 0],
            [0, 1, 1]], dtype=torch.int32)

    Raises:
        NotImplementedError: the plan is of several ranks.
    """
    if plan.group is not None:
        raise NotImplementedError("a model class of one's own computes whole rows: it takes one rank a sequence")
    number = torch.zeros(tokens, dtype=torch.int64, device=plan.device)
    for place, segment in enumerate(plan.segments):
        number[segment.start : segment.stop] = place
    sees = torch.eye(len(plan.segments), dtype=torch.bool, device=plan.device)
    for place, segment in enumerate(plan.segments):
        if segment.prefix is not None:  # an earlier one, whose own row is complete
            sees[place] |= sees[segment.prefix]
    causal = torch.ones(tokens, tokens, dtype=torch.bool, device=plan.device).tril()
    return (sees[number[:, None], number[None]] & causal)[None, None]


# Where its weights come from.

_repeatable: list[tuple[Factory, int]] = []
_tried: list[tuple[Factory, int]] = []
"""Classes that draw the same weights again, each with its seed."""
_factories: list[Factory] = []
"""Those of this process: a class that is defined anew under its name is another one, and is compared anew."""


@dataclass(frozen=True)
class OwnSource:
    """A class of the user's own, with weights of a file; without one it is a new model, the same in every worker."""

    factory: Factory
    vocabulary: int
    """Logits of a token."""
    weights: str | None = None
    """A safetensors file, or a folder with one, as ``save_pretrained`` writes it."""
    seed: int = 0
    """The start of a new model's random numbers."""

    @property
    def name(self) -> str:
        """The name of the class."""
        return name_of(self.factory)

    def empty(self) -> OwnModel:
        """The model on torch's default device; its weights, if that is not meta, are any."""
        module = made_by(self.factory)
        if self.factory not in _factories:
            _factories.append(self.factory)
        settings: dict[str, Any] = {
            "vocab_size": self.vocabulary,
            "pad_token_id": None,
            "factory": _factories.index(self.factory),
        }
        config = OwnConfig(**settings)
        if (positions := getattr(module, "max_positions", None)) is not None:
            config.max_position_embeddings = positions
        return _kind(self.name)(module, config)

    def load(self, model: PreTrainedModel, device: torch.device | None = None) -> None:
        """Read this worker's part of the file, or keep its part of a new model.

        Raises:
            ValueError: weights that do not fit the class, by name; or a file that is not safetensors.
        """
        computed = computed_buffers(model)
        if self.weights is None:
            self._require_repeatable()
        new = self._new() if self.weights is None or computed else None
        for path, module, name, _ in computed:  # A table that the class computes and does not store.
            assert new is not None
            module._buffers[name] = new.get_buffer(path).to(device_of(model) if device is None else device)
        if self.weights is None:
            assert new is not None
            fill(model, TensorsInHand(new.state_dict()), device)
        else:
            fill(model, self.stored(), device)

    def check(self) -> None:
        """Raise the errors of ``load`` for names, shapes and types, from the headers of the file alone."""
        if self.weights is not None:
            with torch.device("meta"):
                model = self.empty()
            try:
                require_fit(model, self.stored())
            except ValueError as error:
                raise ValueError(f"{self.weights}: {error}") from error

    def stored(self) -> SafetensorsFolder:
        """The tensors of the file, under the names of the class."""
        assert self.weights is not None
        path = Path(self.weights)
        if not path.exists():
            raise FileNotFoundError(f"no such file of weights: {path}")
        stored = SafetensorsFolder.of_folder(path) if path.is_dir() else SafetensorsFolder.of_file(path)
        with torch.device("meta"):
            named = self.empty().named_parameters(remove_duplicate=False)
            floats = {name for name, parameter in named if parameter.is_floating_point()}
        require_floats({name: kind for name, kind in stored.dtypes.items() if name in floats}, self.weights)
        return stored

    def _require_repeatable(self) -> None:
        """Refuse a class that draws other weights each time: a policy and its reference would begin as two models."""
        if (self.factory, self.seed) in _repeatable:
            return
        sums = [{name: repr(float(x.sum())) for name, x in self._new().state_dict().items()} for _ in range(2)]
        if differing := [name for name, total in sums[0].items() if sums[1].get(name) != total]:
            raise ValueError(
                f"{self.name} draws other values of {differing[0]!r} each time that it is made: workers, policy and "
                "reference would begin as different models; draw with torch, random or numpy.random, whose "
                "generators are set, or with a generator that has a seed"
            )
        _repeatable.append((self.factory, self.seed))

    def _new(self) -> nn.Module:
        """A module with values, in this process; the global random states stay as they were."""
        with torch.device("cpu"), drawing_from(self.seed):
            return made_by(self.factory)


@functools.cache
def _kind(name: str) -> type[OwnModel]:
    """A class with the name of the user's, which messages show."""
    return type(name, (OwnModel,), {"__module__": __name__, "__doc__": OwnModel.__doc__})


def own_source(
    factory: Factory, tokenizer: PreTrainedTokenizerBase, *, weights: str | Path | None = None, seed: int = 0
) -> OwnSource:
    """The source of a class of one's own, whose form, weights and vocabulary are checked.

    Raises:
        TypeError, ValueError: the class lacks what ``OwnLanguageModel`` has, by name; its logits are fewer than the
            tokenizer's tokens; the weights do not fit; the class gives a row other numbers in another call, or
            probabilities.
        FileNotFoundError: no such file of weights.
    """
    vocabulary = vocabulary_of(factory)
    if vocabulary < len(tokenizer):
        raise ValueError(
            f"{name_of(factory)} gives {vocabulary} logits a token, and the tokenizer has {len(tokenizer)} tokens"
        )
    place = None if weights is None else str(Path(weights).absolute())
    source = OwnSource(factory, vocabulary, place, seed)
    source.check()
    if (factory, seed) not in _tried:
        require_logits(source._new(), source.name, len(tokenizer))
        _tried.append((factory, seed))
    return source


# Saved, and what a resumed run compares.


def save_own(model: OwnModel, state: Mapping[str, Tensor], folder: Path) -> None:
    """Write weights as safetensors, and the name of the class that reads them; the tokenizer lies beside."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / ONE_FILE)
    kind = type(model.own)
    about = {"class": kind.__qualname__, "module": kind.__module__}
    (folder / OWN).write_text(json.dumps(about, indent=2) + "\n", "utf-8")


def class_fingerprint(factory: Factory) -> str:
    """The name of the class and a hash of its file, with the modules of the user's that the file imports."""
    if isinstance(factory, FileFactory):
        return f"{factory.name}:{content_of(Path(factory.path))[:16]}"
    return mark_of(factory)
