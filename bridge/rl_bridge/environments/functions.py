"""Functions as tools: an environment whose answers are what the user's functions return."""

import inspect
import json
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import isawaitable
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import get_json_schema

from rl_bridge.common.user_files import belongs_to_a_thread
from rl_bridge.data.messages import require_characters
from rl_bridge.data.trajectory import Message
from rl_bridge.environments.environment import Step
from rl_bridge.models.encoding import messages_of
from rl_bridge.models.tool_calls import ToolCall, call_form

Parse = Callable[[str], Sequence[ToolCall]]
"""A turn of the policy → the calls in it, none at the end. The policy reads the text of a ValueError."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FunctionTools:
    """Makes environments in which the policy calls functions, until a turn has no call. They give no reward.

    A call with a name that no tool has or with other arguments, and what a function raises, is answered with the error:
    the policy can learn from its fault.
    """

    functions: Mapping[str, Callable[..., Any]]
    schemas: tuple[Any, ...]
    parse: Parse
    _warned: set[str] = field(default_factory=set, repr=False, compare=False)

    def __call__(self) -> "FunctionSession":
        """A new conversation."""
        return FunctionSession(self)

    def called(self, call: ToolCall) -> Any:
        """The function's result or awaitable; a text that says the error of a call that does not fit."""
        if call.name not in self.functions:
            return _error(f"there is no tool {call.name!r}; there are {', '.join(self.functions)}")
        function = self.functions[call.name]
        try:
            inspect.signature(function).bind(**call.arguments)
        except TypeError as error:
            return _error(f"{call.name}: {error}")
        try:
            return function(**call.arguments)
        except Exception as error:
            return self.raised(call.name, error)

    def raised(self, name: str, error: Exception) -> str:
        """The answer to a call whose function raised; the first one of a function is logged with its place.

        Raises:
            Exception: the error itself, where the function may not be called from this thread: the fault is no call's.
        """
        if belongs_to_a_thread(error) and threading.current_thread() is not threading.main_thread():
            raise error
        if name not in self._warned:
            self._warned.add(name)
            logger.warning("the tool %s raised; the policy reads the error", name, exc_info=error)
        return _error(f"{type(error).__name__}: {error}")


class FunctionSession:
    """One conversation with tools."""

    def __init__(self, tools: FunctionTools) -> None:
        self._tools = tools
        self.tools = tools.schemas

    def reset(self, row: Mapping[str, Any]) -> Sequence[Message]:
        """The row's ``prompt``."""
        return messages_of(row["prompt"])

    def step(self, messages: Sequence[Message]) -> Step | Awaitable[Step]:
        """An answer of role ``tool`` to each call in the policy's turn; without a call the conversation ends."""
        try:
            calls = [ToolCall(*call) for call in self._tools.parse(messages[-1]["content"])]
        except ValueError as error:
            return Step(messages=[_answer(_error(str(error)))])
        results = [self._tools.called(call) for call in calls]
        if any(map(isawaitable, results)):
            return self._awaited(calls, results)
        return Step(messages=list(map(_answer, results)))

    async def _awaited(self, calls: Sequence[ToolCall], results: Sequence[Any]) -> Step:
        answers: list[Message] = []
        for call, result in zip(calls, results, strict=True):
            try:
                answers.append(_answer(await result if isawaitable(result) else result))
            except Exception as error:
                answers.append(_answer(self._tools.raised(call.name, error)))
        return Step(messages=answers)


def function_tools(
    functions: Sequence[Callable[..., Any]], tokenizer: PreTrainedTokenizerBase, parse: Parse | None = None
) -> FunctionTools:
    """An environment of functions with types and a docstring that describes each argument (Google's style).

    Without ``parse`` the chat template says how a call is written.

    Raises:
        ValueError: a function that does not describe itself, two with one name, or a template without tools.
    """
    named: dict[str, Callable[..., Any]] = {}
    schemas: list[Any] = []
    for function in functions:
        try:
            schema = get_json_schema(function)
        except Exception as error:  # of a docstring or a type that transformers cannot read
            name = getattr(function, "__name__", repr(function))
            raise ValueError(
                f"the tool {name} needs types and a docstring with a line for each argument (Args:): {error}"
            ) from error
        name = schema["function"]["name"]
        if name in named:
            raise ValueError(f"two tools are named {name}: the policy could not say which it calls")
        named[name] = function
        schemas.append(schema)
    if not named:
        raise ValueError("tools has no function: generate() draws completions without tools")
    return FunctionTools(named, tuple(schemas), parse or call_form(tokenizer, schemas).calls)


def _answer(result: Any) -> Message:
    """A message of the role ``tool``; what is no text is written as JSON, or as Python shows it."""
    if not isinstance(result, str):
        try:
            result = json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError):
            result = str(result)
    try:
        require_characters(result, "the result")
    except ValueError as error:
        result = _error(str(error))
    return {"role": "tool", "content": result}


def _error(words: str) -> str:
    return f"error: {words}"
