"""The tokens that a chat template puts between two turns of the policy, without encoding the policy's own again."""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from rl_bridge.data.messages import Chat, chat_of
from rl_bridge.data.trajectory import Message
from rl_bridge.models.chat_templates import rendered
from rl_bridge.models.encoding import encode_prompt
from rl_bridge.models.left_out import require_every

REASONING = "<think>\n{}\n</think>\n\n{}"


class UnusableTemplate(ValueError):
    """A chat template with which no conversation can go on as it was drawn: every conversation's failure."""


class TurnTemplate:
    """Opening messages → tokens, and the tokens that follow a turn of the policy once the environment has answered.

    The policy ends its turn with a token at which sampling stops. What the template adds behind is the difference of
    two renderings of the conversation, in which placeholders stand for the policy's words: they are never encoded. A
    tokenizer without a chat template concatenates the contents.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Collection[int] = ()) -> None:
        """``stops``: ids at which sampling stops; by default the tokenizer's end-of-sequence token alone."""
        if not isinstance(tokenizer.eos_token_id, int):
            raise ValueError(f"the tokenizer needs an eos_token with one id, it is {tokenizer.eos_token_id!r}")
        self._tokenizer = tokenizer
        self.end_token = tokenizer.eos_token_id
        self._ends = [str(tokenizer.convert_ids_to_tokens(token)) for token in sorted({self.end_token, *stops})]
        self._stops = frozenset([self.end_token, *stops])
        self._checked: set[tuple[str, ...]] = set()

    def text(self, tokens: Sequence[int]) -> str:
        """The policy's text, without the token that ended it."""
        return str(self._tokenizer.decode(list(tokens)))

    def ends(self, token: int) -> bool:
        """Whether a turn ends with this token."""
        return token in self._stops

    def opening(self, messages: Sequence[Message] | Chat) -> list[int]:
        """Tokens of the first messages, up to where the policy begins.

        Raises:
            UnusableTemplate: it refuses the messages.
            ValueError: what it writes cannot be encoded, or is nothing, or lacks a whole message (``LeftOut``).
        """
        chat = chat_of(messages)
        if self._tokenizer.chat_template is None:
            return encode_prompt(self._tokenizer, "".join(message["content"] for message in chat.prompt))
        text = self._rendered(chat)
        require_every(self._tokenizer, chat, text, generation_prompt=True)
        ids: Any = self._encoded(text)
        if not ids:
            raise ValueError(f"the chat template renders {list(chat.prompt)} to no token")
        return ids

    def between(
        self,
        said: Sequence[Message] | Chat,
        drawn: Collection[int],
        answer: Sequence[Message],
        *,
        ended: bool = True,
    ) -> list[int]:
        """Tokens behind the last message of ``said`` and the token that ended it, up to the policy's next turn.

        ``drawn``: places in ``said`` of the messages that the policy wrote. ``ended``: the policy drew the token that
        ended its last one; else that token comes first here.

        Raises:
            UnusableTemplate: it changes what stands before, or ends a turn with another token than the policy.
            ValueError: a message that cannot be encoded, has no tokens, or is not in the text (``LeftOut``).
        """
        if self._tokenizer.chat_template is None:
            tail = str(self._tokenizer.eos_token) + "".join(message["content"] for message in answer)
        else:
            chat = chat_of(said)
            roles = tuple(message["role"] for message in (*chat.prompt, *answer))
            if roles not in self._checked:
                # A template may drop the reasoning of earlier turns; the placeholders alone have none to drop.
                self._tail(chat, drawn, answer, REASONING)
                self._checked.add(roles)
            tail = self._tail(chat, drawn, answer, "{}")
            whole = replace(chat, prompt=[*chat.prompt, *answer])
            require_every(self._tokenizer, whole, tail, len(chat.prompt), generation_prompt=True)
        return self._behind_end(tail, ended)

    def refusal(self, roles: Sequence[str] = ("tool",), *, opening: Sequence[str] = ("user",)) -> str | None:
        """Why no conversation can go on after the policy's turns if messages of these roles answer; None: it can.

        Three turns are tried. A run asks before the first token is drawn.
        """
        conversation: list[Message] = [{"role": role, "content": role} for role in opening]
        answer: list[Message] = [{"role": role, "content": role} for role in roles]
        turns: list[int] = []
        try:
            self.opening(conversation)
            for _ in range(3):
                turns.append(len(conversation))
                conversation.append({"role": "assistant", "content": "said"})
                self.between(conversation, turns, answer)
                conversation += answer
        except ValueError as error:
            return str(error)
        return None

    def _tail(
        self,
        chat: Chat,
        turns: Collection[int],
        answer: Sequence[Message],
        form: str,
    ) -> str:
        """The text that the template writes behind the policy's last words and their end-of-sequence token."""
        conversation = chat.prompt
        word = _word_not_in([message["content"] for message in (*conversation, *answer)])
        words = {place: form.format(word, f"{word}{place}") for place in turns}
        marked: list[Message] = [
            {**message, "content": words[place]} if place in words else message
            for place, message in enumerate(conversation)
        ]
        last = len(conversation) - 1
        before = self._rendered(replace(chat, prompt=marked[:last])) + words[last]
        whole = self._rendered(replace(chat, prompt=[*marked, *answer]))
        if not whole.startswith(before):
            same = next(i for i, (a, b) in enumerate(zip(before + "\0", whole + "\1", strict=False)) if a != b)
            raise UnusableTemplate(
                "the chat template changes what stands before when messages are added "
                f"({', '.join(message['role'] for message in answer)} after the policy's turn): "
                f"from token {self._position(before, whole)} on, "
                f"{_around(before, same)} becomes {_around(whole, same)}. "
                "The policy's tokens stay as they were drawn, so it would be trained on conversations that the "
                "template never makes. Let the environment answer with another role (tool), or give the tokenizer a "
                "chat template that only adds"
            )
        return whole[len(before) :]

    def _position(self, before: str, after: str) -> int:
        """The first token in which two renderings differ; placeholders stand for the policy's words."""
        pairs = zip(self._encoded(before), self._encoded(after), strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _behind_end(self, tail: str, ended: bool) -> list[int]:
        # Encoded with the mark before it, as it will stand: tokenizers treat the start of a text differently.
        ids = self._encoded(tail)
        if not ids or self._tokenizer.convert_ids_to_tokens(ids[0]) not in self._ends:
            raise UnusableTemplate(
                f"the chat template ends the policy's turn with {tail[:24]!r}, and sampling stops at "
                f"{' and '.join(map(repr, self._ends))}: set the tokenizer's eos_token to what the template writes"
            )
        if len(ids) == 1:
            raise ValueError("the environment's messages have no token: the policy's next turn would follow its end")
        return ids[1:] if ended else ids

    def _encoded(self, text: str) -> list[int]:
        try:
            return self._tokenizer(text, add_special_tokens=False).input_ids
        except Exception as error:  # the tokenizers library raises bare Exception for a character it does not know
            raise ValueError(f"the tokenizer cannot encode {text!r}: {error}") from error

    def _rendered(self, chat: Chat) -> str:
        """The text up to where the policy speaks next."""
        try:
            return rendered(self._tokenizer, chat, generation_prompt=True)
        except ValueError as error:
            raise UnusableTemplate(str(error)) from error


def _word_not_in(texts: Sequence[str]) -> str:
    """A word that stands in none of the texts."""
    number = 0
    while any(f"turn{number}" in text for text in texts):
        number += 1
    return f"turn{number}"


def _around(text: str, place: int) -> str:
    return repr(text[max(0, place - 20) : place + 30])
