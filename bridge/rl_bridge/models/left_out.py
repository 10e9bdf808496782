"""Words of a message that a chat template does not write: thoughts, unknown roles, what stands beside a call."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from rl_bridge.data.messages import Chat, shortened
from rl_bridge.models.chat_templates import rendered, template_of

MARK = "918273645546372819"
"""A content that no template changes: it has no case, no space and no sign."""
ADVICE = (
    "take these words out of the rows, or give a --chat-template FILE that writes them; apply_chat_template=false "
    "concatenates the contents"
)


def left_out(tokenizer: PreTrainedTokenizerBase, chat: Chat, place: int, text: str | None = None) -> str:
    """The part of a message's content that the chat template does not write; white space does not count.

    The template's text is compared with the one that it writes of a mark in place of the content. A template that
    writes a content in other characters, as a reference of XML, leaves nothing out.

    Args:
        tokenizer: has the template.
        chat: the conversation.
        place: of the message in it.
        text: where the content is expected. If all of it stands there, nothing else is rendered.

    Returns:
        The characters from the first that is left out to the last; "" where none is.
    """
    content = chat.prompt[place].get("content")
    content = "".join(content.split()) if isinstance(content, str) else ""
    if not content or (text is not None and is_in(content, text)):
        return ""
    try:
        whole, marked = (_text(tokenizer, chat, place, words) for words in (None, MARK))
        if MARK not in marked:
            return content if _text(tokenizer, chat, place, "") == whole else ""
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


def _text(tokenizer: PreTrainedTokenizerBase, chat: Chat, place: int, content: str | None) -> str:
    """The conversation by the template without its white space, with another content of the message if one is given."""
    messages: Sequence[Mapping] = chat.prompt
    if content is not None:
        messages = [*messages[:place], {**messages[place], "content": content}, *messages[place + 1 :]]
    return "".join(rendered(tokenizer, replace(chat, prompt=messages), generation_prompt=False).split())
