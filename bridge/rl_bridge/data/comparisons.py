"""Comparisons: preference rows of the user's files, and ``PairBatch``, the tensors of their completions."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from rl_bridge.common.terminal import remark
from rl_bridge.data.census import SourceCensus
from rl_bridge.data.messages import Chat, in_one_form, messages_of_field, read_json, shortened
from rl_bridge.data.row_readers import RowSource, name_of
from rl_bridge.data.rows import PROMPTS, behind_prompt, lacking, missing, read_rows
from rl_bridge.data.token_batch import TokenBatch, collate, packed_rows, padded_rows
from rl_bridge.data.trajectory import Message, Prompt, Trajectory

# Preference rows of the user's files: pairs, single completions with a label, and ranked lists; checked row by row.

Kind = Literal["pair", "single", "ranking"]
Form = Literal["pairs", "triples", "singles", "ranking"]
"""The rows that a loss learns from."""
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
    """The statement of one row about the completions of a prompt."""

    kind: Kind
    prompt: Prompt
    """Text or messages; with tools, a ``Chat`` of them."""
    completions: tuple[Completion, ...]
    """pair: chosen, rejected. single: one. ranking: from the best to the worst. Each is text or messages."""
    gold: Completion | None = None
    """A third completion to imitate (triple preference optimisation)."""
    desirable: bool = True
    """The label of a single completion."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    where: str = "a row"
    """File and row number."""


def read_comparisons(source: RowSource, census: SourceCensus | None = None) -> list[Comparison]:
    """All rows of ``source``, which is what ``read_rows`` takes; ``census`` gets their numbers.

    Raises:
        FileNotFoundError: no such file.
        ValueError: rows of no known form, or with a field that cannot be used: with file and row number.
    """
    rows = read_rows(source, fields=(), check=lambda row: {"comparison": comparison_of(row)}, census=census)
    comparisons = [replace(row["comparison"], where=row["_where"]) for row in rows]
    name = name_of(source)
    equal = [
        row for row in comparisons if row.kind != "single" and all(c == row.completions[0] for c in row.completions)
    ]
    if equal and len(equal) == len(comparisons):
        raise ValueError(f"{name}: {_compared(equal)} are the same in every row, so there is nothing to learn")
    if equal:
        remark(
            f"{len(equal)} of {len(comparisons)} rows teach nothing: {_compared(equal)} are the same, "
            f"first {equal[0].where}"
        )
    labels = {row.desirable for row in comparisons if row.kind == "single"}
    if len(labels) == 1:
        remark(f"{name}: every label is {str(labels.pop()).lower()}: nothing of the other kind is learned from")
    return comparisons


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
    row = in_one_form(row)
    kind = _kind(row)
    if kind == "pair" and all(_is_conversation(row[name]) for name in FIELDS["pair"]):
        prompt, completions = _split(*(messages_of_field(row[name], name) for name in FIELDS["pair"]))
        _require_beginning(row, prompt)
    else:
        prompt, completions = _prompt(row), _completions(row, kind)
    return Comparison(
        kind=kind,
        prompt=Chat.of(row, prompt).shortest,
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
        forms = ", or ".join(" and ".join(names) for names in FIELDS.values()) + " (best first)"
        fields = [] if begun else [name for names in FIELDS.values() for name in names]
        raise lacking(row, fields, f"expected {forms}", f"expected {forms}", {k: 0 for k in row if not missing(row, k)})
    for name in FIELDS[begun[0]]:
        if missing(row, name):
            raise lacking(row, (name,), "a row needs it", f"field {name!r} is missing")
    return begun[0]


def _prompt(row: Mapping[str, Any]) -> Prompt:
    fields = [name for name in PROMPTS if not missing(row, name)]
    if not fields and not row.keys().isdisjoint(PROMPTS):
        raise lacking(row, PROMPTS, "a row needs a prompt", "")
    if len(fields) != 1:
        raise ValueError(f"expected one of prompt and messages; the row has {' and '.join(fields) or 'neither'}")
    value = row[fields[0]]
    if fields == ["prompt"] and isinstance(value, str):
        return value
    prompt = messages_of_field(value, fields[0])
    if prompt[-1]["role"] == "assistant":
        raise ValueError(f"{fields[0]} ends with the assistant's message; the completions begin with one")
    return prompt


def _completions(row: Mapping[str, Any], kind: Kind) -> tuple[Completion, ...]:
    if kind == "single":
        return (_completion(row["completion"], "completion"),)
    if kind == "pair":
        return tuple(_completion(row[name], name) for name in FIELDS["pair"])
    listed = read_json(row["completions"], "completions")
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


def _split(chosen: list[dict], rejected: list[dict]) -> tuple[list[dict], tuple[Completion, ...]]:
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


def _require_beginning(row: Mapping[str, Any], common: Sequence[dict]) -> None:
    """Refuse a prompt beside whole conversations with which these do not begin."""
    if not missing(row, "prompt"):
        prompt = row["prompt"] if isinstance(row["prompt"], str) else messages_of_field(row["prompt"], "prompt")
        behind_prompt(common, prompt, "chosen and rejected")
    if not missing(row, "messages"):
        messages = messages_of_field(row["messages"], "messages")
        shorter, longer = sorted((messages, list(common)), key=len)
        behind_prompt(longer, shorter, "messages")


def _label(value: Any) -> bool:
    label = LABELS.get(str(value).lower())
    if label is None:
        raise ValueError(f"label must be true or false (or 1 or 0), got {shortened(value)}")
    return label


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


# ``PairBatch``: comparisons as tensors, and a worker's comparisons cut into micro-batches without splitting any.


class PairBatch(NamedTuple):
    """N comparisons of K completions each, which stay together: K is 2 for pairs and 1 for single completions.

    What is not ``present`` counts nowhere: shorter ones among ranked lists.
    """

    completions: TokenBatch
    """N·K rows, the completions of a comparison one after another: chosen, rejected, …"""
    present: torch.Tensor
    """[N, K] bool."""
    desirable: torch.Tensor
    """[N] bool: the label of single completions, True for others."""
    numbers: dict[str, torch.Tensor]
    """[N] float32 each: columns of the data that a loss reads, such as margin."""
    ref_logprobs: torch.Tensor | None = None
    """[N, K]: log π_ref of each completion, the sum over its tokens that count."""
    ref_scorings: tuple[Hashable, ...] = ()
    """The scoring of each reference that has scored these; empty where that is not noted."""

    @property
    def sides(self) -> int:
        """K."""
        return self.present.shape[1]

    @property
    def chosen(self) -> TokenBatch:
        """The first completion of each comparison."""
        return self.completions.rows(slice(0, None, self.sides))

    @property
    def rejected(self) -> TokenBatch:
        """The second completion of each comparison."""
        return self.completions.rows(slice(1, None, self.sides))

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "PairBatch":
        """The batch with ``function`` applied to every tensor."""
        return PairBatch(
            self.completions.map(function),
            function(self.present),
            function(self.desirable),
            {name: function(value) for name, value in self.numbers.items()},
            None if self.ref_logprobs is None else function(self.ref_logprobs),
            self.ref_scorings,
        )

    def row_tokens(self) -> list[int]:
        """Tokens of each comparison: what an engine balances its workers by."""
        return self.lengths().sum(1).tolist()

    def lengths(self) -> torch.Tensor:
        """[N, K] int64: tokens of each completion, prompt included."""
        return self.completions.lengths.view(self.present.shape)

    def counted(self) -> torch.Tensor:
        """[N, K] int64: tokens of each completion that count in a loss."""
        return self.completions.mask.sum(1).view(self.present.shape)

    def rows(self, index: torch.Tensor | slice) -> "PairBatch":
        """The chosen comparisons, whole."""
        places = torch.arange(self.present.numel(), device=self.present.device).view(self.present.shape)[index]
        return PairBatch(
            self.completions.rows(places.flatten()),
            self.present[index],
            self.desirable[index],
            {name: value[index] for name, value in self.numbers.items()},
            None if self.ref_logprobs is None else self.ref_logprobs[index],
            self.ref_scorings,
        )

    def side(self, place: int) -> "PairBatch":
        """One completion of each comparison, as a batch of single completions."""
        return PairBatch(
            self.completions.rows(slice(place, None, self.sides)).trim(),
            self.present[:, place : place + 1],
            self.desirable,
            self.numbers,
            None if self.ref_logprobs is None else self.ref_logprobs[:, place : place + 1],
            self.ref_scorings,
        )

    def to(self, device: torch.device | str) -> "PairBatch":
        """The batch on a device."""
        return self.map(lambda value: value.to(device))


class PairPart(NamedTuple):
    """``batch`` holds the comparisons ``places`` of a larger one. Without places nothing in it counts."""

    places: torch.Tensor
    batch: PairBatch


def pair_parts(
    batch: PairBatch, max_tokens: int, *, packing: bool = False, share_prefixes: bool = False
) -> list[PairPart]:
    """The batch in parts of at most ``max_tokens`` tokens, or one comparison.

    Padding counts, unless rows are packed. Completions that share a prompt worth it always are; it counts once.
    """
    alone, parts = np.arange(len(batch.present)), []
    lengths = batch.lengths()
    if share_prefixes and len(alone):
        shared = batch.completions.prefixes_worth_sharing().view(batch.present.shape)
        saved = (shared.sum(1) - shared.max(1).values).cpu().numpy()
        sharing, alone = np.flatnonzero(saved), np.flatnonzero(saved == 0)
        tokens = lengths.sum(1).cpu().numpy() - saved
        parts = [sharing[part] for part in packed_rows(tokens[sharing].tolist(), max_tokens)]
    rest = lengths[torch.from_numpy(alone).to(lengths.device)]
    if packing:
        lone_parts = packed_rows(rest.sum(1).tolist(), max_tokens)
    else:
        lone_parts = padded_rows(rest.max(1).values.tolist() if len(alone) else [], max_tokens // batch.sides)
    places = [
        torch.from_numpy(part).to(batch.present.device) for part in [*parts, *(alone[part] for part in lone_parts)]
    ]
    return [PairPart(index, _trimmed(batch.rows(index))) for index in places]


def stand_in_pair(batch: PairBatch) -> PairPart:
    """A pair that counts nothing, for a worker that is done before others: all join the collectives."""
    sides = batch.sides

    def nothing(value: torch.Tensor) -> torch.Tensor:
        return value.new_zeros((1, *value.shape[1:]))

    completions = batch.completions.map(lambda value: value.new_zeros((sides, 2) if value.dim() > 1 else sides))
    empty = batch._replace(completions=batch.completions.map(nothing)).map(nothing)
    completions = completions._replace(lengths=completions.lengths + 2)
    return PairPart(batch.completions.lengths.new_zeros(0), empty._replace(completions=completions))


def restore_rows(parts: Sequence[tuple[torch.Tensor, torch.Tensor]], like: torch.Tensor) -> torch.Tensor:
    """[N, K] of the shape of ``like`` from (places, [n, K]) pairs."""
    whole = torch.zeros(like.shape, device=like.device)
    for places, values in parts:
        if len(places):
            whole[places] = values.to(whole)
    return whole


def collate_comparisons(
    comparisons: Sequence[Sequence[Trajectory]],
    pad_token_id: int,
    *,
    desirable: Sequence[bool] | None = None,
    numbers: Mapping[str, Sequence[float]] | None = None,
) -> PairBatch:
    """Encoded completions of each comparison → a batch; lists of unequal length are filled with what is not present.

    Raises:
        ValueError: no comparisons, or a completion without a token that counts.
    """
    if not comparisons or not all(comparisons):
        raise ValueError("cannot make a batch of no comparisons, or of one without completions")
    sides = max(len(row) for row in comparisons)
    flat: list[Trajectory] = []
    for group, row in enumerate(comparisons):
        for trajectory in row:
            if not any(trajectory.loss_mask):
                where = trajectory.row.get("_where", f"comparison {group}")
                raise ValueError(f"{where}: a completion has no token that counts")
        flat += [*row, *[_ABSENT] * (sides - len(row))]
    present = torch.tensor([[place < len(row) for place in range(sides)] for row in comparisons])
    # What is not present is in no group: it shares no prompt.
    groups = torch.arange(len(comparisons)).repeat_interleave(sides)
    groups = torch.where(present.flatten(), groups, -1 - torch.arange(len(groups)))
    completions = collate(flat, pad_token_id)._replace(groups=groups, rollout_logprobs=None)
    labels = [True] * len(comparisons) if desirable is None else list(desirable)
    columns = {name: torch.tensor(values, dtype=torch.float32) for name, values in (numbers or {}).items()}
    return PairBatch(completions, present, torch.tensor(labels), columns)


_ABSENT: Any = Trajectory(
    tokens=(0, 0), loss_mask=(False, False), logprobs=(0.0, 0.0), weights_versions=(-1, -1), finish_reason="stop"
)


def _trimmed(batch: PairBatch) -> PairBatch:
    return batch._replace(completions=batch.completions.trim())
