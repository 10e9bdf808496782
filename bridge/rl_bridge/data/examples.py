"""Rows of preferences, encoded and arranged as a loss reads them: what a stream of training data holds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from rl_bridge.data.pair_batch import PairBatch, collate_comparisons
from rl_bridge.data.pairs import Comparison, Completion, require_kind
from rl_bridge.data.requests import Prompt
from rl_bridge.data.trajectory import Trajectory

Encode = Callable[[Prompt, Completion], Trajectory]
"""A prompt and a completion of it as tokens, of which the completion's count."""
Form = Literal["pairs", "triples", "singles", "ranking"]


@dataclass(frozen=True, kw_only=True)
class Example:
    """One comparison: what is never split over workers or micro-batches."""

    completions: tuple[Trajectory, ...]
    desirable: bool = True
    numbers: Mapping[str, float] = field(default_factory=dict)
    ref_logprobs: tuple[float, ...] | None = None
    """log π_ref of each completion, where it was computed before training."""


def examples_of(
    rows: Sequence[Comparison], form: Form, encode: Encode, *, unmatched: bool = False, what: str = "the loss"
) -> list[Example]:
    """The rows as ``what`` learns from them.

    pairs and triples: chosen, rejected (and gold). With ``unmatched`` also single completions, the first desirable one
    with the first undesirable one, and so on; the fewer ones begin again. singles: each completion of a pair or alone,
    and one of another prompt in its place, which estimates the KL. ranking: from the best to the worst; a pair is a
    list of two.

    Raises:
        ValueError: a row of another kind, one that cannot be encoded, or some rows with a number and some without: with
            file and row number.
    """
    if form == "singles":
        examples = _singles(rows, encode, what)
    elif unmatched and any(row.kind == "single" for row in rows):
        examples = _matched(rows, encode, what)
    else:
        require_kind(rows, ("pair", "ranking") if form == "ranking" else ("pair",), what)
        examples = [
            Example(completions=_encoded(row, _completions(row, form, what), encode), numbers=row.numbers)
            for row in rows
        ]
    _require_same_numbers(rows)
    return examples


def batch_of(examples: Sequence[Example], pad_token_id: int) -> PairBatch:
    """The examples as tensors, with the reference's log-probabilities if all have them."""
    names = examples[0].numbers if examples else ()
    batch = collate_comparisons(
        [example.completions for example in examples],
        pad_token_id,
        desirable=[example.desirable for example in examples],
        numbers={name: [example.numbers[name] for example in examples] for name in names},
    )
    references = [example.ref_logprobs for example in examples]
    if any(reference is None for reference in references):
        return batch
    return batch._replace(ref_logprobs=torch.tensor(references))


def _completions(row: Comparison, form: Form, what: str) -> tuple[Completion, ...]:
    if form != "triples":
        return row.completions
    if row.gold is None:
        raise ValueError(f"{row.where}: {what} needs a third completion: field 'gold' is missing or empty")
    return (*row.completions, row.gold)


def _encoded(row: Comparison, completions: Sequence[Completion], encode: Encode) -> tuple[Trajectory, ...]:
    try:
        encoded = [encode(row.prompt, completion) for completion in completions]
    except ValueError as error:
        raise ValueError(f"{row.where}: {error}") from error
    return tuple(replace(trajectory, row={"_where": row.where}) for trajectory in encoded)


def _singles(rows: Sequence[Comparison], encode: Encode, what: str) -> list[Example]:
    require_kind(rows, ("single", "pair"), what)
    labelled = [
        (row, completion, row.desirable if row.kind == "single" else place == 0)
        for row in rows
        for place, completion in enumerate(row.completions)
    ]
    examples = []
    for number, (row, completion, desirable) in enumerate(labelled):
        others = (labelled[(number + step) % len(labelled)] for step in range(1, len(labelled)))
        other = next((text for another, text, _ in others if another.prompt != row.prompt), None)
        if other is None:
            raise ValueError(f"{row.where}: {what} estimates a KL from completions of other prompts, and there is one")
        completions = _encoded(row, (completion, other), encode)
        examples.append(Example(completions=completions, desirable=desirable, numbers=row.numbers))
    return examples


def _matched(rows: Sequence[Comparison], encode: Encode, what: str) -> list[Example]:
    require_kind(rows, ("single",), f"with single completions among the rows, {what}")
    good, bad = ([row for row in rows if row.desirable is label] for label in (True, False))
    if not good or not bad:
        raise ValueError(
            f"{what} compares desirable with undesirable completions; the data has {len(good)} and {len(bad)}"
        )
    pairs = ((good[n % len(good)], bad[n % len(bad)]) for n in range(max(len(good), len(bad))))
    return [
        Example(completions=(*_encoded(g, g.completions, encode), *_encoded(b, b.completions, encode)))
        for g, b in pairs
    ]


def _require_same_numbers(rows: Sequence[Comparison]) -> None:
    for row in rows:
        if row.numbers.keys() != rows[0].numbers.keys():
            wanted, has = (", ".join(sorted(x.numbers)) or "no numbers" for x in (rows[0], row))
            raise ValueError(f"{row.where}: the first row has {wanted}, this one has {has}")
