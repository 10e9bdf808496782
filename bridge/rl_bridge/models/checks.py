"""What shows before training starts: rows that do not fit the model or its tokenizer."""

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rl_bridge.data.reading import refuse
from rl_bridge.data.requests import Message
from rl_bridge.models.encoding import content_of, conversation_of, encode_prompt, encode_row, messages_of
from rl_bridge.models.rotary import rotary_bound
from rl_bridge.models.source import ModelSource
from rl_bridge.tracking.signals import remark

Encode = Callable[[Mapping[str, Any]], tuple[Sequence[Message], Sequence[int]]]
"""The messages of a row whose text the model reads, and their token ids."""


def prompted(tokenizer: PreTrainedTokenizerBase) -> Encode:
    """Rows that are sampled from: their prompts."""
    return lambda row: (messages_of(row["prompt"]), encode_prompt(tokenizer, row["prompt"]))


def supervised(tokenizer: PreTrainedTokenizerBase, *, apply_chat_template: bool = True) -> Encode:
    """Rows that are imitated."""

    def encode(row: Mapping[str, Any]) -> tuple[Sequence[Message], Sequence[int]]:
        trajectory = encode_row(tokenizer, row, apply_chat_template=apply_chat_template)
        return conversation_of(row)[0], trajectory.tokens

    return encode


def check_rows(
    source: ModelSource,
    tokenizer: PreTrainedTokenizerBase,
    rows: Iterable[Mapping[str, Any]],
    encode: Encode,
    *,
    new_tokens: int = 0,
) -> None:
    """Encode every row, and refuse what the model cannot read: at the start, not in the middle of a run.

    ``new_tokens`` are sampled behind each row.

    Raises:
        ValueError: a row that cannot be encoded, is longer than the model's positions, has a token that the model has
            no embedding of, or a character that the tokenizer drops: the first few with file and row number.
    """
    with torch.device("meta"):
        model = source.empty()
    fits = Fits(model, tokenizer, new_tokens)
    bad, total, marked = [], 0, []
    marks = [token for token in tokenizer.all_special_tokens if len(token) > 1]
    for row in rows:
        total += 1
        where = row.get("_where", f"row {total}")
        try:
            messages, tokens = encode(row)
            fits.require(messages, tokens)
        except ValueError as error:
            bad.append(f"{where}: {error}")
            continue
        # A prompt that is text may hold a template's marks on purpose; the content of a message is what somebody said.
        said = [] if isinstance(row.get("prompt"), str) else [str(message.get("content")) for message in messages]
        marked += [(where, mark) for mark in marks if any(mark in text for text in said)][:1]
    refuse(bad, total)
    if marked:
        where, mark = marked[0]
        remark(
            f"{len(marked)} of {total} rows have control tokens in the content of a message, which the model reads as "
            f"turns: first {where}, {mark!r}"
        )


class Fits:
    """Whether a row fits a model, with what is known of the characters of the rows before."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, new_tokens: int = 0) -> None:
        """``new_tokens`` are sampled behind each row.

        Raises:
            ValueError: a special token that the model has no embedding of.
        """
        self.tokenizer, self.new_tokens = tokenizer, new_tokens
        self.embeddings = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[arg-type]
        self.positions: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.bound = rotary_bound(model)
        self.kept: set[str] = set()
        self.doubtful: set[str] = set()
        for name in ("eos_token", "pad_token"):
            token = getattr(tokenizer, f"{name}_id")
            if token is not None and token >= self.embeddings:
                raise ValueError(
                    f"the {name} has the id {token}, and the model has {self.embeddings} embeddings: the tokenizer of "
                    f"{tokenizer.name_or_path!r} does not fit it"
                )

    def require(self, messages: Sequence[Message], tokens: Sequence[int]) -> None:
        """Raise ValueError for tokens that the model cannot read, or a character that the tokenizer drops."""
        self.require_tokens(tokens)
        for message in messages:
            if isinstance(message.get("content"), str | list):
                self._require_kept(content_of(message))

    def require_tokens(self, tokens: Sequence[int]) -> None:
        """Raise ValueError for a token without an embedding, or more tokens than positions."""
        if (least := min(tokens)) < 0:
            raise ValueError(f"a token id is at least 0, got {least}")
        if (largest := max(tokens)) >= self.embeddings:
            token = self.tokenizer.convert_ids_to_tokens(largest)
            raise ValueError(
                f"the tokenizer gives the id {largest} ({token!r}), and the model has {self.embeddings} embeddings: "
                "the tokenizer is of another model"
            )
        more = f" and {self.new_tokens} are sampled behind" if self.new_tokens else ""
        if self.positions is not None and len(tokens) + self.new_tokens > self.positions:
            raise ValueError(f"the row has {len(tokens)} tokens{more}; the model has {self.positions} positions")
        if self.bound is not None and len(tokens) + self.new_tokens > self.bound:
            raise ValueError(
                f"the row has {len(tokens)} tokens{more}; beyond {self.bound} tokens the model chooses its rotary "
                "frequencies by the longest row of a call, and every row beside it would change"
            )

    def _require_kept(self, text: str) -> None:
        for character in set(text) - self.kept:
            if character not in self.doubtful and _times(character, self._again(character)):
                self.kept.add(character)
                continue
            # Alone it may be normalised away, as a space is.
            self.doubtful.add(character)
            again = self._again(text)
            if _times(character, again.strip()) < _times(character, text.strip()):
                name = unicodedata.name(character, f"U+{ord(character):04X}")
                part = _part(text, character)
                raise ValueError(
                    f"the tokenizer loses the character {character!r} ({name}): {part!r} becomes "
                    f"{self._again(part)!r}; take the tokenizer that the model was trained with, or other rows"
                )

    def _again(self, text: str) -> str:
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        again = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        assert isinstance(again, str)
        return again


def _times(character: str, text: str) -> int:
    """How often the character is in the text; another way to write it, as a capital or a ligature, is the same."""
    one, many = (unicodedata.normalize("NFKC", piece).casefold() for piece in (character, text))
    return many.count(one)


def _part(text: str, around: str) -> str:
    place = max(0, text.find(around))
    return text[max(0, place - 20) : place + 40]
