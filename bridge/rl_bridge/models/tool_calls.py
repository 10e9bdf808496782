"""Calls of tools in a policy's text: their form is read off the chat template that shows the model its tools."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from rl_bridge.data.messages import Chat
from rl_bridge.models.chat_templates import rendered, template_of

PROBE = {"probe_argument": "probe value"}
NAMES, ARGUMENTS = (("name",), ("function", "name")), (("arguments",), ("parameters",), ("function", "arguments"))
"""Where a call's JSON may have the tool's name and the arguments."""


class ToolCall(NamedTuple):
    """One call: the tool's name, and the arguments by name."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class CallForm:
    """How a model writes a call: JSON behind a mark, or alone.

    >>> form = CallForm("<tool_call>", ("name",), ("arguments",))
    >>> form.calls('I look. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    [ToolCall(name='add', arguments={'a': 1})]
    >>> form.calls("It is 3.")
    []
    """

    mark: str
    """Text before a call. Empty: a turn that is one JSON object is a call, and any other is none."""
    name: tuple[str, ...]
    arguments: tuple[str, ...]

    def calls(self, text: str) -> list[ToolCall]:
        """The calls in a turn, in order.

        Raises:
            ValueError: behind a mark stands no call; the policy may read the message.
        """
        calls: list[ToolCall] = []
        place = self._place(text, 0)
        while place is not None:
            try:
                payload, end = json.JSONDecoder().raw_decode(text, place)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"the call is no JSON: {error}") from None
            for call in payload if isinstance(payload, list) else [payload]:
                calls.append(self._call(call))
            place = self._place(text, end)  # a mark inside of the arguments is a text of theirs
        return calls

    def _place(self, text: str, start: int) -> int | None:
        """Where the JSON of the next call begins."""
        if self.mark:
            start = text.find(self.mark, start) + len(self.mark)
            if start < len(self.mark):
                return None
        place = start + len(text[start:]) - len(text[start:].lstrip())
        return place if self.mark or (text[place : place + 1] == "{" and self._is_call(text[place:])) else None

    def _is_call(self, text: str) -> bool:
        """Whether a text without a mark is meant as a call: an answer may be JSON, too."""
        try:
            return _at(json.loads(text), self.name) is not None
        except (ValueError, RecursionError):
            return False

    def _call(self, payload: Any) -> ToolCall:
        name, arguments = _at(payload, self.name), _at(payload, self.arguments)
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"the arguments are no JSON: {error}") from None
        arguments = {} if arguments is None else arguments
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise ValueError(f"a call is an object with {'.'.join(self.name)} and {'.'.join(self.arguments)}")
        return ToolCall(name, arguments)


def call_form(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]]) -> CallForm:
    """The form in which the tokenizer's chat template writes a call of the first of these JSON schemas.

    Raises:
        ValueError: there is no template, or it does not show the tools to the model, or writes no call in JSON.
    """
    name = str(tools[0]["function"]["name"])
    question = {"role": "user", "content": "?"}
    opening = rendered(tokenizer, Chat([question], tools), generation_prompt=True)
    way = "; converse(parse=…) takes a function that finds the calls in a text, and the prompt has to name the tools"
    if unseen := [tool["function"]["name"] for tool in tools if tool["function"]["name"] not in opening]:
        raise ValueError(f"{template_of(tokenizer)} does not show the model its tools ({', '.join(unseen)}){way}")
    # Mistral's templates want an id of nine letters.
    call = {"id": "probe0001", "type": "function", "function": {"name": name, "arguments": PROBE}}
    turns: list[Any] = [{"content": "probe"}, {"content": "", "tool_calls": [call]}]
    words, whole = (
        rendered(tokenizer, Chat([question, {"role": "assistant", **turn}], tools), generation_prompt=False)
        for turn in turns
    )
    turn_text = whole[next(i for i, (a, b) in enumerate(zip(words, whole + chr(0), strict=False)) if a != b) :]
    for place in (i for i, letter in enumerate(turn_text) if letter in "[{"):
        form = _form(turn_text, place, name)
        if form is not None:
            return form
    raise ValueError(
        f"{template_of(tokenizer)} writes the call of a tool as {turn_text!r}, which has no JSON of it{way}"
    )


def _form(turn_text: str, place: int, name: str) -> CallForm | None:
    """The form of a call whose JSON begins here, if it finds that very call."""
    try:
        payload, end = json.JSONDecoder().raw_decode(turn_text, place)
    except ValueError:
        return None
    call = payload[0] if isinstance(payload, list) and payload else payload
    names = [path for path in NAMES if _at(call, path) == name]
    arguments = [path for path in ARGUMENTS if _at(call, path) in (PROBE, json.dumps(PROBE))]
    if not (names and arguments):
        return None
    form = CallForm(turn_text[:place].strip(), names[0], arguments[0])
    return form if form.calls(turn_text if form.mark else turn_text[:end]) == [ToolCall(name, PROBE)] else None


def _at(value: Any, path: Sequence[str]) -> Any:
    """A value inside of objects; None where there is none."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value
