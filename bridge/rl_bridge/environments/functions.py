"""Functions as tools: an environment whose answers are what the user's functions return."""

import contextlib
import inspect
import json
import logging
import re
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import isawaitable
from numbers import Real
from typing import Any, get_origin, get_type_hints

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import get_json_schema

from rl_bridge.common.user_files import belongs_to_a_thread
from rl_bridge.data.messages import require_characters
from rl_bridge.data.trajectory import Message
from rl_bridge.environments.environment import Step
from rl_bridge.environments.tool_arguments import fitting, without_json
from rl_bridge.models.encoding import messages_of
from rl_bridge.models.tool_calls import ToolCall, call_form

Parse = Callable[[str], Sequence[ToolCall]]
"""A turn of the policy → the calls in it, none at the end. The policy reads the text of a ValueError."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FunctionTools:
    """Makes environments in which the policy calls functions, until a turn has no call. They give no reward.

    A call with a name that no tool has or with other arguments, and what a function raises, is answered with the error:
    the policy can learn from its fault. So is a result that has no text, and a tool's first fault is logged.
    """

    functions: Mapping[str, Callable[..., Any]]
    schemas: tuple[Any, ...]
    parse: Parse
    _warned: set[str] = field(default_factory=set, repr=False, compare=False)

    def __call__(self) -> "FunctionSession":
        """A new conversation."""
        return FunctionSession(self)

    def called(self, call: ToolCall) -> Message | Awaitable[Message]:
        """The answer to a call, or an awaitable of it: the function's result, or the error of a call that misfits."""
        if call.name not in self.functions:
            return _failed(f"there is no tool {call.name!r}; there are {', '.join(self.functions)}")
        function = self.functions[call.name]
        try:
            arguments = self._fitting(call, inspect.signature(function).bind(**call.arguments).signature.parameters)
        except (TypeError, ValueError, RecursionError) as error:
            return _failed(f"{call.name}: {error}")
        try:
            result = function(**arguments)
            return self._awaited(call.name, result) if isawaitable(result) else _answer(result)
        except Exception as error:
            return _answer(self.raised(call.name, error))

    def _fitting(self, call: ToolCall, parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
        """A call's arguments as the tool's schema describes them; a default of None may be written, too.

        Raises:
            ValueError: one is of another type.
        """
        schemas = {schema["function"]["name"]: schema["function"] for schema in self.schemas}
        fits = {
            name: value
            if value is None and parameters[name].default is None
            else fitting(value, schemas[call.name]["parameters"]["properties"][name], name)
            for name, value in call.arguments.items()
        }
        # A schema tells a tuple from a list only by the types in it.
        bare = {name for name, hint in get_type_hints(self.functions[call.name]).items() if hint is tuple}
        return {name: tuple(value) if name in bare and value is not None else value for name, value in fits.items()}

    async def _awaited(self, name: str, result: Awaitable[Any]) -> Message:
        try:
            return _answer(await result)
        except Exception as error:
            return _answer(self.raised(name, error))

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
        """An answer of role ``tool`` to each call in the policy's turn, which are made one after another.

        Without a call the conversation ends.
        """
        try:
            calls = _calls(self._tools.parse, messages[-1]["content"])
        except ValueError as error:
            return Step(messages=[_failed(str(error))])
        answers: list[Message] = []
        for place, call in enumerate(calls, 1):
            answer = self._tools.called(call)
            if isawaitable(answer):
                return self._awaited(answers, answer, calls[place:])
            answers.append(answer)
        return Step(messages=answers)

    async def _awaited(self, answers: list[Message], first: Awaitable[Message], calls: Sequence[ToolCall]) -> Step:
        answers.append(await first)
        for call in calls:
            answer = self._tools.called(call)
            answers.append(await answer if isawaitable(answer) else answer)
        return Step(messages=answers)


def function_tools(
    functions: Sequence[Callable[..., Any]], tokenizer: PreTrainedTokenizerBase, parse: Parse | None = None
) -> FunctionTools:
    """An environment of functions with types and a docstring that describes each argument (Google's style).

    Without ``parse`` the chat template says how a call is written.

    Raises:
        ValueError: a function that does not describe itself or that no call fits, two with one name, or a template
            without tools.
        TypeError: ``parse`` gives no list of calls for a turn without one.
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
        _require_calls_fit(function, schema["function"])
        named[name] = function
        schemas.append(schema)
    if not named:
        raise ValueError("tools has no function: generate() draws completions without tools")
    if parse is not None:
        with contextlib.suppress(ValueError):  # the words that a policy would read
            _calls(parse, "")
    return FunctionTools(named, tuple(schemas), parse or call_form(tokenizer, schemas).calls)


def _require_calls_fit(function: Callable[..., Any], schema: Mapping[str, Any]) -> None:
    """Refuse a function whose schema would lead the policy to calls of which none can be right.

    Raises:
        ValueError: with the arguments that no call can name; or for a generator, which would never be run.
    """
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    described = schema["parameters"]["properties"] if "parameters" in schema else {}
    if unnamed := [str(p) for p in parameters if p.kind not in by_name or p.name not in described]:
        raise ValueError(
            f"the tool {schema['name']} gets the arguments that its schema describes, by their names, and none of "
            f"these can be {', '.join(unnamed)}: name its parameters without * and /; of a class give an object's "
            "method"
        )
    for name, hint in get_type_hints(function).items():
        if name in described and (
            types := [str(kind) if get_origin(kind) else kind.__name__ for kind in without_json(hint)]
        ):
            raise ValueError(
                f"the tool {schema['name']}: no JSON value is of the type {', '.join(types)} of its argument {name}, "
                "and a call's arguments are JSON: take numbers, text (typing.Literal names choices), lists or dicts"
            )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ValueError(f"the tool {schema['name']} yields: the policy reads what a tool returns")


def _calls(parse: Parse, text: str) -> list[ToolCall]:
    """The calls that ``parse`` finds.

    Raises:
        TypeError: it gives something else.
        ValueError: its own, whose words the policy reads.
    """
    answer = parse(text)
    calls = list(answer) if isinstance(answer, Iterable) else [answer]
    for call in calls:
        match call:
            case [str(), dict()]:
                continue
        raise TypeError(
            f"parse returned {answer!r} for the turn {text!r}, expected a list of calls, each a tool's name and a "
            "dict of its arguments: [] for a turn without a call"
        )
    return [ToolCall(*call) for call in calls]


def _answer(result: Any) -> Message:
    """A message of the role ``tool``; what is no text is written as JSON, or as Python shows it.

    Raises:
        TypeError: Python shows the address of an object, which says nothing, and another in every run.
    """
    result = result if isinstance(result, str) else _shown(result)
    try:
        require_characters(result, "the result")
    except ValueError as error:
        result = _error(str(error))
    return {"role": "tool", "content": result}


def _shown(result: Any) -> str:
    with contextlib.suppress(RecursionError):  # of a value that holds itself, which Python shows
        result = _ordered(result)
    try:
        return json.dumps(result, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError):
        words = str(result)
    if re.search(r" at 0x[0-9a-fA-F]+>", words):
        raise TypeError(f"a tool returns text or JSON; this is of the type {type(result).__name__}, or has an object")
    return words


def _ordered(value: Any) -> Any:
    """The value with lists in place of its sets: the order of a set's texts is another in each process.

    >>> _ordered({"names": {"b", "a"}, "numbers": ({10, 9}, 1)})
    {'names': ['a', 'b'], 'numbers': ([9, 10], 1)}
    """
    if isinstance(value, set | frozenset):
        members = [_ordered(member) for member in value]
        alike = all(isinstance(member, str) for member in members)
        alike |= all(isinstance(member, Real) and member == member for member in members)
        return sorted(members, key=None if alike else repr)
    if isinstance(value, dict):
        keys, members = list(map(_ordered_key, value)), list(map(_ordered, value.values()))
        return value if _same(keys, value) and _same(members, value.values()) else dict(zip(keys, members, strict=True))
    if isinstance(value, list | tuple):
        members = list(map(_ordered, value))
        if _same(members, value):
            return value
        make: Any = getattr(type(value), "_make", tuple if isinstance(value, tuple) else list)  # a named tuple's own
        return make(members)
    return value


def _ordered_key(key: Any) -> Any:
    """A key of a dictionary with tuples in place of its sets: a list is no key."""
    if isinstance(key, frozenset):
        return tuple(_ordered(key))
    if not isinstance(key, tuple):
        return key
    members = tuple(map(_ordered_key, key))
    return key if _same(members, key) else members


def _same(after: Iterable[Any], before: Iterable[Any]) -> bool:
    """Whether each is the very object of before."""
    return all(new is old for new, old in zip(after, before, strict=True))


def _plain(value: Any) -> Any:
    """Numbers of NumPy and PyTorch, which Python would show without the middle of a long row.

    Raises:
        TypeError: of anything else, as a table, whose labels would be lost.
    """
    if isinstance(value, torch.Tensor):
        value = (value.detach().float() if value.is_floating_point() else value.detach()).cpu().numpy()
    if not isinstance(value, np.ndarray | np.generic):
        raise TypeError
    value = np.asarray(value)
    rounded = value.dtype.kind == "f" and value.dtype != np.float64
    return (value.astype(str).astype(float) if rounded else value).tolist()  # the digits of its own precision


def _failed(words: str) -> Message:
    return _answer(_error(words))


def _error(words: str) -> str:
    return f"error: {words}"
