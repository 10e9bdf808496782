"""Rows as a loss reads them: encoded for a model, counted and checked, with a remark on what changes no token."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedTokenizerBase

from rl_bridge.data.comparisons import Comparison, PairBatch
from rl_bridge.data.examples import Example, examples_of
from rl_bridge.data.messages import Chat, chat_of
from rl_bridge.data.rows import refuse
from rl_bridge.data.token_batch import TokenBatch
from rl_bridge.data.trajectory import Trajectory
from rl_bridge.data.unread_keys import remark_on_keys
from rl_bridge.models.encoding import encode_completion, encode_row
from rl_bridge.models.model_source import ModelSource
from rl_bridge.models.row_checks import chat_of_row, check_rows, pad_with_no_end, remark_on_words
from rl_bridge.modules.comparison import REWARD_LOSSES, UNMATCHED, ComparisonLoss

Batch = TypeVar("Batch", bound=TokenBatch | PairBatch)
_tokenizers = WeakTensorKeyDictionary()
"""Who encoded a batch, by the tensor of its tokens: a batch travels to the workers, and this stays here."""


def marked(batch: Batch, tokenizer: PreTrainedTokenizerBase) -> Batch:
    """The same batch, of which ``encoder_of`` gives the tokenizer."""
    _tokenizers[_tokens(batch)] = tokenizer
    return batch


def encoder_of(batch: TokenBatch | PairBatch) -> PreTrainedTokenizerBase | None:
    """The tokenizer of ``marked``; None for a batch that was made elsewhere, or cut since."""
    return _tokenizers.get(_tokens(batch))


def _tokens(batch: TokenBatch | PairBatch) -> Tensor:
    return (batch.completions if isinstance(batch, PairBatch) else batch).tokens


def encoded(
    source: ModelSource,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[dict],
    *,
    apply_chat_template: bool = True,
    max_length: int | None = None,
) -> tuple[list[Trajectory], int]:
    """The rows as tokens, once for the whole run, and the number of rows that are left out for their length.

    Raises:
        ValueError: rows that cannot be encoded or that the model cannot read, the first few of them; or none is short
            enough.
    """
    trajectories: list[Trajectory] = []
    refusals: list[str] = []
    for row in rows:
        try:
            trajectories.append(encode_row(tokenizer, row, apply_chat_template=apply_chat_template))
        except ValueError as error:
            refusals.append(f"{row.get('_where', 'a row')}: {error}")
    refuse(refusals, len(rows))
    short = [t for t in trajectories if max_length is None or len(t.tokens) <= max_length]
    if not short:
        raise ValueError(f"all of {len(rows)} rows are longer than max_length {max_length}")
    in_order = iter(short)
    check_rows(source, tokenizer, [t.row for t in short], lambda _: ((t := next(in_order)).messages, t.tokens))
    return short, len(rows) - len(short)


def encoded_comparisons(
    source: ModelSource,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Comparison],
    loss: ComparisonLoss,
    *,
    apply_chat_template: bool = True,
    max_length: int | None = None,
) -> list[Example]:
    """The comparisons as the loss reads them, without those that are too long.

    Raises:
        ValueError: as ``examples_of`` and ``check_rows`` do.
    """
    # A reward is read at the end of the template's text, where a classifier of transformers reads.
    to_end = loss.name in REWARD_LOSSES
    encode = partial(encode_completion, tokenizer, apply_chat_template=apply_chat_template, to_end=to_end)
    unmatched = loss.name in UNMATCHED
    examples = examples_of(rows, loss.form, encode, unmatched=unmatched, what=loss.name, longest=max_length)
    completions = [{**t.row, "trajectory": t} for example in examples for t in example.completions]
    check_rows(source, tokenizer, completions, lambda row: (row["trajectory"].messages, row["trajectory"].tokens))
    return examples


def remark_on_unread(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Comparison], apply_chat_template: bool) -> None:
    """Name keys of messages, tools and the like that change no token, and words that the chat template leaves out."""

    def encode(row: Mapping[str, Any]) -> list[int]:
        tokens: list[int] = []
        for completion in row["completions"]:
            trajectory = encode_completion(tokenizer, Chat.of(row), completion, apply_chat_template=apply_chat_template)
            tokens += trajectory.tokens
        return tokens

    records = [
        {
            **chat_of(row.prompt).row(),
            "completions": [*row.completions, *(() if row.gold is None else (row.gold,))],
            "_where": row.where,
        }
        for row in rows
    ]
    remark_on_keys(records, encode)
    if apply_chat_template:
        remark_on_words(
            tokenizer, records, lambda row: [chat_of_row({**row, "response": c}) for c in row["completions"]]
        )


def has_roles(row: Comparison) -> bool:
    """Whether any text of the row is a conversation."""
    return not all(isinstance(text, str) for text in (chat_of(row.prompt).prompt, *row.completions))


def pad_of_rewards(
    source: ModelSource, tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], *, templated: bool
) -> int:
    """The pad token of a reward model on these examples; the tokenizer is made one that such a model is read with.

    ``templated``: whether the chat template has rendered any of the rows.
    """
    pad = pad_with_no_end(tokenizer, source, (t.tokens for example in examples for t in example.completions))
    if not templated:
        tokenizer.chat_template = None  # whoever reads the folder is to render what was trained on
    return pad
