"""Examples: preference rows, encoded and arranged as a loss reads them, which a stream of training data holds."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress

import torch

from rl_bridge.data.comparisons import Comparison, Completion, Form, Kind, PairBatch, collate_comparisons, require_kind
from rl_bridge.data.trajectory import Prompt, Trajectory

Encode = Callable[[Prompt, Completion], Trajectory]
"""A prompt and a completion of it as tokens, of which the completion's count."""
Encoded = tuple[Trajectory, ...]


@dataclass(frozen=True, kw_only=True)
class Example:
    """One comparison: what is never split over workers or micro-batches."""

    completions: tuple[Trajectory, ...]
    desirable: bool = True
    numbers: Mapping[str, float] = field(default_factory=dict)
    ref_logprobs: tuple[float, ...] | None = None
    """log π_ref of each completion, where it was computed before training."""
    ref_scoring: Hashable = None
    """How that reference scores."""


def examples_of(
    rows: Sequence[Comparison],
    form: Form,
    encode: Encode,
    *,
    unmatched: bool = False,
    what: str = "the loss",
    longest: int | None = None,
) -> list[Example]:
    """The rows as ``what`` learns from them.

    pairs and triples: chosen, rejected (and gold). With ``unmatched`` also single completions, the first desirable one
    with the first undesirable one, and so on; the fewer ones begin again. singles: each completion of a pair or alone,
    and one of another prompt in its place, which estimates the KL. ranking: from the best to the worst; a pair is a
    list of two. Rows with a completion of more than ``longest`` tokens, prompt included, are left out.

    Raises:
        ValueError: a row of another kind, one that cannot be encoded, or some rows with a number and some without: with
            file and row number; or all rows are too long.
    """
    matched = form != "singles" and unmatched and any(row.kind == "single" for row in rows)
    of_form: dict[Form, tuple[Kind, ...]] = {"singles": ("single", "pair"), "ranking": ("pair", "ranking")}
    kinds: tuple[Kind, ...] = ("single",) if matched else of_form.get(form, ("pair",))
    require_kind(rows, kinds, f"with single completions among the rows, {what}" if matched else what)
    _require_same_numbers(rows)
    encoded = [_encoded(row, _completions_of_row(row, form, what), encode) for row in rows]
    if longest is not None:
        short = [max(len(trajectory.tokens) for trajectory in row) <= longest for row in encoded]
        if not any(short):
            raise ValueError(f"all {len(rows)} comparisons are longer than max_length={longest} tokens")
        rows, encoded = list(compress(rows, short)), list(compress(encoded, short))
    if form == "singles":
        return _singles(rows, encoded, encode, what, longest)
    if matched:
        return _matched(rows, encoded, what)
    return [Example(completions=row, numbers=of.numbers) for row, of in zip(encoded, rows, strict=True)]


def rows_in(examples: Sequence[Example]) -> int:
    """Rows that the examples are of."""
    return len({trajectory.row["_where"] for example in examples for trajectory in example.completions})


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
    scorings = dict.fromkeys(example.ref_scoring for example in examples if example.ref_scoring is not None)
    return batch._replace(ref_logprobs=torch.tensor(references), ref_scorings=tuple(scorings))


def _completions_of_row(row: Comparison, form: Form, what: str) -> tuple[Completion, ...]:
    if form != "triples":
        return row.completions
    if row.gold is None:
        raise ValueError(f"{row.where}: {what} needs a third completion: field 'gold' is missing or empty")
    return (*row.completions, row.gold)


def _encoded(row: Comparison, completions: Sequence[Completion], encode: Encode) -> Encoded:
    try:
        encoded = [encode(row.prompt, completion) for completion in completions]
    except ValueError as error:
        raise ValueError(f"{row.where}: {error}") from error
    return tuple(trajectory.labelled(row={"_where": row.where}) for trajectory in encoded)


def _singles(
    rows: Sequence[Comparison], encoded: Sequence[Encoded], encode: Encode, what: str, longest: int | None
) -> list[Example]:
    labelled = [
        (row, completion, trajectory, row.desirable if row.kind == "single" else place == 0)
        for row, trajectories in zip(rows, encoded, strict=True)
        for place, (completion, trajectory) in enumerate(zip(row.completions, trajectories, strict=True))
    ]
    examples = []
    for number, (row, _, trajectory, desirable) in enumerate(labelled):
        others = (labelled[(number + step) % len(labelled)] for step in range(1, len(labelled)))
        texts = (text for another, text, _, _ in others if another.prompt != row.prompt)
        behind = (_encoded(row, (text,), encode)[0] for text in texts)
        other = next((one for one in behind if longest is None or len(one.tokens) <= longest), None)
        if other is None:
            number_of_others = (
                "one" if longest is None else f"none of at most {longest} tokens (--max-length) behind this"
            )
            raise ValueError(
                f"{row.where}: {what} estimates a KL from completions of other prompts, and there is {number_of_others}"
            )
        examples.append(Example(completions=(trajectory, other), desirable=desirable, numbers=row.numbers))
    return examples


def _matched(rows: Sequence[Comparison], encoded: Sequence[Encoded], what: str) -> list[Example]:
    parts = zip(rows, encoded, strict=True)
    labels = [(trajectories, row.desirable) for row, trajectories in parts]
    good, bad = ([trajectories for trajectories, desirable in labels if desirable is label] for label in (True, False))
    if not good or not bad:
        raise ValueError(
            f"{what} compares desirable with undesirable completions; the data has {len(good)} and {len(bad)}"
        )
    pairs = ((good[n % len(good)], bad[n % len(bad)]) for n in range(max(len(good), len(bad))))
    return [Example(completions=(*desirable, *undesirable)) for desirable, undesirable in pairs]


def _require_same_numbers(rows: Sequence[Comparison]) -> None:
    for row in rows:
        if row.numbers.keys() != rows[0].numbers.keys():
            expected, actual = (", ".join(sorted(x.numbers)) or "no numbers" for x in (rows[0], row))
            raise ValueError(f"{row.where}: the first row has {expected}, this one has {actual}")
