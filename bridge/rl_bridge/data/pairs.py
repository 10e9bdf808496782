"""Preference rows of the user's files: pairs, single completions with a label, and ranked lists; checked row by row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rl_bridge.data.reading import read_rows
from rl_bridge.data.requests import Message, Prompt
from rl_bridge.data.rows import messages_of_field, missing, shortened
from rl_bridge.tracking.signals import remark

Kind = Literal["pair", "single", "ranking"]
Completion = str | Sequence[Message]
NUMBERS = ("margin", "chosen_win_rate", "rejected_win_rate")
"""Columns that a loss may read beside the completions, one number a row."""
FIELDS: dict[Kind, tuple[str, ...]] = {
    "pair": ("chosen", "rejected"),
    "single": ("completion", "label"),
    "ranking": ("completions",),
}
LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What one row says about the completions of a prompt."""

    kind: Kind
    prompt: Prompt
    """Text or messages."""
    completions: tuple[Completion, ...]
    """pair: chosen, rejected. single: one. ranking: from the best to the worst. Each is text or messages."""
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
        ValueError: rows of no known form, or with a field that cannot be used: with file and row number.
    """
    rows = read_rows(source, fields=(), check=lambda row: {"comparison": comparison_of(row)})
    found = [replace(row["comparison"], where=row["_where"]) for row in rows]
    equal = [row for row in found if row.kind != "single" and all(c == row.completions[0] for c in row.completions)]
    if equal and len(equal) == len(found):
        raise ValueError(f"{source}: {_compared(equal)} are the same in every row, so there is nothing to learn")
    if equal:
        remark(
            f"{len(equal)} of {len(found)} rows teach nothing: {_compared(equal)} are the same, first {equal[0].where}"
        )
    labels = {row.desirable for row in found if row.kind == "single"}
    if len(labels) == 1:
        remark(f"{source}: every label is {str(labels.pop()).lower()}: nothing of the other kind is learned from")
    return found


def _compared(rows: Sequence[Comparison]) -> str:
    return " and ".join(FIELDS[rows[0].kind])


def comparison_of(row: Mapping[str, Any]) -> Comparison:
    """The comparison of one row.

    The prompt is ``prompt`` (text or messages) or ``messages``. Completions are text, a message or messages. ``chosen``
    and ``rejected`` may also be whole conversations: the prompt is then what both begin with.

    >>> comparison_of({"prompt": "2+2=", "chosen": "4", "rejected": "5"}).completions
    ('4', '5')

    Raises:
        ValueError: with the field and what was expected.
    """
    kind = _kind(row)
    if kind == "pair" and all(_is_conversation(row[name]) for name in FIELDS["pair"]):
        prompt, completions = _split(*(messages_of_field(row[name], name) for name in FIELDS["pair"]))
    else:
        prompt, completions = _prompt(row), _completions(row, kind)
    return Comparison(
        kind=kind,
        prompt=prompt,
        completions=completions,
        gold=None if missing(row, "gold") else _completion(row["gold"], "gold"),
        desirable=kind != "single" or _label(row["label"]),
        numbers={name: _number(row[name], name) for name in NUMBERS if not missing(row, name)},
    )


def require_kind(rows: Sequence[Comparison], kinds: Sequence[Kind], what: str) -> None:
    """Raise ValueError at the first row that ``what`` cannot learn from."""
    for row in rows:
        if row.kind not in kinds:
            fields = " or ".join(" and ".join(FIELDS[kind]) for kind in kinds)
            raise ValueError(f"{row.where}: {what} learns from {fields}; this row has {' and '.join(FIELDS[row.kind])}")


def _kind(row: Mapping[str, Any]) -> Kind:
    # A table with columns of several forms has nothing in those that a row does not use.
    begun: list[Kind] = [kind for kind, names in FIELDS.items() if any(not missing(row, name) for name in names)]
    if len(begun) != 1:
        forms = ", or ".join(" and ".join(names) for names in FIELDS.values())
        has = sorted(str(name) for name in row if not missing(row, name))
        raise ValueError(f"expected {forms} (best first); the row has {has}")
    for name in FIELDS[begun[0]]:
        if missing(row, name):
            raise ValueError(f"field {name!r} is missing or empty")
    return begun[0]


def _prompt(row: Mapping[str, Any]) -> Prompt:
    given = [name for name in ("prompt", "messages") if not missing(row, name)]
    if len(given) != 1:
        raise ValueError(f"expected one of prompt and messages; the row has {' and '.join(given) or 'neither'}")
    value = row[given[0]]
    if given == ["prompt"] and isinstance(value, str):
        return value
    prompt = messages_of_field(value, given[0])
    if prompt[-1]["role"] == "assistant":
        raise ValueError(f"{given[0]} ends with the assistant's message; the completions begin with one")
    return prompt


def _completions(row: Mapping[str, Any], kind: Kind) -> tuple[Completion, ...]:
    if kind == "single":
        return (_completion(row["completion"], "completion"),)
    if kind == "pair":
        return tuple(_completion(row[name], name) for name in FIELDS["pair"])
    listed = row["completions"]
    if not isinstance(listed, list) or len(listed) < 2:
        raise ValueError(f"completions must be a list of at least two, best first, got {shortened(listed)}")
    return tuple(_completion(value, f"completions[{place}]") for place, value in enumerate(listed))


def _completion(value: Any, name: str) -> Completion:
    if isinstance(value, str) and value:
        return value
    messages = messages_of_field([value] if isinstance(value, Mapping) else value, name)
    if messages[0]["role"] != "assistant":
        raise ValueError(f"{name} must begin with a message of the assistant, got one of {messages[0]['role']!r}")
    return messages


def _is_conversation(value: Any) -> bool:
    """Whether a completion is given with the prompt before it."""
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, Mapping) and first.get("role") != "assistant"


def _split(chosen: list[dict], rejected: list[dict]) -> tuple[Prompt, tuple[Completion, ...]]:
    """Common beginning and the two ends, which are the assistant's: what others say belongs to the prompt."""
    common = 0
    while common < min(len(chosen), len(rejected)) and chosen[common] == rejected[common]:
        common += 1
    ends = (chosen[common:], rejected[common:])
    if not common or not all(end and end[0]["role"] == "assistant" for end in ends):
        raise ValueError(
            "chosen and rejected must be the same conversation until a message of the assistant differs; "
            f"they are equal in {common} messages of {len(chosen)} and {len(rejected)}"
        )
    return chosen[:common], ends


def _label(value: Any) -> bool:
    found = LABELS.get(str(value).lower())
    if found is None:
        raise ValueError(f"label must be true or false (or 1 or 0), got {shortened(value)}")
    return found


def _number(value: Any, name: str) -> float:
    try:
        number = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not abs(number) < float("inf"):
        raise ValueError(f"{name} must be a finite number, got {shortened(value)}")
    if name.endswith("_rate") and not 0 <= number <= 1:
        raise ValueError(f"{name} must be from 0 to 1, got {shortened(value)}")
    return number
