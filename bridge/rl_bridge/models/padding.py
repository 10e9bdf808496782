"""The pad token of a model that is read at the end of a row: one with which no row ends."""

import copy
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rl_bridge.models.source import ModelSource

_NAMED = re.compile(r"[<\[|]+\w*pad\w*[>\]|]+", re.IGNORECASE)
_RESERVED = re.compile(r"reserved|unused", re.IGNORECASE)
_NEW = "<|pad|>"


def pad_with_no_end(tokenizer: PreTrainedTokenizerBase, source: ModelSource, rows: Iterable[Sequence[int]]) -> int:
    """Let the tokenizer pad with a token that ends none of the rows and no sequence; returns its id.

    A classifier of transformers reads a row at the last token that is not padding: a token too early, where a tokenizer
    pads with the end of a sequence, as Llama's kind does. A pad token that ends no row stays. Else it is the first of:
    a token whose name says padding; a new token, where the model has more embeddings than the tokenizer has tokens; a
    special token that neither the rows nor the chat template use; the unknown token; the beginning of a sequence.

    Args:
        tokenizer: gets the pad token, and perhaps one token more.
        source: of the model, whose embeddings count.
        rows: token ids of what the model is to read.

    Raises:
        ValueError: there is no such token.
    """
    used: set[int] = set()
    eos: Any = tokenizer.eos_token_id
    ends = {eos}
    for row in rows:
        used.update(row)
        ends.add(row[-1])
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id in ends:
        with torch.device("meta"):
            embeddings = len(cast(Tensor, source.empty().get_input_embeddings().weight))
        for token in _candidates(tokenizer, embeddings, used):
            known: Any = tokenizer.get_vocab().get(token)
            if known not in ends and (known is None or known < embeddings):
                tokenizer.add_special_tokens({"pad_token": token})
                break
        else:
            raise ValueError(
                f"the tokenizer of {tokenizer.name_or_path!r} pads with {tokenizer.pad_token!r}, with which rows end, "
                "and has no other special token and no free embedding for padding; a reward model is read at the last "
                "token that is not padding. Give the model a pad token of its own, and save both: "
                f'tokenizer.add_special_tokens({{"pad_token": "{_NEW}"}}), '
                "model.resize_token_embeddings(len(tokenizer))"
            )
    assert isinstance(tokenizer.pad_token_id, int)
    return tokenizer.pad_token_id


def _candidates(tokenizer: PreTrainedTokenizerBase, embeddings: int, used: set[int]) -> Iterator[str]:
    """Tokens to pad with, the best first."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    yield from sorted((token for token in vocabulary if _NAMED.fullmatch(token)), key=lambda token: (len(token), token))
    larger = copy.deepcopy(tokenizer)
    if larger.add_special_tokens({"pad_token": _NEW}) and larger.get_vocab()[_NEW] < embeddings:
        yield _NEW
    template = str(tokenizer.chat_template)
    special = [added.content for added in tokenizer.added_tokens_decoder.values() if added.special]
    free = [token for token in special if vocabulary[token] not in used and token not in template]
    yield from sorted(free, key=lambda token: (_RESERVED.search(token) is None, vocabulary[token]))
    yield from (token for token in (tokenizer.unk_token, tokenizer.bos_token) if isinstance(token, str))
