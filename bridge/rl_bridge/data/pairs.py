"""Preference rows of the user's files: pairs, single completions with a label, and ranked lists; checked row by row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rl_bridge.data.reading import read_rows
from rl_bridge.data.requests import Message, Prompt

Kind = Literal["pair", "single", "ranking"]
Completion = str | tuple[Message, ...]
NUMBERS = ("margin", "chosen_win_rate", "rejected_win_rate")
"""Columns that a loss may read beside the completions, one number a row."""
FORMS = "chosen and rejected, or completion and label, or completions (best first)"
LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What one row says about the completions of a prompt."""

    kind: Kind
    prompt: Prompt
    """Text or messages."""
    completions: tuple[Completion, ...]
    """pair: chosen, rejected. single: one. ranking: from the best to the worst."""
    gold: Completion | None = None
    """A third completion to imitate (triple preference optimisation)."""
    desirable: bool = True
    """The label of a single completion."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    where: str = "a row"
    """File and row number."""


def read_comparisons(source: str) -> list[Comparison]:
    """All rows of ``source``, which is what ``read_rows`` takes.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a row of no known form, or with a field that cannot be used: with file and row number.
    """
    return [comparison_of(row) for row in read_rows(source, fields=())]


def comparison_of(row: Mapping[str, Any]) -> Comparison:
    """The comparison of one row.

    The prompt is ``prompt`` (text or messages) or ``messages``. Completions are text, a message or messages. ``chosen``
    and ``rejected`` may also be whole conversations: the prompt is then what both begin with.

    >>> comparison_of({"prompt": "2+2=", "chosen": "4", "rejected": "5"}).completions
    ('4', '5')

    Raises:
        ValueError: with the place of the row and the field.
    """
    where = str(row.get("_where", "a row"))
    kind, names = _form(row, where)
    numbers = {name: _number(row[name], name, where) for name in NUMBERS if row.get(name) not in (None, "")}
    prompt: Any = None
    if kind == "ranking":
        listed = row["completions"]
        if not isinstance(listed, list) or len(listed) < 2:
            raise ValueError(f"{where}: completions must be a list of at least two, best first, got {listed!r}")
        completions = tuple(_completion(value, f"completions[{i}]", where) for i, value in enumerate(listed))
    elif kind == "pair" and all(_is_conversation(row[name]) for name in names):
        prompt, completions = _split_conversations(row["chosen"], row["rejected"], where)
    else:
        completions = tuple(_completion(row[name], name, where) for name in names)
    if prompt is None:
        prompt = _prompt(row, where)
    gold = row.get("gold")
    return Comparison(
        kind=kind,
        prompt=prompt,
        completions=completions,
        gold=None if gold in (None, "", []) else _completion(gold, "gold", where),
        desirable=kind != "single" or _label(row["label"], where),
        numbers=numbers,
        where=where,
    )


def require_kind(rows: Sequence[Comparison], kinds: Sequence[Kind], what: str) -> None:
    """Raise ValueError at the first row that ``what`` cannot learn from."""
    for row in rows:
        if row.kind not in kinds:
            raise ValueError(f"{row.where}: {what} learns from rows of the kind {' or '.join(kinds)}, got {row.kind}")


def _form(row: Mapping[str, Any], where: str) -> tuple[Kind, tuple[str, ...]]:
    forms: dict[Kind, tuple[str, ...]] = {
        "pair": ("chosen", "rejected"),
        "single": ("completion", "label"),
        "ranking": ("completions",),
    }
    # A table with columns of several forms has None where a row does not use them.
    begun: list[Kind] = [kind for kind, names in forms.items() if any(row.get(name) is not None for name in names)]
    if len(begun) != 1:
        has = sorted(str(name) for name, value in row.items() if value is not None and name != "_where")
        raise ValueError(f"{where}: expected {FORMS}; the row has {has}")
    for name in forms[begun[0]]:
        if row.get(name) in (None, "", []):
            raise ValueError(f"{where}: field {name!r} is missing or empty")
    return begun[0], forms[begun[0]][:1] if begun[0] == "single" else forms[begun[0]]


def _prompt(row: Mapping[str, Any], where: str) -> Prompt:
    given = [name for name in ("prompt", "messages") if row.get(name) not in (None, "", [])]
    if len(given) != 1:
        raise ValueError(f"{where}: expected one of prompt and messages, got {' and '.join(given) or 'neither'}")
    value: Any = row[given[0]]
    if isinstance(value, str) and given == ["prompt"]:
        return value
    return _messages(value, given[0], where)


def _completion(value: Any, name: str, where: str) -> Completion:
    if isinstance(value, str) and value:
        return value
    messages = _messages([value] if isinstance(value, Mapping) else value, name, where)
    if messages[0]["role"] != "assistant":
        raise ValueError(f"{where}: {name} must begin with a message of the assistant, got {messages[0]['role']!r}")
    return tuple(messages)


def _messages(value: Any, name: str, where: str) -> list[Message]:
    if not value or not _is_messages(value):
        raise ValueError(f"{where}: {name} must be text or messages with role and content, got {value!r}")
    return list(value)


def _is_messages(value: Any) -> bool:
    return isinstance(value, Sequence) and all(
        isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in value
    )


def _is_conversation(value: Any) -> bool:
    """Whether a completion is given with the prompt before it."""
    return isinstance(value, list) and bool(value) and _is_messages(value) and value[0]["role"] != "assistant"


def _split_conversations(
    chosen: list[Message], rejected: list[Message], where: str
) -> tuple[Prompt, tuple[Completion, ...]]:
    """Common beginning and the two ends."""
    common = 0
    while common < min(len(chosen), len(rejected)) and chosen[common] == rejected[common]:
        common += 1
    # What a user or a tool says belongs to the prompt, and it must be the same on both sides.
    ends = (chosen[common:], rejected[common:])
    if not common or not all(end and end[0]["role"] == "assistant" for end in ends):
        raise ValueError(
            f"{where}: chosen and rejected must be the same conversation until a message of the assistant differs; "
            f"they are equal in {common} messages"
        )
    return list(chosen[:common]), (tuple(ends[0]), tuple(ends[1]))


def _label(value: Any, where: str) -> bool:
    found = LABELS.get(str(value).lower())
    if found is None:
        raise ValueError(f"{where}: label must be true or false (or 1 or 0), got {value!r}")
    return found


def _number(value: Any, name: str, where: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not abs(number) < float("inf"):
        raise ValueError(f"{where}: {name} must be a finite number, got {value!r}")
    return number
