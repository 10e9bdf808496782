"""A model and its tokenizer: from a folder or hub id in Hugging Face format, or small and new for given rows."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rl_bridge.atomic import replacing
from rl_bridge.data.rows import RESPONSES
from rl_bridge.models.characters import character_tokenizer
from rl_bridge.models.reading import tokenizer_in
from rl_bridge.models.source import ModelSource, PretrainedSource
from rl_bridge.models.tiny import TinySource


def pretrained(name: str) -> tuple[ModelSource, PreTrainedTokenizerBase]:
    """A model that every worker loads its own part of, and its tokenizer with a pad token.

    The pad token is the end-of-sequence token if the tokenizer names none.

    Raises:
        ValueError: there is no such model; it is no causal language model or quantised; weights are missing, unknown or
            of another shape, by name; the tokenizer has no end-of-sequence token.
    """
    source = PretrainedSource(name)
    with torch.device("meta"):
        source.check(source.empty())  # what is wrong shows before workers are made
    return source, tokenizer_of(name)


def load_pretrained(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The same in this process, in float32.

    Raises:
        ValueError: as ``pretrained`` does.
    """
    source, tokenizer = pretrained(name)
    with torch.device("meta"):
        model = source.empty()
    source.load(model)
    return model, tokenizer


def tokenizer_of(name: str) -> PreTrainedTokenizerBase:
    """A model's tokenizer, with a pad token. Raises ValueError where there is none, or none with an eos_token."""
    tokenizer = tokenizer_in(name)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {name!r} has no eos_token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def new_for_rows(rows: Sequence[Mapping[str, Any]], *, seed: int) -> tuple[ModelSource, PreTrainedTokenizerBase]:
    """A tiny Qwen2 and a character tokenizer over the characters of the rows' prompts and responses."""
    for row in rows:
        if not isinstance(row.get("prompt"), str):
            raise ValueError(f"{row.get('_where', 'a row')}: chat messages need a model with a chat template (--model)")
    said = (str(row[name]) for row in rows for name in ("prompt", *RESPONSES) if row.get(name) is not None)
    tokenizer = character_tokenizer("".join(sorted({character for text in said for character in text})))
    return TinySource.for_tokenizer(tokenizer, seed=seed), tokenizer


def save_pretrained(folder: Path, policy: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write model and tokenizer in Hugging Face format; the folder appears when it is whole."""
    with replacing(folder) as temporary:
        policy.save_pretrained(str(temporary))
        tokenizer.save_pretrained(str(temporary))
