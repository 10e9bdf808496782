"""Calls of tools that a chat template does not write: refused where they are trained on, and named elsewhere."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from rl_bridge.data.messages import OTHER_CALLS, Chat, function_of, shortened
from rl_bridge.data.unread_keys import TRIES
from rl_bridge.models.chat_templates import MARK, changed_call, memory_of, rendered, template_of

FORMS = 4096
"""Forms of messages of which it is remembered how many were looked at closely."""


def require_calls(tokenizer: PreTrainedTokenizerBase | None, chat: Chat, place: int, text: str) -> None:
    """Refuse a message of the assistant that is trained on, and that calls a tool where the tokens have no call.

    The policy would learn to end its turn there, or to call with other arguments.

    Args:
        tokenizer: has the template; None where contents are concatenated, and no call is written.
        chat: the conversation.
        place: of the message in it.
        text: of the message.

    Raises:
        ValueError: with the tool's name and the way on.
    """
    if (call := unwritten_call(tokenizer, chat, place, text)) is not None:
        writer = "apply_chat_template=false" if tokenizer is None else template_of(tokenizer)
        raise ValueError(
            f"{writer} leaves out the call {call} of message {place} (assistant), which is trained on; give a "
            "--chat-template FILE that writes tool_calls, write the call into the content, or give the message the "
            "weight 0"
        )


def unwritten_call(tokenizer: PreTrainedTokenizerBase | None, chat: Chat, place: int, text: str) -> str | None:
    """The first call of a message whose tool or arguments the template does not write; None: it writes them all.

    ``text`` is that of the message, or of more. The template's text is compared with the one of the same message
    without the call, with no arguments and, in a conversation that has several tools, with another tool. Behind
    ``TRIES`` messages of one form, whose calls are of the same tools, a call is taken for written whose words stand in
    the text beside those of the content.
    """
    message = chat.prompt[place]
    for key in OTHER_CALLS:
        if message.get(key) and (tokenizer is None or _is_same(tokenizer, chat, place, {key: None})):
            return f"in {key!r}, {shortened(message[key], 80)}"
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
    if calls and tokenizer is not None and _is_as_before(tokenizer, message, calls, text):
        return None
    several = len(_tools(chat)) > 1
    for number, call in enumerate(calls):
        name, arguments = function_of(call)
        others = [
            [],
            *([[changed_call(call, name=MARK)]] if several else []),
            *([[changed_call(call, arguments={})]] if arguments else []),
        ]
        changes = [{"tool_calls": [*calls[:number], *other, *calls[number + 1 :]]} for other in others]
        if tokenizer is None or any(_is_same(tokenizer, chat, place, change) for change in changes):
            return f"{shortened(name)} with {shortened(arguments, 80)}"
    return None


def writes_calls(tokenizer: PreTrainedTokenizerBase, chat: Chat, place: int) -> bool:
    """Whether the template writes anything of a message's ``tool_calls``: the key is named elsewhere if not."""
    return bool(chat.prompt[place].get("tool_calls")) and not _is_same(tokenizer, chat, place, {"tool_calls": None})


def _is_as_before(
    tokenizer: PreTrainedTokenizerBase, message: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], text: str
) -> bool:
    """Whether enough messages of this form were looked at closely, and the words of the calls are in the text."""
    tries, functions = memory_of(tokenizer, "calls"), [function_of(call) for call in calls]
    form = (tuple(name for name, _ in functions), tuple(sorted(key for key, item in message.items() if item)))
    if len(tries) >= FORMS and form not in tries:
        tries.clear()
    tries[form] = tries.get(form, 0) + 1
    if tries[form] <= TRIES:
        return False
    others = [item for key, item in message.items() if isinstance(item, str) and key != "role"]
    words = Counter(word for function in functions for word in _leaves(function))
    return all(_count(word, text) - sum(_count(word, other) for other in others) >= n for word, n in words.items())


def _count(word: str, text: str) -> int:
    """How often a word stands in a text, as it is or with JSON's escapes."""
    forms = {word, json.dumps(word)[1:-1], json.dumps(word, ensure_ascii=False)[1:-1]}
    return max(text.count(form) for form in forms)


def _tools(chat: Chat) -> set[Any]:
    """Names of the tools that the conversation shows or calls."""
    calls = [call for message in chat.prompt for call in message.get("tool_calls") or ()]
    return {function_of(tool)[0] for tool in (*chat.tools, *calls)}


def _leaves(value: Any) -> Iterator[str]:
    """The texts and numbers in a value, as JSON writes them within its signs."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield str(name)
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif value is not None:
        yield value if isinstance(value, str) else json.dumps(value, default=str)


def _is_same(tokenizer: PreTrainedTokenizerBase, chat: Chat, place: int, changed: Mapping[str, Any]) -> bool:
    """Whether the template writes the conversation up to the message alike with these keys; empty ones are left out."""
    message = chat.prompt[place]
    other = {key: item for key, item in {**message, **changed}.items() if item or key not in changed}
    try:
        one, two = (
            rendered(tokenizer, replace(chat, prompt=[*chat.prompt[:place], last]), generation_prompt=False)
            for last in (message, other)
        )
    except ValueError:  # a template may refuse a message without content and calls
        return False
    return one == two
