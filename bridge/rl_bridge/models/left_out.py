"""Words of a message that a chat template does not write: thoughts, unknown roles, what stands beside a call."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from transformers import PreTrainedTokenizerBase

from rl_bridge.data.messages import UNTRAINED, Chat, shortened
from rl_bridge.models.chat_templates import MARK, memory_of, rendered, template_of

ADVICE = (
    "take these words out of the rows, or give a --chat-template FILE that writes them; apply_chat_template=false "
    "concatenates the contents"
)
ROLES = ("system", "user")
"""Roles that a message may have in place of one that the template does not know."""
FORMS = 4096
"""Forms of chats of which it is remembered what a template writes."""


class LeftOut(ValueError):
    """A chat template leaves out a whole message."""


def left_out(
    tokenizer: PreTrainedTokenizerBase,
    chat: Chat,
    place: int,
    text: str | None = None,
    *,
    generation_prompt: bool = False,
) -> str:
    """The part of a message's content that the chat template does not write; white space does not count.

    The template's text is compared with the one that it writes of a mark in place of the content. A template that
    writes a content in other characters, as a reference of XML, leaves nothing out.

    Args:
        tokenizer: has the template.
        chat: the conversation.
        place: of the message in it.
        text: where the content is expected. If all of it stands there, nothing else is rendered.
        generation_prompt: whether the chat is a prompt, which the model reads with the beginning of a reply.

    Returns:
        The characters from the first that is left out to the last; "" where none is.
    """
    content = chat.prompt[place].get("content")
    content = "".join(content.split()) if isinstance(content, str) else ""
    if not content or (text is not None and is_in(content, text)):
        return ""
    try:
        whole, marked = (_text(tokenizer, chat, place, words, generation_prompt) for words in (None, MARK))
        if MARK not in marked:
            return content if _is_dropped(tokenizer, chat, place, "", generation_prompt) else ""
    except ValueError:  # a template may refuse another content
        return ""
    before, _, behind = marked.partition(MARK)
    if not (whole.startswith(before) and whole.endswith(behind) and len(whole) >= len(before) + len(behind)):
        return ""  # the content decides what stands around it
    written = whole[len(before) : len(whole) - len(behind)]
    if len(written) >= len(content) or not _in_order(written, content):
        return ""
    start = next((n for n, letter in enumerate(written) if letter != content[n]), len(written))
    return content[start : len(content) - len(written) + start]


def require_whole(tokenizer: PreTrainedTokenizerBase, chat: Chat, place: int, text: str) -> None:
    """Refuse a message of the assistant that is trained on, and of which the template leaves something out.

    Raises:
        ValueError: with the number of characters, the words, and the way on.
    """
    beginning = replace(chat, prompt=chat.prompt[: place + 1])
    if words := left_out(tokenizer, beginning, place, text):
        raise ValueError(
            f"{template_of(tokenizer)} leaves out {len(words)} characters of what the assistant says in message "
            f"{place}, which is trained on: {shortened(words, 80)}; {ADVICE}"
        )


def require_every(
    tokenizer: PreTrainedTokenizerBase, chat: Chat, text: str, first: int = 0, *, generation_prompt: bool
) -> None:
    """Refuse a message of anybody but the assistant that is not in the template's text at all.

    The model would read another prompt than the row's. Nothing is refused where the template writes other words in that
    place, and so leaves out a part or a sign, or where the words change the text around, as a switch of its thoughts.

    Args:
        tokenizer: has the template.
        chat: the messages.
        text: of the messages by the template.
        first: place of the first message that is looked for.
        generation_prompt: whether the text ends with the beginning of a reply; else with the assistant's last message.

    Raises:
        LeftOut: with the message's place, its role, its words, and the roles that the template writes.
    """
    unwritten, squeezed = _unwritten(tokenizer, chat, generation_prompt), None
    for place, message in enumerate(chat.prompt[first:], first):
        content = message.get("content")
        if message["role"] == "assistant" or not isinstance(content, str) or not content.strip():
            continue
        if place not in unwritten:
            if content.strip() in text:
                continue
            squeezed = "".join(text.split()) if squeezed is None else squeezed
            if is_in(content, squeezed):
                continue
        if _is_dropped(tokenizer, chat, place, MARK, generation_prompt):
            written = [repr(role) for role in ROLES if _writes_as(tokenizer, chat, place, role, generation_prompt)]
            way = f"give it the role {' or '.join(written)}, which the template writes there; or " if written else ""
            raise LeftOut(
                f"{template_of(tokenizer)} leaves out message {place} ({message['role']}) wholly, so the model would "
                f"read another prompt than the row's: {shortened(content, 80)}; {way}{ADVICE}"
            )


def _unwritten(tokenizer: PreTrainedTokenizerBase, chat: Chat, generation_prompt: bool) -> frozenset[int]:
    """Places of messages whose words the template writes nowhere, whatever they are; once for chats of one form.

    The same words may stand elsewhere in the text, so each message has a mark of its own.
    """
    words = [_has_words(message.get("content")) for message in chat.prompt]
    form = _form(tokenizer, chat, words, generation_prompt)
    forms = memory_of(tokenizer, "forms")
    if form not in forms:
        marks = [f"{MARK}{place}{MARK}" if has_words else "" for place, has_words in enumerate(words)]
        marked = [{**m, "content": mark} if mark else m for m, mark in zip(chat.prompt, marks, strict=True)]
        try:
            text = rendered(tokenizer, replace(chat, prompt=marked), generation_prompt=generation_prompt)
        except ValueError:  # a template may refuse another content
            text = ""
        if len(forms) >= FORMS:
            forms.clear()
        forms[form] = frozenset(place for place, mark in enumerate(marks) if mark not in text)
    return forms[form]


def _form(tokenizer: PreTrainedTokenizerBase, chat: Chat, words: Sequence[bool], generation_prompt: bool) -> bytes:
    """A digest of all that a template reads beside the words of the messages: their other keys, tools, variables."""
    other_keys = [
        {key: item for key, item in message.items() if key != UNTRAINED and not (has_words and key == "content")}
        for message, has_words in zip(chat.prompt, words, strict=True)
    ]
    beside = (other_keys, chat.tools, chat.arguments, tokenizer.special_tokens_map, generation_prompt)
    return blake2b(repr(beside).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _has_words(content: Any) -> bool:
    return isinstance(content, str) and not content.isspace() and content != ""


def _is_dropped(
    tokenizer: PreTrainedTokenizerBase, chat: Chat, place: int, words: str, generation_prompt: bool
) -> bool:
    """Whether the model reads the same with other words in the message.

    A row to imitate has two texts: its own and the prompt of the last reply, which alone may have a switch's effect.
    """
    texts = [(chat, generation_prompt)]
    if not generation_prompt and place < len(chat.prompt) - 1 and chat.prompt[-1]["role"] == "assistant":
        texts.append((replace(chat, prompt=chat.prompt[:-1]), True))
    try:
        return all(
            _text(tokenizer, part, place, None, prompted) == _text(tokenizer, part, place, words, prompted)
            for part, prompted in texts
        )
    except ValueError:  # a template may refuse another content
        return False


def _writes_as(tokenizer: PreTrainedTokenizerBase, chat: Chat, place: int, role: str, generation_prompt: bool) -> bool:
    """Whether the template writes the message in another role."""
    other = [*chat.prompt[:place], {**chat.prompt[place], "role": role}, *chat.prompt[place + 1 :]]
    try:
        return MARK in _text(tokenizer, replace(chat, prompt=other), place, MARK, generation_prompt)
    except ValueError:
        return False


def is_in(content: str, text: str) -> bool:
    """Whether a text has all characters of the content in their order, white space aside.

    >>> is_in('say "yes"', 'content: "say \\\\"yes\\\\""'), is_in("<think>no</think>yes", "yes")
    (True, False)
    """
    content, text = "".join(content.split()), "".join(text.split())
    return content in text or _in_order(content, text)


def _in_order(characters: str, text: str) -> bool:
    place = -1
    for character in characters:
        place = text.find(character, place + 1)
        if place < 0:
            return False
    return True


def _text(
    tokenizer: PreTrainedTokenizerBase, chat: Chat, place: int, content: str | None, generation_prompt: bool
) -> str:
    """The conversation by the template without its white space, with another content of the message if one is given."""
    messages: Sequence[Mapping] = chat.prompt
    if content is not None:
        messages = [*messages[:place], {**messages[place], "content": content}, *messages[place + 1 :]]
    return "".join(rendered(tokenizer, replace(chat, prompt=messages), generation_prompt=generation_prompt).split())
