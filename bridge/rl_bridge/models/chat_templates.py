"""Chat templates: the text of a conversation as a template writes it, and the spans of its messages."""

import functools
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from rl_bridge.data.messages import Chat, chat_of, function_of, shown
from rl_bridge.data.trajectory import Message
from rl_bridge.models.template_limits import TooMuch, bounded

# A conversation as text, message by message: a chat template must only add to what the model has already seen.

MARK = "918273645546372819"
"""A content that no template changes: it has no case, no space and no sign."""
NULL_TRIES = 32
"""Conversations with calls that are rendered with an empty content and with None, until one of these is written."""
PRIVATE = {MARK: [MARK]}
"""Arguments of a call that no conversation has."""
ADVICE = (
    "train with apply_chat_template=false, which concatenates the contents, or with a --chat-template FILE of your own "
    "that only adds text"
)


class ChangedEarlierText(ValueError):
    """A chat template that renders earlier messages in another way when a message is added."""


def read_template(file: Path) -> str:
    """The text of a chat template's file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is empty, no UTF-8, or JSON, as the file of a tokenizer that has a template inside.
    """
    if not file.is_file():
        raise FileNotFoundError(f"no such chat template: {file}")
    try:
        text = file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the chat template {file} is not UTF-8: {error}") from error
    if not text.strip():
        raise ValueError(f"the chat template {file} is empty, so every conversation would be")
    try:
        about = json.loads(text)
    except ValueError:
        return text
    if isinstance(about, dict | list):
        way_on = "save the text of its key chat_template as a file" if "chat_template" in about else "give a template"
        raise ValueError(f"the chat template {file} is JSON, and a template is Jinja: {way_on}")
    return text


def use_template(tokenizer: PreTrainedTokenizerBase, file: Path) -> None:
    """Give the tokenizer the chat template of a file, in place of its own.

    Raises:
        FileNotFoundError: no such file.
        ValueError: as ``read_template``; or the text is no Jinja, with the line.
    """
    tokenizer.chat_template = read_template(file)
    tokenizer.template_file = str(file)
    try:
        _bounded(tokenizer, lambda: tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False))
    except TemplateSyntaxError as error:
        raise ValueError(f"the chat template {file}, line {error.lineno}: {error.message}") from error
    except TooMuch:
        raise
    except Exception:  # of Jinja, or of Python in what it computes: 1 / 0, an endless macro
        return  # it may refuse these words: the rows' own are rendered one by one


def rendered(
    tokenizer: PreTrainedTokenizerBase, conversation: Sequence[Message] | Chat, *, generation_prompt: bool
) -> str:
    """The text of a conversation by the tokenizer's chat template.

    Raises:
        ValueError: the tokenizer has no chat template, or the template refuses the messages: with its words.
    """
    if not tokenizer.chat_template:
        name = f"the tokenizer {tokenizer.name_or_path!r}" if tokenizer.name_or_path else "this tokenizer"
        raise ValueError(
            f"chat messages need a model with a chat template, and {name} has none; "
            "--chat-template FILE gives it one, apply_chat_template=false concatenates the contents"
        )
    chat = chat_of(conversation)
    chat = replace(chat, prompt=[shown(message) for message in chat.prompt])
    if any(map(_calls_alone, chat.prompt)) and _reads_null(tokenizer, chat):
        chat = replace(chat, prompt=[m | {"content": None} if _calls_alone(m) else m for m in chat.prompt])
    return _with_calls(tokenizer, replace(chat, prompt=_in_parts(tokenizer, list(chat.prompt))), generation_prompt)


def _with_calls(tokenizer: PreTrainedTokenizerBase, chat: Chat, generation_prompt: bool) -> str:
    """The text, with the arguments of calls as the template reads them: as objects or as JSON."""
    called = [arguments for message in chat.prompt for arguments in _arguments_of(message)]
    if not called:
        return _rendered(tokenizer, chat, generation_prompt)
    # Some templates write a call's arguments as JSON, and others add them to a text.
    in_text = replace(chat, prompt=[_with_arguments(message, _json) for message in chat.prompt])
    try:
        text = _rendered(tokenizer, chat, generation_prompt)
    except ValueError:
        return _rendered(tokenizer, in_text, generation_prompt)
    # Somebody may have said what Python prints: the template itself prints arguments that nobody has.
    if any(str(arguments) in text for arguments in called if arguments and str(arguments) != json.dumps(arguments)):
        private = replace(chat, prompt=[_with_arguments(message, lambda _: PRIVATE) for message in chat.prompt])
        if str(PRIVATE) in _rendered(tokenizer, private, generation_prompt):
            return _rendered(tokenizer, in_text, generation_prompt)
    return text


def _rendered(tokenizer: PreTrainedTokenizerBase, chat: Chat, generation_prompt: bool) -> str:
    variables: dict[str, Any] = {"strftime_now": _clock_of(tokenizer).strftime, **chat.arguments}
    try:
        text = _bounded(
            tokenizer,
            lambda: tokenizer.apply_chat_template(
                [dict(message) for message in chat.prompt],
                tools=list(chat.tools) or None,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **variables,
            ),
        )
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ValueError(
            "a tool that is a function needs a docstring with a line of each argument (Args:) and type hints, or is "
            f"given as its JSON schema: {error}"
        ) from error
    except Exception as error:  # of Jinja, or of Python in what it computes: 1 / 0, an endless macro
        roles = ", ".join(str(message.get("role")) for message in chat.prompt)
        raise ValueError(
            f"{template_of(tokenizer)} refuses messages of the roles {roles}: {_message_of(error)}; "
            "change the messages, or apply_chat_template=false concatenates the contents"
        ) from error
    assert isinstance(text, str)
    return text


# The memory of a tokenizer's templates: beside the tokenizer, so that no copy and no pickle carries it.

_memories: WeakKeyDictionary[Any, dict[Any, dict[Any, Any]]] = WeakKeyDictionary()


def memory_of(tokenizer: PreTrainedTokenizerBase, kind: str) -> dict[Any, Any]:
    """The memory of one kind that this process has of the tokenizer's present template.

    A tokenizer that no dictionary can hold has an empty one each time.
    """
    try:
        memory = _memories.setdefault(tokenizer, {})
    except TypeError:
        return {}
    return memory.setdefault((kind, _templates_of(tokenizer)), {})


# Contents in parts: templates of models that read images too go through a content part by part.


def _in_parts(tokenizer: PreTrainedTokenizerBase, messages: list[Any]) -> list[Any]:
    """The messages, with each text as a part where the template writes a role's words in that form alone."""
    texts = [isinstance(message.get("content"), str) for message in messages]
    roles = {message.get("role") for message, is_text in zip(messages, texts, strict=True) if is_text}
    if not (in_parts := {role for role in roles if _reads_parts(tokenizer, role)}):
        return messages
    return [
        {**message, "content": _part(message["content"])} if is_text and message.get("role") in in_parts else message
        for message, is_text in zip(messages, texts, strict=True)
    ]


def _reads_parts(tokenizer: PreTrainedTokenizerBase, role: Any) -> bool:
    """Whether the template writes what this role says in parts, and does not write a text; tried once."""
    memory = memory_of(tokenizer, "parts")
    if role not in memory:
        talk: list[Message] = [{"role": other, "content": "?"} for other in ("user", "assistant")]
        first = role in ("system", "developer")
        before = [] if first else _in_parts(tokenizer, talk[: ("user", "assistant", role).index(role)])
        behind = _in_parts(tokenizer, talk[:1]) if first else []
        writes = (
            _writes(tokenizer, [*before, {"role": role, "content": content}, *behind])
            for content in (MARK, _part(MARK))
        )
        memory[role] = not next(writes) and next(writes)
    return memory[role]


def _writes(tokenizer: PreTrainedTokenizerBase, messages: list[Any]) -> bool:
    try:
        return MARK in _rendered(tokenizer, Chat(messages), generation_prompt=True)
    except ValueError:  # rows are refused with the template's words
        return False


def _part(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


# The date that some templates write: one for a whole run, which a resumed run compares.

EPOCH = "SOURCE_DATE_EPOCH"
"""The environment variable with the seconds since 1970 of another date than today's (reproducible-builds.org)."""
_DATE = re.compile(r"strftime_now\s*\(\s*(?:(['\"])(.+?)\1)?")


def dates_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """The dates that the tokenizer's chat template writes, for the fingerprints of a run; empty without any."""
    formats = dict.fromkeys(match[2] or "%Y-%m-%d" for match in _DATE.finditer(_templates_of(tokenizer)))
    if not formats:
        return {}
    dates = ", ".join(map(_clock_of(tokenizer).strftime, formats))
    return {f"date that the chat template writes ({EPOCH}=SECONDS since 1970 gives a run its date)": dates}


def _clock_of(tokenizer: PreTrainedTokenizerBase) -> datetime:
    """The moment at which this process first wrote a date, also behind midnight, and wherever the tokenizer goes."""
    clock: datetime | None = getattr(tokenizer, "template_clock", None)
    if clock is None:
        clock = _moment()
        tokenizer.template_clock = clock
    return clock


@functools.cache
def _moment() -> datetime:
    seconds = os.environ.get(EPOCH, "")
    return datetime.fromtimestamp(int(seconds), UTC) if seconds.isdecimal() else datetime.now()


def _templates_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of all templates of the tokenizer."""
    templates = tokenizer.chat_template or ""
    return "\n".join(templates.values()) if isinstance(templates, Mapping) else templates


def _calls_alone(message: Mapping[str, Any]) -> bool:
    """Whether the message calls tools and has no text."""
    return bool(message.get("tool_calls")) and message.get("content") == ""


def _reads_null(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> bool:
    """Whether the template writes calls beside the content None alone, and not beside an empty one, as DeepSeek's.

    Tried with the conversation's own calls, of another tool, until one of the two forms is written.
    """
    memory = memory_of(tokenizer, "null")
    if "reads" in memory or memory.get("tries", 0) >= NULL_TRIES:
        return memory.get("reads", False)
    memory["tries"] = memory.get("tries", 0) + 1
    for content in ("", None):
        talk = [_renamed(message, content) if _calls_alone(message) else message for message in chat.prompt]
        try:
            is_written = MARK in _with_calls(tokenizer, replace(chat, prompt=_in_parts(tokenizer, talk)), False)
        except ValueError:  # a template may add the content to a text
            is_written = False
        if is_written:
            memory["reads"] = content is None
            break
    return memory.get("reads", False)


def _renamed(message: Message, content: Any) -> Message:
    """The message with this content, and with calls of a tool that no conversation has."""
    calls: Any = message["tool_calls"]
    renamed = [changed_call(call, name=MARK) if isinstance(call, Mapping) else call for call in calls]
    return {**message, "content": content, "tool_calls": renamed}  # type: ignore[dict-item]


def _arguments_of(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The arguments of the message's calls of tools, where they are objects."""
    called = (function_of(call)[1] for call in message.get("tool_calls") or ())
    return (arguments for arguments in called if isinstance(arguments, dict))


def _with_arguments(message: Message, change: Callable[[dict], Any]) -> Message:
    """The message with other arguments of its calls, where they are objects."""
    calls: Any = message.get("tool_calls")
    if not calls:
        return message
    changed = [
        changed_call(call, arguments=change(arguments)) if isinstance(arguments := function_of(call)[1], dict) else call
        for call in calls
    ]
    return {**message, "tool_calls": changed}  # type: ignore[dict-item]


def changed_call(call: Mapping[str, Any], **changed: Any) -> dict[str, Any]:
    """The call with another name or other arguments."""
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": {**call["function"], **changed}}
    return {**call, **changed}


def _json(arguments: dict) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _bounded(tokenizer: PreTrainedTokenizerBase, render: Callable[[], Any]) -> str:
    """A tokenizer may have several templates: the limits are those of all."""
    return bounded(render, _templates_of(tokenizer), template_of(tokenizer))


def spans(
    tokenizer: PreTrainedTokenizerBase, conversation: Sequence[Message] | Chat
) -> Iterator[tuple[str, int | None]]:
    """The text up to the assistant's last message in parts: (text, the place of the message if the assistant says it).

    Raises:
        ChangedEarlierText: a part cannot be added without changing what stands before.
        ValueError: as ``rendered`` does.
    """
    earlier, count, chat = "", 0, chat_of(conversation)
    for place, message in enumerate(chat.prompt):
        if message["role"] != "assistant":
            continue
        for upto, prompted in ((place, True), (place + 1, False)):
            # A conversation may begin with the assistant: then nothing stands before its words.
            whole = rendered(tokenizer, _beginning(chat, upto), generation_prompt=prompted) if upto else ""
            if not whole.startswith(earlier):
                cause = f"message {place} (assistant) takes the place of the generation prompt"
                if prompted:
                    cause = _cause(tokenizer, chat, earlier, first=count, last=place)
                raise _changed(tokenizer, cause, earlier, whole)
            if len(whole) > len(earlier):
                yield whole[len(earlier) :], None if prompted else place
            earlier = whole
        count = place + 1


_QUESTION, _REPLY, _NEXT = "a question", "the reply", "something else"


def next_header(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The header of one more reply, which the template writes behind a last reply too; None: it writes none there.

    Such a template knows no end of a turn: the first one of Meta-Llama-3-8B-Instruct was of this kind.
    """
    memory = memory_of(tokenizer, "header")
    if "header" not in memory:
        memory["header"] = _next_header(tokenizer)
    return memory["header"]


def _next_header(tokenizer: PreTrainedTokenizerBase) -> str | None:
    question, reply, other = (
        {"role": role, "content": text} for role, text in (("user", _QUESTION), ("assistant", _REPLY), ("user", _NEXT))
    )

    def text(*messages: Message) -> str:
        return rendered(tokenizer, messages, generation_prompt=False)

    try:
        talk, longer = text(question, reply), text(question, reply, other)
        behind, before = talk.rpartition(_REPLY)[2], _between(talk, _QUESTION, _REPLY)
        after = _between(longer, _REPLY, _NEXT)
        try:
            before_user = _between(text(question, other), _QUESTION, _NEXT)
        except ValueError:  # roles that must alternate
            before_user = after
    except ValueError:
        return None  # rows are refused with the template's words
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, before_user, strict=False)))
    header = before[same:]  # what stands before a reply, and not before a question
    # Jinja drops the last newline of a template.
    return header if header.strip() and header.strip() in behind and not after.startswith(behind) else None


def _between(text: str, first: str, second: str) -> str:
    """The text between two words; nothing where one of them is missing."""
    before, word, _ = text.rpartition(second)
    return before.rpartition(first)[2] if word and first in before else ""


def template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The template's name in an error message: of which tokenizer."""
    if (file := getattr(tokenizer, "template_file", None)) is not None:
        return f"the chat template {file}"
    name = tokenizer.name_or_path
    return f"the chat template of {name!r}" if name else f"the chat template of this {type(tokenizer).__name__}"


def _message_of(error: Exception) -> str:
    if isinstance(error, TemplateSyntaxError):
        return f"line {error.lineno}: {error.message}"
    return str(error) if isinstance(error, TemplateError | TypeError) else f"{type(error).__name__}: {error}"


def _beginning(chat: Chat, upto: int) -> Chat:
    """The first messages, with all that stands beside them."""
    return replace(chat, prompt=chat.prompt[:upto])


def _cause(tokenizer: PreTrainedTokenizerBase, chat: Chat, earlier: str, *, first: int, last: int) -> str:
    """Which of the messages ``first`` … ``last`` − 1 changed what was ``earlier``; else the generation prompt."""
    for upto in range(first + 1, last + 1):
        if not rendered(tokenizer, _beginning(chat, upto), generation_prompt=False).startswith(earlier):
            return f"message {upto - 1} ({chat.prompt[upto - 1]['role']}) is added"
    return "the generation prompt is added"


def _changed(tokenizer: PreTrainedTokenizerBase, cause: str, earlier: str, whole: str) -> ChangedEarlierText:
    before, after = (tokenizer(text, add_special_tokens=False).input_ids for text in (earlier, whole))
    position = next((n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))
    return ChangedEarlierText(
        f"{template_of(tokenizer)} changes earlier tokens when {cause}: from token {position} on, "
        f"{_around(tokenizer, before, position)} becomes {_around(tokenizer, after, position)}. A policy would be "
        f"trained on another text than it wrote or read; {ADVICE}"
    )


def _around(tokenizer: PreTrainedTokenizerBase, ids: list[int], place: int) -> str:
    start, stop = max(0, place - 4), place + 12
    text = tokenizer.decode(ids[start:stop])
    return f"{'…' if start else ''}{text!r}{'…' if stop < len(ids) else ''}"
