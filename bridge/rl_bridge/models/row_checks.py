"""Rows that a model can take: within its positions and rotary frequencies, ended by no pad token, templates that fit.

With the kinds "dynamic" and "longrope" transformers chooses the frequencies of a whole call by its largest position: a
row's values depend on the rows beside it, and cached keys keep the frequencies of the call that read them. As long as
no row is longer than the bound, every call has the short frequencies.
"""

import copy
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rl_bridge.common.terminal import remark
from rl_bridge.data.messages import Chat, shortened
from rl_bridge.data.rows import imitated_field, missing, policy_row, refuse, supervised_row, unread_responses
from rl_bridge.data.trajectory import Message
from rl_bridge.data.unread_keys import SETTLED, SUPERVISED_KEYS, TRIES, KeyMemory, UnreadColumns, remark_on_keys
from rl_bridge.models.chat_templates import rendered, template_of
from rl_bridge.models.encoding import content_of, conversation_of, encode_prompt, encode_row, messages_of
from rl_bridge.models.left_out import ADVICE, left_out
from rl_bridge.models.model_source import ModelSource
from rl_bridge.models.unwritten_calls import unwritten_call, writes_calls

# A model's positions. Rotary frequencies that depend on the longest row of a call, and rows so short that none does.

POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
"""Names of the number of positions in the configurations of transformers' families."""

LONG = ("longrope", "su")
"""Kinds with short and long factors; early Phi-3 says "su"."""


def positions_of(model: nn.Module) -> int | None:
    """Tokens that a sequence of this model may have: its positions. None: the model counts none."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    counts = (getattr(config, name, None) for name in POSITIONS)
    return next((count for count in counts if isinstance(count, int) and count > 0), None)


def longest_sequence(model: nn.Module, engine: int | None = None) -> int | None:
    """Tokens of the longest sequence that is drawn from this model: its positions, or its rotary bound if lower.

    ``engine``: tokens that an engine beside the trainer holds. vLLM counts the positions of "linear" and "dynamic"
    frequencies by their factor, and does not know the bound of "longrope"; the trainer reads what it draws. None: there
    is no limit.
    """
    bounds = (engine, positions_of(model), rotary_bound(model))
    return min((bound for bound in bounds if bound is not None), default=None)


def rotary_bound(model: nn.Module) -> int | None:
    """Tokens that a row of this model may have at most, if its values shall not depend on the rows beside it.

    None: the model's frequencies are the same for every call. "longrope" is bounded by its
    ``original_max_position_embeddings``. "dynamic" is bounded by one less than ``max_position_embeddings``: a call of
    exactly that length keeps the frequencies that an earlier, longer call left in the model.
    """
    return min((bound for config in _configs(model) for bound in _bounds(config)), default=None)


def _configs(model: nn.Module) -> list[Any]:
    """Configurations of the model's own text and of its rotary modules, each once."""
    rotary = [module for module in model.modules() if hasattr(module, "rope_type")]
    configs = [module.config for module in rotary if hasattr(module, "config")]
    model_config: Any = getattr(model, "config", None)
    if model_config is not None:
        configs.append(
            model_config.get_text_config(decoder=True) if hasattr(model_config, "get_text_config") else model_config
        )
    return list({id(config): config for config in configs}.values())


def _bounds(config: Any) -> Iterator[int]:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    of_layers = [x for x in parameters.values() if isinstance(x, Mapping)]
    for layer in of_layers or [parameters]:
        kind = layer.get("rope_type", layer.get("type", "default"))
        if kind in LONG or "long_mscale" in layer:
            original = layer.get("original_max_position_embeddings")
            yield original or getattr(config, "original_max_position_embeddings", config.max_position_embeddings)
        elif "dynamic" in kind:
            yield config.max_position_embeddings - 1


# The pad token of a model that is read at the end of a row: one with which no row ends.

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
    row_tokens: set[int] = set()
    eos: Any = tokenizer.eos_token_id
    ends = {eos}
    for row in rows:
        row_tokens.update(row)
        ends.add(row[-1])
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id in ends:
        with torch.device("meta"):
            embeddings = len(cast(Tensor, source.empty().get_input_embeddings().weight))
        for token in _candidates(tokenizer, embeddings, row_tokens):
            number: Any = tokenizer.get_vocab().get(token)
            if number not in ends and (number is None or number < embeddings):
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


def _candidates(tokenizer: PreTrainedTokenizerBase, embeddings: int, row_tokens: set[int]) -> Iterator[str]:
    """Tokens to pad with, the best first."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    yield from sorted((token for token in vocabulary if _NAMED.fullmatch(token)), key=lambda token: (len(token), token))
    larger = copy.deepcopy(tokenizer)
    if larger.add_special_tokens({"pad_token": _NEW}) and larger.get_vocab()[_NEW] < embeddings:
        yield _NEW
    template = str(tokenizer.chat_template)
    special = [added.content for added in tokenizer.added_tokens_decoder.values() if added.special]
    free = [token for token in special if vocabulary[token] not in row_tokens and token not in template]
    yield from sorted(free, key=lambda token: (_RESERVED.search(token) is None, vocabulary[token]))
    yield from (token for token in (tokenizer.unk_token, tokenizer.bos_token) if isinstance(token, str))


# Checks before training starts: rows that do not fit the model or its tokenizer.

Encode = Callable[[Mapping[str, Any]], tuple[Sequence[Message], Sequence[int]]]
"""The messages of a row whose text the model reads, and their token ids."""


def prompted(tokenizer: PreTrainedTokenizerBase) -> Encode:
    """Rows that are sampled from: their prompts."""
    return lambda row: (messages_of(row["prompt"]), encode_prompt(tokenizer, Chat.of(row)))


def supervised(tokenizer: PreTrainedTokenizerBase, *, apply_chat_template: bool = True) -> Encode:
    """Rows that are imitated."""

    def encode(row: Mapping[str, Any]) -> tuple[Sequence[Message], Sequence[int]]:
        trajectory = encode_row(tokenizer, row, apply_chat_template=apply_chat_template)
        return conversation_of(row)[0], trajectory.tokens

    return encode


def remark_on_prompts(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Mapping[str, Any]], memory: KeyMemory | None = None
) -> None:
    """Name once what no prompt's tokens have: keys that nothing reads, and words that the chat template leaves out.

    ``memory``: as ``remark_on_keys`` has it.
    """
    remark_on_keys(rows, lambda row: prompted(tokenizer)(row)[1], memory)
    remark_on_words(tokenizer, rows, lambda row: [Chat.of(row)], generation_prompt=True)
    _all_looked_at([Chat.of(row) for row in rows], memory)


def remark_on_conversations(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Mapping[str, Any]],
    memory: KeyMemory | None = None,
    *,
    apply_chat_template: bool = True,
) -> None:
    """Name once what no tokens of rows that are imitated have, as ``remark_on_prompts`` does."""
    remark_on_keys(rows, lambda row: supervised(tokenizer, apply_chat_template=apply_chat_template)(row)[1], memory)
    if apply_chat_template:
        remark_on_words(tokenizer, rows, lambda row: [chat_of_row(row)])
        _all_looked_at([chat_of_row(row) for row in rows], memory)


def _all_looked_at(chats: Iterable[Chat], memory: KeyMemory | None) -> None:
    """Remember the roles of chats of which what is left out was named: later rows are among these."""
    if memory is not None:
        messages = (message for chat in chats if not isinstance(chat.prompt, str) for message in chat.prompt)
        memory.words.update(dict.fromkeys((m["role"] for m in messages if isinstance(m, Mapping)), SETTLED))


def imitated_rows(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows to sample from as a supervised step reads them; a response that is not the imitated one is named once.

    Raises:
        ValueError: rows without one response, as messages that go on in another way than their answer: the first few.
    """
    read: list[dict[str, Any]] = []
    bad: list[str] = []
    beside: dict[tuple[str, str], list[str]] = {}
    total, unread = 0, UnreadColumns(SUPERVISED_KEYS)
    for total, row in enumerate(rows, 1):
        where = row.get("_where", f"row {total}")
        unread.look(row, where)
        try:
            read.append(supervised_row(row))
        except ValueError as error:
            bad.append(f"{where}: {error}")
            continue
        for other in unread_responses(read[-1]):
            beside.setdefault((imitated_field(read[-1]), other), []).append(where)
    refuse(bad, total)
    unread.remark(" by the warm start")
    for (field, other), places in beside.items():
        remark(
            f"the warm start imitates `{field}` and not `{other}`, which says something else: {len(places)} of {total} "
            f"rows have both, first {places[0]}"
        )
    return read


def chat_of_row(row: Mapping[str, Any]) -> Chat:
    """The row's conversation as the chat template reads it; of a prompt and a response without roles, the prompt."""
    messages, alone = conversation_of(row)
    return Chat.of(row, messages if alone is None else row["prompt"])


def remark_on_words(
    tokenizer: PreTrainedTokenizerBase,
    rows: Iterable[Mapping[str, Any]],
    chats: Callable[[Mapping[str, Any]], Iterable[Chat]],
    *,
    generation_prompt: bool = False,
    memory: KeyMemory | None = None,
) -> None:
    """Name once by role what the chat template leaves out of the messages: the rows, the characters, the first words.

    ``chats`` gives the conversations of a row, of which the one that loses most counts. With ``generation_prompt`` they
    are prompts, behind which the model replies. With ``memory`` rows come a few at a time: ``TRIES`` messages of a role
    are looked at closely, the others for their words in the text, and none of a role that was named.
    """
    count: Counter[str] = Counter()
    characters: Counter[str] = Counter()
    first: dict[str, str] = {}
    tries: Counter[str] = Counter() if memory is None else memory.words
    total = 0
    for total, row in enumerate(rows, 1):
        lengths: Counter[str] = Counter()
        for chat in chats(row):
            of_chat: Counter[str] = Counter()
            for role, words in _words_left_out(tokenizer, chat, tries, generation_prompt):
                of_chat[role] += len(words)
                first.setdefault(role, f"{row.get('_where', f'row {total}')}, {shortened(words, 80)}")
            lengths |= of_chat  # completions of one prompt share what it loses
        count.update(lengths.keys())
        characters.update(lengths)
    for role, rows_with in count.items():
        if memory is not None:
            tries[role] = SETTLED
        remark(
            f"{template_of(tokenizer)} leaves out {characters[role]} characters of what {role} says in {rows_with} of "
            f"{total} rows: first {first[role]}; {ADVICE}"
        )


def _words_left_out(
    tokenizer: PreTrainedTokenizerBase, chat: Chat, tries: Counter[str], generation_prompt: bool
) -> Iterator[tuple[str, str]]:
    """(Role, words) of each message of which the template leaves something out. ``tries``: messages by their role.

    Of the first ones of a role nothing is taken for written because the same words stand elsewhere in the text. Of a
    role that is ``SETTLED`` none is looked at. Calls of tools are words, too, where the template writes any.
    """
    if isinstance(chat.prompt, str) or not all(isinstance(message, Mapping) for message in chat.prompt):
        return
    if all(tries[message["role"]] >= SETTLED for message in chat.prompt):
        return
    try:
        text = rendered(tokenizer, chat, generation_prompt=generation_prompt)
    except ValueError:  # a row that the template refuses is refused with its words
        return
    for place, message in enumerate(chat.prompt):
        if tries[message["role"]] >= SETTLED:
            continue
        tries[message["role"]] += 1
        expected = None if tries[message["role"]] <= TRIES else text
        if words := left_out(tokenizer, chat, place, expected, generation_prompt=generation_prompt):
            yield message["role"], words
        call = unwritten_call(tokenizer, chat, place, text) if message.get("tool_calls") else None
        if call is not None and writes_calls(tokenizer, chat, place):
            yield message["role"], f"the call {call}"


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
        contents = [] if isinstance(row.get("prompt"), str) else [str(message.get("content")) for message in messages]
        marked += [(where, mark) for mark in marks if any(mark in text for text in contents)][:1]
    refuse(bad, total)
    if marked:
        where, mark = marked[0]
        remark(
            f"{len(marked)} of {total} rows have control tokens in the content of a message, which the model reads as "
            f"turns: first {where}, {mark!r}"
        )


def require_as_long(
    beside: ModelSource,
    source: ModelSource,
    tokenizer: PreTrainedTokenizerBase,
    rows: Iterable[Mapping[str, Any]],
    new_tokens: int,
    conversation: float | None,
    *,
    role: str,
) -> None:
    """Refuse a model beside the policy that has fewer positions than what the policy says may take.

    Args:
        beside: of the model that reads the policy's completions.
        source: of the policy.
        tokenizer: the policy's.
        rows: with the prompts.
        new_tokens: are sampled behind each row.
        conversation: tokens of the longest conversation, ∞ for one without a limit; None where there is one turn.
        role: of the model beside the policy.

    Raises:
        ValueError: with the first few rows, or with both numbers.
    """
    with torch.device("meta"):
        positions, of_policy = longest_sequence(beside.empty()), longest_sequence(source.empty())
    if positions is None or (of_policy is not None and positions >= of_policy):
        return
    if conversation is not None and min(conversation, of_policy or math.inf) > positions:
        raise ValueError(
            f"the {role} has {positions} positions, and a conversation may have more tokens: take "
            f"--max-trajectory-tokens {positions}, or another {role}"
        )
    if conversation is None:
        try:
            check_rows(beside, tokenizer, rows, prompted(tokenizer), new_tokens=new_tokens)
        except ValueError as error:
            raise ValueError(f"the {role} cannot read what the policy may say: {error}") from error


def require_room(
    longest: int, tokenizer: PreTrainedTokenizerBase, rows: Iterable[Mapping[str, Any]], new_tokens: int
) -> None:
    """Refuse rows behind which an engine that holds ``longest`` tokens cannot draw ``new_tokens``.

    Raises:
        ValueError: the first few of them.
    """
    encode, bad, total = prompted(tokenizer), [], 0
    for total, row in enumerate(rows, 1):
        where = row.get("_where", f"row {total}")
        try:
            count = len(encode(policy_row(row) if missing(row, "prompt") else row)[1])
        except ValueError as error:
            bad.append(f"{where}: {error}")
            continue
        if count + new_tokens > longest:
            bad.append(
                f"{where}: the row has {count} tokens and {new_tokens} are sampled behind; the engine holds {longest} "
                "(--rollout.vllm.max-model-len, or the model's positions)"
            )
    refuse(bad, total)


class Fits:
    """Whether a row fits a model, with what is known of the characters of the rows before."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, new_tokens: int = 0) -> None:
        """``new_tokens`` are sampled behind each row.

        Raises:
            ValueError: a special token that the model has no embedding of.
        """
        self.tokenizer, self.new_tokens = tokenizer, new_tokens
        self.embeddings = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[arg-type]
        self.positions = positions_of(model)
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
            token = f" ({self.tokenizer.convert_ids_to_tokens(largest)!r})" if largest < 2**31 else ""
            raise ValueError(
                f"the row has the token id {largest}{token}, and the model has {self.embeddings} embeddings: the "
                "tokenizer, or the row's own ids, are of another model"
            )
        more = f" and {self.new_tokens} are sampled behind" if self.new_tokens else ""
        if self.positions is not None and len(tokens) + self.new_tokens > self.positions:
            less = more and ": a smaller --policy.sampling.max-new-tokens (max_new_tokens), or shorter rows"
            raise ValueError(f"the row has {len(tokens)} tokens{more}; the model has {self.positions} positions{less}")
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
            decoded = self._again(text)
            if _times(character, decoded.strip()) < _times(character, text.strip()):
                name = unicodedata.name(character, f"U+{ord(character):04X}")
                part = _part(text, character)
                raise ValueError(
                    f"the tokenizer loses the character {character!r} ({name}): {part!r} becomes "
                    f"{self._again(part)!r}; take the tokenizer that the model was trained with, or other rows"
                )

    def _again(self, text: str) -> str:
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        decoded = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        assert isinstance(decoded, str)
        return decoded


def _times(character: str, text: str) -> int:
    """How often the character is in the text; another way to write it, as a capital or a ligature, is the same."""
    needle, folded = (unicodedata.normalize("NFKC", piece).casefold() for piece in (character, text))
    return folded.count(needle)


def _part(text: str, around: str) -> str:
    place = max(0, text.find(around))
    return text[max(0, place - 20) : place + 40]
