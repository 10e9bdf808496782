"""Generation in this process: any Hugging Face causal LM, batched, with a KV cache."""

from typing import Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rl_bridge.data.requests import SamplingParams
from rl_bridge.engines.module import ParallelModule
from rl_bridge.engines.results import returns
from rl_bridge.models.source import ModelSource
from rl_bridge.rollout.asynchronous.worker import Advancing
from rl_bridge.rollout.checked_decoder import check_decoder
from rl_bridge.rollout.conversing import Conversing
from rl_bridge.rollout.decoder import Decoder
from rl_bridge.rollout.generating import Generating
from rl_bridge.rollout.quantized import int8_map, quantize_linears
from rl_bridge.rollout.stop_texts import StopTexts
from rl_bridge.weights import ModuleReceiver
from rl_bridge.weights.through import Through

Precision = Literal["fp32", "int8"]
"""What the linear layers of a rollout in this process compute in."""


class InProcessRollout(Advancing, Generating, Conversing):
    """The rollout worker of one device: its own copy of the weights, which a sync brings up to date."""

    def __init__(
        self,
        source: ModelSource,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_batch_rows: int = 1024,
        precision: Precision = "fp32",
    ) -> None:
        """The model begins with the source's weights. Rows beyond ``max_batch_rows`` wait: that bounds the KV cache.

        With ``precision`` "int8" the linear layers but the head compute in int8, and a sync to here quantises.

        Raises:
            NotImplementedError: rows of this model that are drawn together are not what each would be alone
                (``rl_bridge.rollout.checked_decoder``).
        """
        with torch.device("meta"):
            self._model = source.empty().eval().requires_grad_(False)
        config = self._model.config.get_text_config()
        if getattr(config, "output_router_logits", False):
            config.output_router_logits = False  # a loss of training, which transformers cannot compute beside a cache
        source.load(self._model)
        self._map: Through | None = None
        if precision == "int8":
            self._map = int8_map(source)
            quantize_linears(self._model, self._map)
        self._weights = _Weights(self._model)
        self._tokenizer = tokenizer
        self._arrangement = check_decoder(self._model)
        self._stop = stop_tokens(self._model, tokenizer)
        self._max_batch_rows = max_batch_rows

    def decoder(self, sampling: SamplingParams) -> Decoder:
        """An empty decoder with the weights as they are; it holds good until they change."""
        texts = StopTexts(self._tokenizer, sampling.stop)
        options = {"max_rows": self._max_batch_rows, "arrangement": self._arrangement}
        return Decoder(self._model, sampling, stop=self._stop, texts=texts, **options)

    def weight_receiver(self) -> ModuleReceiver:
        """What a sync to here fills."""
        return self._weights.weight_receiver()

    @returns("same")
    def weights_map(self) -> Through | None:
        """What weights go through on their way here."""
        return self._map

    @returns("same")
    def weights_version(self) -> int:
        """The version of the weights in use."""
        return self.weight_receiver().usable_version()

    def weights_device(self) -> torch.device:
        """Where the weights are."""
        return self._model.device

    def move(self, what: str, device: torch.device) -> None:
        """Move the weights (to ``meta``: free them). A KV cache lives only during a call, so there is none to move."""
        if what == "weights":
            self._weights.move(what, device)


class _Weights(ParallelModule):
    """The model's weights as engines move, free and sync them."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def exported(self) -> PreTrainedModel:
        """The model, under its own names."""
        return self.model


def stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that end a completion: the tokenizer's end-of-sequence token and all that the model's generation names.

    Raises:
        ValueError: for a tokenizer without one.
    """
    own = tokenizer.eos_token_id
    if not isinstance(own, int):
        raise ValueError(f"the tokenizer needs an eos_token with one id, its eos_token_id is {own!r}")
    named = getattr(model.generation_config, "eos_token_id", None)
    return frozenset([own, *([named] if isinstance(named, int) else named or [])])
