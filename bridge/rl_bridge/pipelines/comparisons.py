"""What the pipelines that learn from comparisons share: their rows, and the examples made of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from transformers import PreTrainedTokenizerBase

from rl_bridge.data.arithmetic import arithmetic_rows
from rl_bridge.data.examples import Example, examples_of
from rl_bridge.data.pairs import Comparison, read_comparisons
from rl_bridge.models.checks import check_rows
from rl_bridge.models.encoding import encode_completion
from rl_bridge.models.source import ModelSource
from rl_bridge.pipelines.training import TrainingOptions, load_model, remark_on_shared, split
from rl_bridge.tracking.fingerprints import of_rows
from rl_bridge.tracking.options import require_used
from rl_bridge.trainers.modules.comparison_loss import REWARD_LOSSES, UNMATCHED, ComparisonLoss
from rl_bridge.trainers.preference import PreferenceConfig
from rl_bridge.trainers.reward_model import RewardModelConfig


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions(TrainingOptions):
    """Options of commands that learn from comparisons. Without ``data`` it is two-digit addition, right and wrong."""

    held_out: int = 200
    epochs: float | None = None
    """Passes over the rows, in place of the number of steps."""
    apply_chat_template: bool = True
    """Render messages by the tokenizer's template. False concatenates their contents."""
    max_length: int | None = None
    """Comparisons with a completion of more tokens, prompt included, are left out, and counted. None keeps them all."""

    def __post_init__(self) -> None:
        """Refuse counts that train nothing."""
        super().__post_init__()
        if (self.epochs is not None and not self.epochs > 0) or (self.max_length is not None and self.max_length < 2):
            raise ValueError(f"need epochs > 0 and max_length ≥ 2, got {self.epochs} and {self.max_length}")

    def require_steps(self, config: PreferenceConfig | RewardModelConfig, part: str) -> None:
        """Refuse a number of steps beside the number of epochs."""
        if self.epochs is not None:
            require_used(config, ("steps",), f"beside --epochs {self.epochs}", part=part)

    def steps_for(self, rows: int, config: PreferenceConfig | RewardModelConfig) -> int:
        """Updates for so many rows: the configured steps, or what the epochs take, the last one rounded up."""
        return config.steps if self.epochs is None else math.ceil(self.epochs * rows / config.rows_per_step)


@dataclass(frozen=True, kw_only=True)
class ComparisonData:
    """The model that a run starts from, and its rows as the loss reads them."""

    source: ModelSource
    tokenizer: PreTrainedTokenizerBase
    templated: bool
    """Whether the chat template has rendered any of the rows."""
    pad_token_id: int
    examples: list[Example]
    held_out: list[Example]
    fingerprints: dict[str, str]


def load_data(options: ComparisonOptions, loss: ComparisonLoss) -> ComparisonData:
    """Rows, model and tokenizer of a run.

    Raises:
        FileNotFoundError, ValueError: as ``load_comparisons``, ``load_model`` and ``encoded`` do.
    """
    parts = load_comparisons(options)
    source, tokenizer = load_model_for(options, [row for part in parts for row in part])
    examples, held_out = (encoded(options, source, tokenizer, part, loss) for part in parts)
    assert isinstance(tokenizer.pad_token_id, int)
    return ComparisonData(
        source=source,
        tokenizer=tokenizer,
        templated=options.apply_chat_template and any(_has_roles(row) for part in parts for row in part),
        pad_token_id=tokenizer.pad_token_id,
        examples=examples,
        held_out=held_out,
        fingerprints=fingerprints_of(options, *parts),
    )


def _has_roles(row: Comparison) -> bool:
    return not all(isinstance(text, str) for text in (row.prompt, *row.completions))


def load_comparisons(options: ComparisonOptions) -> tuple[list[Comparison], list[Comparison]]:
    """Rows to train on and rows held out."""
    rows = addition() if options.data is None else read_comparisons(options.data)
    if options.eval_data is not None:
        held_rows = read_comparisons(options.eval_data)
        remark_on_shared(*((repr(replace(row, where="")) for row in part) for part in (rows, held_rows)))
        return rows, held_rows
    named = [{"prompt": row.prompt, "row": row} for row in rows]
    train, held_out = split(options, named)
    return [row["row"] for row in train], [row["row"] for row in held_out]


def addition() -> list[Comparison]:
    """Two-digit addition: the sum, and a number that is off by 1 or 10.

    >>> addition()[0].prompt, addition()[0].completions
    ('10+10=', ('20', '21'))
    """
    rows = []
    for number, row in enumerate(arithmetic_rows(["+"])):
        wrong = int(row["answer"]) + (1, -1, 10, -10)[number % 4]
        rows.append(Comparison(kind="pair", prompt=row["prompt"], completions=(row["answer"], str(wrong))))
    return rows


def fingerprints_of(
    options: ComparisonOptions, train: Sequence[Comparison], held_out: Sequence[Comparison]
) -> dict[str, str]:
    """Of the rows, wherever they were read from, of the model and of the chat template."""
    parts = ([{**vars(row), "where": ""} for row in rows] for rows in (train, held_out))
    return {"data": of_rows(*parts)} | options.fingerprints()


def load_model_for(
    options: ComparisonOptions, rows: Sequence[Comparison]
) -> tuple[ModelSource, PreTrainedTokenizerBase]:
    """The model and its tokenizer; a new model can spell all rows."""
    spelled = [
        {"prompt": row.prompt, "answer": "".join(map(str, (*row.completions, row.gold or ""))), "_where": row.where}
        for row in rows
    ]
    return load_model(options, spelled)


def encoded(
    options: ComparisonOptions,
    source: ModelSource,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Comparison],
    loss: ComparisonLoss,
) -> list[Example]:
    """The rows as the loss reads them, without those that are too long.

    Raises:
        ValueError: all rows are too long; or as ``examples_of`` and ``check_rows`` do.
    """
    # A reward is read where a classifier of transformers reads it: at the end of what the template writes.
    to_end = loss.name in REWARD_LOSSES
    encode = partial(encode_completion, tokenizer, apply_chat_template=options.apply_chat_template, to_end=to_end)
    examples = examples_of(rows, loss.form, encode, unmatched=loss.name in UNMATCHED, what=loss.name)
    longest = math.inf if options.max_length is None else options.max_length
    kept = [example for example in examples if max(len(t.tokens) for t in example.completions) <= longest]
    if not kept:
        raise ValueError(f"all {len(examples)} comparisons are longer than max_length={longest} tokens")
    read = [{**t.row, "trajectory": t} for example in kept for t in example.completions]
    check_rows(source, tokenizer, read, lambda row: (row["trajectory"].messages, row["trajectory"].tokens))
    return kept


def accuracy_of(found: Mapping[str, float]) -> str:
    """One sentence about held-out comparisons."""
    accuracy, low, high = (found[f"held_out_accuracy{end}"] for end in ("", "_low", "_high"))
    return f"held-out accuracy {accuracy:.2f} (95 % interval {low:.2f} … {high:.2f})"
