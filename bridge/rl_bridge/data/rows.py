"""What a row may look like: supervised rows and rows of prompts; each in one form after the check."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

RESPONSES = ("response", "completion", "answer")
"""Fields that may hold what the model is to say, in the order in which they are looked for."""


def policy_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row to sample from: ``prompt`` as text or messages, or ``messages``; any other columns stay.

    >>> policy_row({"messages": [{"role": "user", "content": "1+1"}], "answer": "2"})["prompt"]
    [{'role': 'user', 'content': '1+1'}]

    Raises:
        ValueError: with the field and what was expected.
    """
    if missing(row, "prompt") and missing(row, "messages"):
        raise ValueError(f"field 'prompt' is missing or empty; the row has {sorted(map(str, row))}")
    row = _with_tools(row)
    if not missing(row, "prompt"):
        prompt = _text_or_messages(row["prompt"], "prompt")
        _require_one_prompt(row, prompt)
        if isinstance(prompt, list) and isinstance(prompt[-1], Mapping) and prompt[-1]["role"] == "assistant":
            raise ValueError("prompt ends with the assistant's message, so there is nothing to sample")
        return {**row, "prompt": prompt}
    messages = messages_of_field(row["messages"], "messages")
    if messages[-1]["role"] == "assistant":
        raise ValueError("messages ends with the assistant's, so there is nothing to sample; expected a prompt")
    return {**row, "messages": messages, "prompt": messages}


def answered_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row to sample from whose ``answer`` a completion is compared with.

    >>> answered_row({"prompt": "1+1=", "answer": None})
    Traceback (most recent call last):
    ValueError: answer must be text or a number to be compared (the reward 'exact'), got None

    Raises:
        ValueError: with the field and what was expected.
    """
    answer = row.get("answer")
    if not isinstance(answer, str | int | float):
        raise ValueError(f"answer must be text or a number to be compared (the reward 'exact'), got {answer!r:.80}")
    return policy_row(row)


def supervised_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row to imitate: ``messages`` with a message of the assistant, or ``prompt`` and a response.

    The response is in ``response``, ``completion`` or ``answer``: text, a number, or messages of the assistant and of
    tools.

    Raises:
        ValueError: with the field and what was expected.
    """
    row = _with_tools(row)
    if not missing(row, "prompt"):
        found = response_field(row)
        if found is None:
            names = ", ".join(map(repr, RESPONSES))
            raise ValueError(f"a row with 'prompt' needs one of {names}; it has {sorted(map(str, row))}")
        prompt = _text_or_messages(row["prompt"], "prompt")
        _require_one_prompt(row, prompt)
        return {**row, "prompt": prompt, found: _response(row[found], found)}
    if missing(row, "messages"):
        raise ValueError(f"expected 'messages', or 'prompt' and a response; the row has {sorted(map(str, row))}")
    messages = messages_of_field(row["messages"], "messages")
    found = response_field(row)
    if messages[-1]["role"] != "assistant" and found is not None:
        return {**row, "messages": messages, "prompt": messages, found: _response(row[found], found)}
    if all(message["role"] != "assistant" for message in messages):
        roles = [message["role"] for message in messages]
        raise ValueError(f"messages has none of the assistant, so there is nothing to learn; its roles are {roles}")
    return {**row, "messages": messages}


def response_field(row: Mapping[str, Any]) -> str | None:
    """The field that holds the row's response; None if there is none."""
    return next((name for name in RESPONSES if not missing(row, name)), None)


def missing(row: Mapping[str, Any], field: str) -> bool:
    """Whether the field is absent or says nothing: None, "" or []. Zero and False say something."""
    value = row.get(field)
    return value is None or (isinstance(value, str | list | tuple) and not value)


def messages_of_field(value: Any, field: str) -> list[dict[str, Any]]:
    """Messages as a list of dictionaries; JSON text, as a CSV file holds them, is read.

    Tables of Arrow give every message the keys of all: those that hold None are left out.

    Raises:
        ValueError: with the number of the message and what was expected.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError(f"{field} must be a list of messages, got the text {shortened(value)}") from None
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError(f"{field} must be a list of messages, got {shortened(value)}")
    return [_message(message, f"{field}[{place}]") for place, message in enumerate(value)]


def shortened(value: Any, characters: int = 200) -> str:
    """What an error message prints of a value."""
    text = repr(value)
    return text if len(text) <= characters else f"{text[:characters]}… ({len(text)} characters)"


def _with_tools(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with its ``tools``, if it has any, as a list of JSON schemas; their JSON text is read."""
    tools = row.get("tools")
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except ValueError:
            tools = row["tools"]
    if tools and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise ValueError(f"tools must be a list of JSON schemas, got {shortened(row['tools'])}")
    return {**row, "tools": tools} if "tools" in row else dict(row)


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
        raise ValueError(f"{where} must be a message with role and content, got {shortened(message)}")
    if not isinstance(message["role"], str) or not message["role"]:
        raise ValueError(f"{where}: role must be text, got {shortened(message['role'])}")
    # A call of a tool has no text of its own.
    if not isinstance(message["content"], str | list) and not message.get("tool_calls"):
        raise ValueError(f"{where}: content must be text, got {shortened(message['content'])}")
    return {key: item for key, item in message.items() if item is not None or key == "content"}


def _text_or_messages(value: Any, field: str) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        return value
    if not (isinstance(value, list) and all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in value)):
        raise ValueError(f"{field} must be text or messages with role and content, got {shortened(value)}")
    return messages_of_field(value, field)


def _require_one_prompt(row: Mapping[str, Any], prompt: Any) -> None:
    """Refuse a row whose ``messages`` say something else than its prompt."""
    if missing(row, "messages"):
        return
    messages = messages_of_field(row["messages"], "messages")
    if isinstance(prompt, str):
        agree = any(message.get("content") == prompt for message in messages)
    else:
        agree = messages[: len(prompt)] == prompt
    if not agree:
        raise ValueError("prompt and messages are both given, and the messages do not hold the prompt; give one")


def _response(value: Any, field: str) -> Any:
    if isinstance(value, list):
        messages = messages_of_field(value, field)
        if any(message["role"] not in ("assistant", "tool", "user") for message in messages):
            roles = [message["role"] for message in messages]
            raise ValueError(f"{field} holds the assistant's messages, got roles {roles}")
        if all(message["role"] != "assistant" for message in messages):
            raise ValueError(f"{field} has no message of the assistant")
        return messages
    if isinstance(value, Mapping) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"{field} must be text or messages, got {shortened(value)}")
    return value
