"""A small Qwen2 made from a config: big enough to learn arithmetic, small enough for two CPU cores."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from rl_bridge.models.source import fill
from rl_bridge.models.stored_tensors import TensorsInHand


@dataclass(frozen=True, kw_only=True)
class TinySource:
    """A Qwen2 decoder with random weights (about 1.05 M parameters by default), in float32, tied embeddings.

    Weights are a function of ``seed`` alone: the global random state is left as it was. Every worker makes all of them.
    """

    vocabulary: int
    pad_token: int | None = None
    eos_token: int | None = None
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    key_value_heads: int | None = None
    """None: as many as heads."""
    max_positions: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse heads that do not divide the width."""
        if self.hidden % self.heads:
            raise ValueError(f"hidden must be a multiple of heads, got hidden={self.hidden}, heads={self.heads}")

    @classmethod
    def for_tokenizer(cls, tokenizer: PreTrainedTokenizerBase, **sizes: Any) -> "TinySource":
        """Of the tokenizer's vocabulary and special tokens; ``sizes`` are the other fields."""
        special: dict[str, Any] = {"pad_token": tokenizer.pad_token_id, "eos_token": tokenizer.eos_token_id}
        return cls(vocabulary=len(tokenizer), **special, **sizes)

    def empty(self) -> Qwen2ForCausalLM:
        """The model on torch's default device; its weights, if that is not meta, are any."""
        config = Qwen2Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=4 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads or self.heads,
            max_position_embeddings=self.max_positions,
            tie_word_embeddings=True,
            # 1/sqrt(hidden) rather than the 0.02 of billion-parameter models: at width 128 it learns twice as fast.
            initializer_range=min(0.05, self.hidden**-0.5),
            bos_token_id=None,
            pad_token_id=self.pad_token,
            eos_token_id=self.eos_token,
        )
        return Qwen2ForCausalLM(config).float().eval()

    def load(self, model: PreTrainedModel, device: torch.device | None = None) -> None:
        """Draw the weights, whole, and keep this worker's part."""
        fill(model, TensorsInHand(self.whole().state_dict()), device)

    def whole(self) -> Qwen2ForCausalLM:
        """The model with its weights, in this process."""
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return self.empty()


def tiny_qwen2(
    tokenizer: PreTrainedTokenizerBase,
    *,
    hidden: int = 128,
    layers: int = 4,
    heads: int = 4,
    max_positions: int = 512,
    seed: int = 0,
) -> Qwen2ForCausalLM:
    """The model of a ``TinySource`` for this tokenizer."""
    sizes = {"hidden": hidden, "layers": layers, "heads": heads, "max_positions": max_positions, "seed": seed}
    return TinySource.for_tokenizer(tokenizer, **sizes).whole()
