"""Messages in the user's rows: the many spellings that are written, and the one that everything behind reads."""

import ast
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_bridge.common.terminal import remark

TURNS = ("messages", "prompt", "response", "completion", "completions", "chosen", "rejected", "gold")
"""Columns that may hold messages."""
ARGUMENTS = "chat_template_kwargs"
"""The column with variables of the chat template by name."""
CONVERSATIONS = (*TURNS, "tools", ARGUMENTS)
"""Columns that a chat template reads."""
NUMBERED = ("answer", "label", "margin", "chosen_win_rate", "rejected_win_rate")
"""Columns that may hold a number, in hand one of an array's kinds."""
OTHER_ARGUMENTS = (
    "parameters",
    "input",
    "args",
    "kwargs",
    "params",
    "argument",
    "inputs",
    "tool_input",
    "action_input",
)
"""Names that other formats have for the arguments of a call."""
OF_PROVIDERS = ("extra_content", "provider_specific_fields", "metadata", "cache_control")
OF_PROVIDERS += ("result", "output", "response")
"""Objects of a call that are none of its arguments."""
OTHER_CALLS = ("function_call", "function_calls", "tool_call", "toolCalls", "functionCall")
"""Keys of a message that calls have in other formats than ``tool_calls``."""
RESERVED = ("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message")
RESERVED += ("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs")
RESERVED += ("return_assistant_tokens_mask",)
"""Arguments of ``apply_chat_template`` that are no variables of the template."""
FLAGS = ("weight", "loss", "train", "trainable", "training")
"""Keys of a message that say whether it is trained on: OpenAI's, LLaMA-Factory's, axolotl's, verl's."""
UNTRAINED = "loss"
"""The one of them that a read message has, as False, where it is not trained on."""


_HALF = re.compile("[\ud800-\udfff]")
_NAMES_A_ROLE = re.compile(r"""['"](role|from)['"]\s*:""")
_SPEAKERS = ("human", "user", "gpt", "assistant", "chatgpt", "bing", "bard", "model", "system", "tool", "function")
_SPEAKERS += ("observation", "function_call", "function_response")
_LITERAL = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"\}\s+\{", "}, {"),
        (r"\barray\(|\bnp\.\w+\(|\bdatetime\.\w+\(|\b(Timestamp|Decimal|UUID)\(", "("),
        (r",\s*dtype=\w+\)", ")"),
        (r"\b(nan|NaN|null|true|false)\b", "None"),
    )
)
PARSED = 1 << 20
"""Characters of the longest text that is read as Python's."""


@dataclass(frozen=True)
class Chat:
    """A prompt or a conversation, with all else that a chat template reads: the form in which every encoder takes it.

    >>> Chat.of({"prompt": "1+1=", "tools": "[]"})
    Chat(prompt='1+1=', tools=(), arguments={})
    """

    prompt: Any
    """Text, messages or token ids. A template renders messages alone."""
    tools: Sequence[Any] = ()
    """JSON schemas."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template by name, as ``enable_thinking``."""

    @classmethod
    def of(cls, row: Mapping[str, Any], prompt: Any = None) -> "Chat":
        """The row's ``prompt``, or another one, with the row's ``tools`` and ``chat_template_kwargs``.

        Raises:
            ValueError: one of the two is no list of schemas or no object.
        """
        return cls(row["prompt"] if prompt is None else prompt, tools_of(row), arguments_of(row))

    @property
    def shortest(self) -> Any:
        """The prompt alone where nothing stands beside it."""
        return self if self.tools or self.arguments else self.prompt

    def row(self) -> dict[str, Any]:
        """The columns of a row that ``of`` reads back."""
        return {"prompt": self.prompt, "tools": self.tools, ARGUMENTS: self.arguments}


def chat_of(prompt: Any) -> Chat:
    """A prompt of any form as a ``Chat``."""
    return prompt if isinstance(prompt, Chat) else Chat(prompt)


def tools_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """The row's ``tools``, as a list of JSON schemas or as its JSON text.

    Raises:
        ValueError: they are neither.
    """
    tools = read_json(row.get("tools"), "tools")
    if tools and not (isinstance(tools, list | tuple) and all(isinstance(tool, Mapping) for tool in tools)):
        raise ValueError(f"tools must be a list of JSON schemas, got {shortened(row['tools'])}")
    return tuple(_filled(_schema(tool, f"tools[{place}]")) for place, tool in enumerate(tools or ()))


def _schema(tool: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """A tool whose function, parameters and properties are objects where they were JSON text, or empty lists.

    Raises:
        ValueError: a part that is no object, as a table's column of pairs in the place of properties.
    """
    if tool.get("function") is not None:
        function = read_json(tool["function"], f"{where}.function")
        if not isinstance(function, Mapping):
            raise _no_object(f"{where}.function", tool["function"])
        return {**tool, "function": _schema(function, f"{where}.function")}
    if tool.get("parameters") is None:
        return tool
    parameters = _object(tool["parameters"], f"{where}.parameters")
    properties = parameters.get("properties")
    if properties is None or isinstance(properties, Mapping) or _describes(parameters):
        return {**tool, "parameters": parameters}
    read = _object(properties, f"{where}.parameters.properties")
    return {**tool, "parameters": {**parameters, "properties": read}}


def _filled(schema: Any, *, names: bool = False) -> Any:
    """A schema without the keys that hold None: a table that was written as JSON has those of other schemas.

    A default and a constant may be null. ``names``: the keys are names of properties.
    """
    if isinstance(schema, Mapping):
        return {
            key: _filled(item, names=key == "properties")
            for key, item in schema.items()
            if item is not None or (key in ("default", "const") and not names)
        }
    return [_filled(item) for item in schema] if isinstance(schema, list) else schema


def _describes(parameters: Mapping[str, Any]) -> bool:
    """Whether ``properties`` are words about a parameter of that name: some formats have no schema around the names."""
    is_schema = any(kind in str(parameters.get("type")).lower() for kind in ("object", "dict"))
    return not is_schema and isinstance(read_json(parameters["properties"], "properties"), str)


def _object(value: Any, where: str) -> Mapping[str, Any]:
    """An object, or its JSON text; an empty list is one without names, as PHP writes it."""
    part = read_json(value, where)
    part = {} if part is None or part == [] else part
    if not isinstance(part, Mapping):
        raise _no_object(where, value)
    return part


def _no_object(where: str, value: Any) -> ValueError:
    return ValueError(f"{where} must be an object or its JSON text, got {shortened(value)}")


def arguments_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row's ``chat_template_kwargs``, as an object or as its JSON text.

    Raises:
        ValueError: they are neither, or name what is no variable of a template.
    """
    arguments = read_json(row.get(ARGUMENTS), ARGUMENTS)
    if arguments and not isinstance(arguments, Mapping):
        raise ValueError(f"{ARGUMENTS} must be an object, got {shortened(row[ARGUMENTS])}")
    if reserved := sorted(set(arguments or ()) & set(RESERVED)):
        raise ValueError(f"{ARGUMENTS} holds {', '.join(reserved)}, which is no variable of a chat template")
    return dict(arguments or {})


def require_characters(value: Any, place: str = "") -> None:
    """Refuse half of a surrogate pair in any text of a row, which JSON can hold and no file of UTF-8 can.

    >>> require_characters({"messages": [{"content": "cut \\ud83d"}]})
    Traceback (most recent call last):
    ValueError: messages[0].content: half of a surrogate pair (U+D83D) at character 4: the text was cut in a character

    Raises:
        ValueError: with the place in the row and the code point.
    """
    waiting = [(place, value)] if _may_hold(value) else []
    while waiting:
        place, part = waiting.pop()
        inside: list[tuple[str, Any]] = []
        if isinstance(part, str):
            half = _HALF.search(part)
            if half is not None:
                raise ValueError(
                    f"{place}: half of a surrogate pair (U+{ord(half.group()):04X}) at character {half.start()}: the "
                    "text was cut in a character"
                )
        elif isinstance(part, Mapping):
            # Names come before what they name: a place is printed.
            inside = [(f"{place or 'the row'}, a name", name) for name in part if _may_hold(name)]
            dot = f"{place}." if place else ""
            inside += [(f"{dot}{name}", item) for name, item in part.items() if _may_hold(item)]
        else:
            inside = [(f"{place}[{number}]", item) for number, item in enumerate(part) if _may_hold(item)]
        waiting += reversed(inside)


def _may_hold(value: Any) -> bool:
    """Whether a value may hold a character that is no ASCII."""
    return not value.isascii() if isinstance(value, str) else isinstance(value, Mapping | list | tuple)


def read_json(value: Any, field: str) -> Any:
    """The value of a JSON text, as a CSV file has it. A text that is no JSON stays, and is refused by its type."""
    if not isinstance(value, str) or not value.strip():
        return value if not isinstance(value, str) else None
    try:
        parsed = json.loads(value)
    except ValueError:
        return value
    require_characters(parsed, field)
    return parsed


def in_one_form(row: Mapping[str, Any], holding: Iterable[str] = TURNS) -> dict[str, Any]:
    """The row with messages where its columns of messages hold their JSON text, and with lists in place of arrays.

    Text of one message is read as a list of it. ``holding`` are the columns that may hold messages: text of messages in
    another column is somebody else's, as an answer that a completion is compared with.

    >>> in_one_form({"prompt": '[{"role": "user", "content": "1+1"}]', "note": '[{"role": "user", "content": ""}]'})
    {'prompt': [{'role': 'user', 'content': '1+1'}], 'note': '[{"role": "user", "content": ""}]'}

    Raises:
        ValueError: half of a surrogate pair in one of these, with its place; or text of messages in another form.
    """
    read: dict[str, Any] = {}
    holding = tuple(holding)
    for name in dict.fromkeys((*CONVERSATIONS, *NUMBERED, *holding)):
        value = row.get(name)
        if hasattr(value, "tolist"):
            # A table's structs have the keys of all rows.
            read[name] = value = _own(_listed(value))
        if isinstance(value, str) and name in holding and value.lstrip()[:1] in ("[", "{", "(", "a"):
            messages = _messages_in(value) if '"role"' in value else None
            read |= {} if messages is None else {name: messages}
            if messages is None and _means_messages(value):
                raise ValueError(
                    f"{name} is the text of messages in a form that is not read: give a list, or JSON text of messages "
                    f"with role and content, got {shortened(value)}"
                )
    require_characters(read)
    return {**row, **read}


def _listed(value: Any) -> Any:
    """A value with lists and numbers of Python in place of arrays, as a table in memory holds them."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: _listed(item) for key, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, list | tuple) else value


def _messages_in(text: str) -> list[Any] | None:
    """The messages that the text is JSON of; None of another text."""
    try:
        value = json.loads(text) if text.lstrip()[:1] in ("[", "{") else None
    except (ValueError, RecursionError):
        return None
    messages = [value] if isinstance(value, dict) else value
    return messages if isinstance(messages, list) and messages and all(map(_is_message, messages)) else None


def _means_messages(text: str) -> bool:
    """Whether the text, as JSON, Python or NumPy writes it, is of messages alone, ShareGPT's form too."""
    text = text.strip()
    if text[-1:] not in ("]", "}", ")") or not _NAMES_A_ROLE.search(text):
        return False
    value = None
    for parse in (json.loads, ast.literal_eval, _nearly_literal) if len(text) <= PARSED else (json.loads,):
        try:
            value = parse(text)
            break
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
    value = value.get("messages") if isinstance(value, dict) and len(value) == 1 else value
    if not isinstance(value, list | tuple):
        return _is_message(value)
    return bool(value) and all(_is_message(item) or _is_shared(item) for item in value)


def _nearly_literal(text: str) -> Any:
    """The list in a text that is nearly Python's: that of an array, without commas, or JSON with a comma too many."""
    for pattern, words in _LITERAL:
        text = pattern.sub(words, text)
    return ast.literal_eval(text)


def _is_shared(value: Any) -> bool:
    """Whether it is a message of ShareGPT's form. Other records have a ``from`` and a ``value``, too."""
    return isinstance(value, dict) and value.get("from") in _SPEAKERS and isinstance(value.get("value"), str)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and "role" in value and not {"content", "tool_calls"}.isdisjoint(value)


def messages_of_field(value: Any, field: str) -> list[dict[str, Any]]:
    """Messages as a list of dictionaries, each in one spelling; JSON text, as a CSV file holds them, is read.

    Keys that hold None are left out. A content of text in parts is one text, and beside calls of tools an absent one is
    empty. A call's arguments are an object, also where they were written as JSON text. Of the flags that say whether a
    message is trained on, ``loss`` is kept where it is False.

    >>> messages_of_field([{"role": "assistant", "content": [{"type": "text", "text": "4"}], "weight": 0}], "messages")
    [{'role': 'assistant', 'content': '4', 'loss': False}]

    Raises:
        ValueError: with the number of the message and what was expected.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError(f"{field} must be a list of messages, got the text {shortened(value)}") from None
        require_characters(value, field)
    value = _listed(value) if hasattr(value, "tolist") else value
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError(f"{field} must be a list of messages, got {shortened(value)}")
    return [_message(message, f"{field}[{place}]") for place, message in enumerate(value)]


def is_trained(message: Mapping[str, Any]) -> bool:
    """Whether a message that was read is one to imitate."""
    return message["role"] == "assistant" and message.get(UNTRAINED, True) is not False


def shown(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as a chat template gets it: without the flag."""
    return {key: value for key, value in message.items() if key != UNTRAINED}


def shortened(value: Any, characters: int = 200) -> str:
    """A value as an error message prints it."""
    text = repr(value)
    return text if len(text) <= characters else f"{text[:characters]}… ({len(text)} characters)"


def rows_of_table(table: Any) -> list[Any]:
    """The rows of an Arrow table. Its maps are objects; where one names a key twice all are lists of pairs: named."""
    rows = None
    if "map<" in str(table.schema):
        try:
            rows = table.to_pylist(maps_as_pydicts="strict")
        except (KeyError, TypeError) as error:
            remark(f"maps of the table are lists of pairs, for one has a key twice: {error}")
    return [without_keys_of_others(row) for row in (table.to_pylist() if rows is None else rows)]


def without_keys_of_others(row: Any) -> Any:
    """A row of an Arrow table, whose structs have the keys of all rows: those that hold None are taken out.

    Lists keep their items, and columns that hold neither messages nor tools stay as they are.

    >>> without_keys_of_others({"tools": [{"a": 1, "b": None, "enum": ["x", None]}], "meta": {"c": None}})
    {'tools': [{'a': 1, 'enum': ['x', None]}], 'meta': {'c': None}}
    """
    if not isinstance(row, Mapping):
        return row
    return {name: _own(value) if name in CONVERSATIONS else value for name, value in row.items()}


def _own(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _own(item) for key, item in value.items() if item is not None}
    return [_own(item) for item in value] if isinstance(value, list) else value


def _message(message: Any, where: str) -> dict[str, Any]:
    if isinstance(message, Mapping) and any(hasattr(item, "tolist") for item in message.values()):
        message = _own(_listed(message))
    called = isinstance(message, Mapping) and read_json(message.get("tool_calls"), f"{where}.tool_calls")
    nothing = {key for key in OTHER_CALLS if isinstance(message, Mapping) and _says_nothing(message.get(key))}
    calls = called or (isinstance(message, Mapping) and any(message.get(key) for key in {*OTHER_CALLS} - nothing))
    if not isinstance(message, Mapping) or not {"role", *(() if calls else ("content",))} <= message.keys():
        raise ValueError(f"{where} must be a message with role and content, got {shortened(message)}")
    if not isinstance(message["role"], str) or not message["role"]:
        raise ValueError(f"{where}: role must be text, got {shortened(message['role'])}")
    trained = _flag(message, where)
    # No call is one spelling: templates ask whether the key is there.
    left_out = {*FLAGS, *nothing, *(() if called else ("tool_calls",))}
    plain = {key: item for key, item in message.items() if item is not None and key not in left_out}
    # A call of a tool has no text of its own.
    plain["content"] = "" if calls and message.get("content") is None else _text(message["content"], where)
    if called:
        plain["tool_calls"] = _calls(called, where)
    return plain if trained else {**plain, UNTRAINED: False}


def _says_nothing(call: Any) -> bool:
    """Whether what stands under a key of calls is none, as in a struct whose fields are all null."""
    if isinstance(call, Mapping | list):
        return all(map(_says_nothing, call.values() if isinstance(call, Mapping) else call))
    return call is None or (isinstance(call, str) and call.strip().lower() in ("", "none", "auto", "null"))


def function_of(call: Any) -> tuple[Any, Any]:
    """(Name, arguments) of a call, or of a tool."""
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    function = function if isinstance(function, Mapping) else call
    return function.get("name"), function.get("arguments")


def _flag(message: Mapping[str, Any], where: str) -> bool:
    """Whether the message is trained on, by what it says of itself."""
    flags = {name: message[name] for name in FLAGS if message.get(name) is not None}
    for name, value in flags.items():
        if value not in (0, 1):
            raise ValueError(f"{where}: {name} says whether the message is trained on, 0 or 1, got {shortened(value)}")
    if len({bool(value) for value in flags.values()}) > 1:
        raise ValueError(f"{where}: {' and '.join(flags)} contradict each other: {flags}")
    if any(flags.values()) and message["role"] != "assistant":
        raise ValueError(f"{where}: what {message['role']} says is not trained on, and {flags} asks for it")
    return all(flags.values())


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{where}: content must be text, got {shortened(content)}")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            raise ValueError(f"{where}: content must be text or parts of text, one is {shortened(part)}")
        texts.append(text)
    return "".join(texts)


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise ValueError(f"{where}: tool_calls must be a list of calls, got {shortened(calls)}")
    return [_call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(calls)]


def _call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = read_json(call.get("function"), f"{where}.function")
    if isinstance(function, Mapping):
        read = _call(function, f"{where}.function")
        if not read["arguments"]:
            _require_no_payload(call, where, named=function.get("arguments") is not None)
        return {**call, "function": read}
    if not isinstance(call.get("name"), str) or not call["name"]:
        raise ValueError(f"{where}: a call has the name of its tool, got {shortened(call)}")
    arguments = read_json(call.get("arguments"), f"{where}.arguments")
    if not isinstance(arguments or {}, Mapping) or isinstance(arguments, bool | int | float):
        raise ValueError(f"{where}: arguments must be an object or its JSON text, got {shortened(call['arguments'])}")
    if not arguments:
        named = call.get("arguments") is not None
        _require_no_payload({key: item for key, item in call.items() if key != "arguments"}, where, named=named)
    return {**call, "arguments": dict(arguments or {})}


def _require_no_payload(call: Mapping[str, Any], where: str, *, named: bool) -> None:
    """Refuse a call without arguments that has these in another place: under another name, or beside its function.

    Where arguments are ``named``, and empty, an object of another name is something else.
    """
    for key, item in call.items():
        if key in ("id", "type", "index", "name", "function", *OF_PROVIDERS):
            continue
        value = read_json(item, f"{where}.{key}")
        if value and (key in ("arguments", *OTHER_ARGUMENTS) or (isinstance(value, Mapping) and not named)):
            raise ValueError(f"{where}: the arguments of a call stand under 'arguments' beside its name, not {key!r}")
