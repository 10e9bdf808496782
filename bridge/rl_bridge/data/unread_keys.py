"""Keys of rows and messages that have a meaning elsewhere in the field: those that change nothing here are named."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_bridge.common.terminal import remark
from rl_bridge.data.messages import ARGUMENTS, OTHER_CALLS, TURNS, arguments_of, function_of, tools_of

ROW_KEYS = (
    *("weight", "weights", "sample_weight", "loss_weight"),
    *("mask", "loss_mask", "completion_mask", "assistant_masks", "attention_mask", "input_ids", "labels"),
    *("system", "system_prompt", "history", "instruction", "functions", "documents"),
    *("image", "images", "video", "videos", "audio", "audios"),
)
"""Columns that no command reads, and that decide ids, a mask or a weight in other libraries."""
SUPERVISED_KEYS = ("label",)
"""Columns that say of a completion that it may be a bad one, which supervision imitates all the same."""
WORD_KEYS = (
    *("name", "prefix", "partial", "tool_calls", *OTHER_CALLS, "refusal", "documents", "images", "audio"),
    *("thinking", "reasoning", "reasoning_content", "reasoning_details", "thought", "thoughts", "thinking_blocks"),
    *("functions", "tools", "tool_plan", "tool_responses", "channel", "recipient", "additional_kwargs"),
)
"""Keys of what a message says beside its content."""
MESSAGE_KEYS = (*WORD_KEYS, "mask", "masked", "loss_mask", "loss_weight", "train_detail")
"""Keys of a message that only a chat template could read."""
TRIES = 32
"""Rows with a key that are encoded without it, until one of them changes."""
_NULL = "arguments that are null"
SETTLED = 1 << 40
"""So many messages of a role: what is left out of them was named, or all were looked at."""


@dataclass
class KeyMemory:
    """The keys that earlier rows of a program had, where rows come a few at a time."""

    read: set[str] = field(default_factory=set)
    """Keys that moved a row's tokens."""
    named: set[str] = field(default_factory=set)
    """Keys that were named as not read."""
    tries: Counter[str] = field(default_factory=Counter)
    """Rows with the key that were encoded without it, at most ``TRIES``."""
    words: Counter[str] = field(default_factory=Counter)
    """Messages of a role of which the template may leave words out that were looked at."""


class UnreadColumns:
    """Counts the rows that have columns which nothing reads, and those whose calls have arguments that are null."""

    def __init__(self, names: Sequence[str] = ROW_KEYS) -> None:
        self._names, self._rows = names, 0
        self._count: Counter[str] = Counter()
        self._first: dict[str, str] = {}
        self._null: list[str] = []

    def look(self, row: Mapping[str, Any], where: str, others: Iterable[str] = ()) -> None:
        """Count the columns of one row, whose place ``where`` is, and ``others`` of it."""
        self._rows += 1
        for name in (*(name for name in self._names if says_something(row.get(name))), *others):
            self._count[name] += 1
            self._first.setdefault(name, where)
        if null := sorted(_null_arguments(row)):
            self._null.append(f"{', '.join(null)} of {where}")

    def remark(self, but_by: str = "", settled: set[str] | None = None) -> None:
        """Name each column that any row has. ``but_by``: whoever else may read it.

        ``settled`` has the columns that were named before, and gets these.
        """
        settled = set() if settled is None else settled
        for name, count in self._count.items():
            if name in settled:
                continue
            settled.add(name)
            share = f"{count} of {self._rows} rows have it"
            remark(f"row key `{name}` is not read{but_by}: {share}, first {self._first[name]}")
        if self._null and _NULL not in settled:
            settled.add(_NULL)
            remark(
                f"calls of {len(self._null)} rows have arguments that are null, first {self._null[0]}, and are read "
                "so: a table that was written as JSON has the arguments of other calls in this way"
            )


def _null_arguments(row: Mapping[str, Any]) -> set[str]:
    """Names of arguments that hold None in calls of the row. Arguments that are JSON text are the user's own."""
    messages = [message for field in TURNS for message in _messages(row.get(field))]
    calls = [call for message in messages for call in _messages(message.get("tool_calls"))]
    called = [function_of(call)[1] for call in calls]
    return {str(name) for arguments in called if isinstance(arguments, Mapping) for name in _nulls(arguments)}


def _nulls(arguments: Mapping[str, Any]) -> Iterator[Any]:
    for name, item in arguments.items():
        if item is None:
            yield name
        elif isinstance(item, Mapping):
            yield from _nulls(item)


def says_something(value: Any) -> bool:
    """Whether a value is neither null nor empty."""
    return value is not None and not (hasattr(value, "__len__") and len(value) == 0)


def remark_on_keys(
    rows: Iterable[Mapping[str, Any]],
    encode: Callable[[Mapping[str, Any]], Sequence[int]],
    memory: KeyMemory | None = None,
    by: str = "",
) -> None:
    """Name each key for the chat template without which no row has other tokens.

    ``encode`` gives the tokens of a row, of which it reads messages, ``tools`` and ``chat_template_kwargs``.
    ``memory`` has the keys of earlier calls, and gets these. A key is named once, and tried on until ``TRIES`` rows of
    all calls had it. One that is read after all is named once more. ``by``: whoever else than the policy reads rows.
    """
    memory = KeyMemory() if memory is None else memory
    count: Counter[str] = Counter()
    first: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        for name, bare in _without_each(row):
            if name in memory.read:
                continue
            if memory.tries[name] < TRIES:
                moves = _changes(row, bare(), encode)
                if moves is None:
                    continue
                memory.tries[name] += 1
                if moves:
                    memory.read.add(name)
                    if name in memory.named:
                        remark(f"{name} is read after all{by}: it changes tokens of a later row{_at(', ', row)}")
                    continue
            count[name] += 1
            first.setdefault(name, row)
    for name in count:
        if name not in memory.read | memory.named:
            memory.named.add(name)
            tries = min(count[name], TRIES)
            rows_with = f"{tries} rows that have it" if tries == count[name] else f"the first {tries} of {count[name]}"
            remark(f"{name} is not read{by}: it changes no token of {rows_with}{_at(', first ', first[name])}")


def _without_each(row: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """The name of each key of ``row`` that a template could read, and the row without it."""
    if tools_of(row):
        yield "row key `tools`", lambda: {**row, "tools": []}
    arguments = arguments_of(row)
    for name in arguments:
        rest = {other: value for other, value in arguments.items() if other != name}
        yield f"row key `{ARGUMENTS}.{name}`", lambda rest=rest: {**row, ARGUMENTS: rest}
    messages = [message for field in TURNS for message in _messages(row.get(field))]
    present = {key for message in messages for key, item in message.items() if says_something(item)}
    for name in MESSAGE_KEYS:
        if name in present:
            yield f"message key `{name}`", lambda name=name: _without(row, name)


def _messages(value: Any) -> Iterator[Mapping[str, Any]]:
    """The messages of a list, or of a list of completions."""
    if isinstance(value, Mapping):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _messages(item)


def _without(row: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The row with messages that do not have the key."""
    return {name: _bare(value, key) if name in TURNS else value for name, value in row.items()}


def _bare(value: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        return {name: item for name, item in value.items() if name != key}
    return [_bare(item, key) for item in value] if isinstance(value, list | tuple) else value


def _changes(
    row: Mapping[str, Any], bare: Mapping[str, Any], encode: Callable[[Mapping[str, Any]], Sequence[int]]
) -> bool | None:
    """Whether the row has other tokens than ``bare``, or one of the two is refused; None: both are."""
    tokens: list[list[int] | None] = []
    for one in (row, bare):
        try:
            tokens.append(list(encode(one)))
        except ValueError:
            tokens.append(None)
    return None if tokens == [None, None] else tokens[0] != tokens[1]


def _at(words: str, row: Mapping[str, Any]) -> str:
    return f"{words}{row['_where']}" if "_where" in row else ""
