"""Prompts and completions → token ids, once; nothing is ever decoded and encoded again."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rl_bridge.data.messages import UNTRAINED, Chat, chat_of, is_trained, shortened
from rl_bridge.data.rows import RESPONSES, missing, response_field, text_of
from rl_bridge.data.trajectory import Message, Prompt, Trajectory
from rl_bridge.models.chat_templates import next_header, rendered, spans, template_of
from rl_bridge.models.left_out import require_every, require_whole
from rl_bridge.models.unwritten_calls import require_calls


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, *, apply_chat_template: bool = True) -> list[int]:
    """Text, messages (through the tokenizer's chat template) or token ids → token ids. A ``Chat`` has tools for them.

    Text gets the tokens that the tokenizer puts before one, as the beginning of a sequence, unless the text has it. An
    end of sequence that the tokenizer puts behind is left out: the completion follows. Without ``apply_chat_template``
    the contents of messages are concatenated as one text.

    Raises:
        ValueError: the prompt is none of these, the tokenizer or its template refuses it, or the template leaves out a
            whole message.
    """
    chat = chat_of(prompt)
    ids: Any = chat.prompt
    if isinstance(chat.prompt, str):
        ids = _beginning(tokenizer, chat.prompt)
    elif chat.prompt and isinstance(chat.prompt[0], Mapping):
        if apply_chat_template:
            text = rendered(tokenizer, chat, generation_prompt=True)
            require_every(tokenizer, chat, text, generation_prompt=True)
            ids = _encode(tokenizer, text, "prompt")
        else:
            ids = _beginning(tokenizer, "".join(content_of(message) for message in chat.prompt))
    of_row = ids is chat.prompt  # else the tokenizer's, which are numbers
    if not ids or (of_row and not all(isinstance(token, int) for token in ids)):
        raise ValueError(f"a prompt must be text, messages or token ids and not be empty, got {chat.prompt!r}")
    return list(ids)


def messages_of(prompt: Prompt) -> tuple[Message, ...]:
    """The prompt as messages: text is the user's, token ids are none."""
    turns = chat_of(prompt).prompt
    if isinstance(turns, str):
        return ({"role": "user", "content": turns},)
    return tuple(message for message in turns if isinstance(message, Mapping))


def encode_row(
    tokenizer: PreTrainedTokenizerBase,
    row: Mapping[str, Any],
    *,
    apply_chat_template: bool = True,
    to_end: bool = False,
    require_messages: bool = True,
) -> Trajectory:
    """The row as if the policy had drawn what the assistant says: the loss counts these tokens, each turn with its end.

    A row has ``messages``, or a ``prompt`` (text, messages, token ids) and ``response``, ``completion`` or ``answer``.
    Messages go through the chat template, with the row's ``tools`` and ``chat_template_kwargs``; each part is encoded
    once, behind the tokens before. Text gets the end-of-sequence token. Without ``apply_chat_template`` contents are
    concatenated, and each turn of the assistant ends with that token. A turn whose message says ``loss`` False (rows
    are read so: ``weight`` 0 and others) does not count.

    With ``to_end`` a conversation ends as the template ends it, with a line's end behind the turn for example, and with
    nothing else: the tokens that a classifier of transformers is given. Else the last token is the last one drawn.
    Without ``require_messages`` a template may leave out whole messages, and calls of tools: whoever scores with
    another's model names these.

    Raises:
        ValueError: a character that the tokenizer does not know, messages that the template refuses, or a template
            that changes earlier tokens when a message is added, leaves out a message or a call that counts, or, without
            ``to_end``, begins another reply behind the last one or leaves out words of a turn that counts.
    """
    messages, alone = conversation_of(row)
    chat = Chat.of(row, messages)
    tokens: list[int] = []
    mask: list[bool] = []

    def add(ids: list[int], count: int = 0) -> None:
        tokens.extend(ids)
        mask.extend([True] * count + [False] * (len(ids) - count))

    def of(text: str, what: str) -> list[int]:
        return _encode(tokenizer, text, what, behind=tokens) if tokens else _beginning(tokenizer, text)

    def add_turn(text: str, what: str, *, counts: bool = True) -> None:
        end, number = str(tokenizer.eos_token), _end(tokenizer)
        ids = of(text.rstrip() if text.rstrip().endswith(end) else text, what)
        ids = ids if ids[-1:] == [number] else [*ids, number]  # the text has its own
        add(ids, len(ids) if counts else 0)

    if alone is not None:
        add(encode_prompt(tokenizer, row["prompt"]))
        add_turn(text_of(row[alone]), alone)
    elif not apply_chat_template:
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                if is_trained(message) and require_messages:
                    require_calls(None, chat, place, "")
                add_turn(content_of(message), "conversation", counts=is_trained(message))
            elif text := content_of(message):
                add(of(text, "conversation"))
    else:
        if not to_end:
            _require_end(tokenizer)
        turns = dict.fromkeys((place for place, message in enumerate(messages) if is_trained(message)), "")
        texts = list(spans(tokenizer, chat))
        if texts and require_messages:
            last = max(place for place, message in enumerate(messages) if message["role"] == "assistant")
            written = "".join(text for text, _ in texts)
            require_every(tokenizer, replace(chat, prompt=messages[: last + 1]), written, generation_prompt=False)
        special = special_ids(tokenizer)
        for text, place in texts:
            ids = _encode(tokenizer, text, "conversation", behind=tokens)
            add(ids, _length_of_turn(tokenizer, ids, special) if place in turns else 0)
            if place in turns:
                turns[place] = text
        if any(mask[-1:]) and tokens[-1] not in special and not to_end:
            add([_end(tokenizer)], 1)  # the template ends no turn
        if not any(mask) and any(message["role"] == "assistant" for message in messages):
            raise ValueError(f"{template_of(tokenizer)} writes nothing of what the assistant says: nothing to learn")
        for place, text in turns.items():
            if not to_end:
                require_whole(tokenizer, chat, place, text)
            if require_messages:
                require_calls(tokenizer, chat, place, text)
    return _trajectory(tokens, mask, row, messages, tuple(chat.tools), to_end=to_end)


def _require_end(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a template that begins another reply behind the last one."""
    if (header := next_header(tokenizer)) is not None:
        raise ValueError(
            f"{template_of(tokenizer)} writes {header!r} behind the last reply too, also where no other reply is to "
            "follow: training would teach that as the end of a turn. Give it --chat-template FILE, with "
            "{% if add_generation_prompt %} around what begins a reply behind the messages; or "
            "apply_chat_template=false concatenates the contents"
        )


def encode_completion(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    completion: str | Sequence[Message],
    *,
    apply_chat_template: bool = True,
    to_end: bool = False,
) -> Trajectory:
    """A prompt and one completion of it. The completion's tokens count; what the assistant said before does not.

    ``to_end``: as in ``encode_row``.

    Raises:
        ValueError: as ``encode_row`` does.
    """
    chat, prompted = chat_of(prompt), messages_of(prompt)
    row = {**chat.row(), "response": completion if isinstance(completion, str) else list(completion)}
    if any(map(is_trained, prompted)):
        row["prompt"] = [{**message, UNTRAINED: False} if is_trained(message) else message for message in prompted]
    trajectory = encode_row(tokenizer, row, apply_chat_template=apply_chat_template, to_end=to_end)
    return replace(trajectory, messages=(*prompted, *trajectory.messages[len(prompted) :]))


def content_of(message: Mapping[str, Any]) -> str:
    """The text of a message; of a content in parts, their texts.

    Raises:
        ValueError: the content is no text.
    """
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str) and all("text" in part for part in content):
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ValueError(f"a message without text cannot be concatenated: {dict(message)!r}")
    return content


def conversation_of(row: Mapping[str, Any]) -> tuple[tuple[Message, ...], str | None]:
    """The row's messages; and the field of the response, if prompt and response stand there without roles."""
    prompt, field = row.get("prompt"), response_field(row)
    if row.get("messages") and (missing(row, "prompt") or field is None):
        return tuple(row["messages"]), None
    if prompt is None or field is None:
        raise ValueError(
            f"a row has messages, or prompt and one of {', '.join(RESPONSES)}; got {sorted(map(str, row))}"
        )
    in_roles = isinstance(row[field], list)
    replies = row[field] if in_roles else [{"role": "assistant", "content": text_of(row[field])}]
    prompted = messages_of(prompt)
    alone = not in_roles and (isinstance(prompt, str) or not prompted)
    return (*prompted, *replies), field if alone else None


def _trajectory(
    tokens: list[int],
    mask: list[bool],
    row: Mapping[str, Any],
    messages: tuple,
    tools: tuple[Any, ...],
    *,
    to_end: bool,
) -> Trajectory:
    if True not in mask[1:]:
        raise ValueError(f"the row has no token of the assistant to learn: {shortened(messages)}")
    # What stands behind the last drawn token teaches nothing and costs time.
    length = len(mask) if to_end else len(mask) - mask[::-1].index(True)
    tokens, mask = tokens[:length], [False, *mask[1:length]]
    return Trajectory(
        tokens=tuple(tokens),
        loss_mask=tuple(mask),
        logprobs=(0.0,) * length,
        weights_versions=tuple(0 if counts else -1 for counts in mask),
        finish_reason="stop",
        turns=sum(message["role"] == "assistant" for message in messages),
        row=row,
        messages=messages,
        tools=tools,
    )


def _beginning(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Text at the start of a sequence, with the special tokens that the tokenizer puts before one."""
    ids = _encode(tokenizer, text, "prompt", add_special_tokens=True)
    twice = len(ids) > 1 and ids[0] == ids[1]
    begins, ends = twice and ids[0] == tokenizer.bos_token_id, ids[-1:] == [tokenizer.eos_token_id]
    if not begins and not ends:
        return ids
    plain = _encode(tokenizer, text, "prompt")
    if begins and plain[:1] == ids[:1]:
        return plain  # the text has its own
    return ids[:-1] if ends and ids[:-1][-len(plain) :] == plain else ids


def _encode(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    what: str,
    *,
    behind: Sequence[int] = (),
    add_special_tokens: bool = False,
) -> list[int]:
    """Token ids of text that stands ``behind`` other tokens."""
    try:
        ids = _ids(tokenizer, text, add_special_tokens)
        if behind and ids and _puts_space(tokenizer, ids[0], text):
            # That space is for a text that begins: encoded behind something, this text begins nothing.
            special: Any = tokenizer.convert_ids_to_tokens(behind[-1])
            before = special if behind[-1] in special_ids(tokenizer) else "\n"
            ids = _ids(tokenizer, before + text)[len(_ids(tokenizer, before)) :]
    except Exception as error:  # the tokenizers library raises bare Exception for a character it does not know
        raise ValueError(f"the tokenizer cannot encode the {what} {text!r}: {error}") from error
    return ids


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, special: bool = False) -> list[int]:
    """The numbers of ``tokenizer(text)``, without what transformers does around each call where that changes nothing.

    What it does takes ten times as long as a short text's tokens. A tokenizer whose class has a call of its own, or one
    that would first have to be set, is called.
    """
    kind = type(tokenizer)
    if (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and kind.__call__ is PreTrainedTokenizerBase.__call__
        and kind._encode_plus is PreTrainedTokenizerFast._encode_plus
        and not hasattr(kind, "_switch_to_input_mode")
    ):
        backend = tokenizer.backend_tokenizer
        unset = backend.truncation is None and backend.padding is None
        if unset and backend.encode_special_tokens == tokenizer.split_special_tokens:
            return backend.encode(text, add_special_tokens=special).ids
    ids: Any = tokenizer(text, add_special_tokens=special).input_ids
    return ids


def _puts_space(tokenizer: PreTrainedTokenizerBase, first: int, text: str) -> bool:
    """Whether a tokenizer of SentencePiece's kind has put a space before a text that has none."""
    token: Any = tokenizer.convert_ids_to_tokens(first)
    return token.startswith("▁") and not text.startswith((" ", "▁"))


def _length_of_turn(tokenizer: PreTrainedTokenizerBase, ids: list[int], special: set[int]) -> int:
    """Tokens of a turn up to its end, as the policy draws them: not the line's end that a template writes behind."""
    end = next((place for place in range(len(ids), 0, -1) if ids[place - 1] in special), len(ids))
    # A special token in the middle, as </think>, ends no turn.
    return len(ids) if str(tokenizer.decode(ids[end:])).strip() else end


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The named special tokens, and those that were added as special under no name: a template's marks may be these."""
    added = tokenizer.added_tokens_decoder
    return {*tokenizer.all_special_ids, *(token for token, about in added.items() if about.special)}


def _end(tokenizer: PreTrainedTokenizerBase) -> int:
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no eos_token, with which a completion ends")
    assert isinstance(tokenizer.eos_token_id, int)
    return tokenizer.eos_token_id
