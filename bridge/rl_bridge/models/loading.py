"""A model and its tokenizer: from a folder or hub id in Hugging Face format, or small and new for given rows."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rl_bridge.atomic import replacing
from rl_bridge.models.characters import character_tokenizer
from rl_bridge.models.tiny import tiny_qwen2


def load_pretrained(source: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load in float32, with a pad token (the end-of-sequence token if the tokenizer names none)."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ValueError(f"no model can be loaded from {source!r}: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {source!r} has no eos_token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def new_for_rows(rows: Sequence[Mapping[str, Any]], *, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A tiny Qwen2 and a character tokenizer over the characters of the rows' prompts and answers."""
    for row in rows:
        if not isinstance(row["prompt"], str):
            raise ValueError(f"{row.get('_where', 'a row')}: chat messages need a model with a chat template (--model)")
    alphabet = sorted({character for row in rows for character in row["prompt"] + str(row.get("answer", ""))})
    tokenizer = character_tokenizer("".join(alphabet))
    return tiny_qwen2(tokenizer, seed=seed), tokenizer


def save_pretrained(folder: Path, policy: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write model and tokenizer in Hugging Face format; the folder appears when it is whole."""
    with replacing(folder) as temporary:
        policy.save_pretrained(str(temporary))
        tokenizer.save_pretrained(str(temporary))
