"""Comparisons of completions: their losses as options, their rows, and the inputs of recipes that learn from them."""

import inspect
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from typing import TYPE_CHECKING, Any, Literal

from transformers import PreTrainedTokenizerBase

import rl_fn
from rl_bridge.data.census import Census, SourceCensus, too_long
from rl_bridge.data.comparisons import Comparison, read_comparisons
from rl_bridge.data.examples import rows_in
from rl_bridge.data.messages import chat_of
from rl_bridge.data.tasks import arithmetic_rows
from rl_bridge.loop.data import Model, rows_for_loss
from rl_bridge.loop.encoded import encoded_comparisons, has_roles, pad_of_rewards, remark_on_unread
from rl_bridge.models.model_source import ModelSource
from rl_bridge.models.turn_ends import remark_on_ends
from rl_bridge.modules.comparison import (
    PREFERENCE_LOSSES,
    REWARD_LOSSES,
    SHIFT_MOMENTUM,
    ComparisonLoss,
    constants_of,
)
from rl_bridge.pipelines.objective_options import subcommands
from rl_bridge.pipelines.training import ADDITION, load_model, remark_on_shared, seed_everything, split, undivided
from rl_bridge.run.provenance import HELD_OUT, of_rows
from rl_train.row_options import Inputs, RowOptions


@dataclass(frozen=True, kw_only=True)
class RewardLossOptions:
    """Options of a loss of comparisons. A subclass has the constants of one loss."""

    loss: str = field(default="", init=False)

    def build(self) -> ComparisonLoss:
        """The loss with these constants."""
        shared = {option.name for option in fields(PreferenceLossOptions)}
        values = {option.name: getattr(self, option.name) for option in fields(self)}
        constants = {name: value for name, value in values.items() if name not in shared}
        others = {name: value for name, value in values.items() if name in shared and name != "loss"}
        return ComparisonLoss(name=self.loss, constants=constants, **others)


@dataclass(frozen=True, kw_only=True)
class PreferenceLossOptions(RewardLossOptions):
    """Options that every loss of a policy takes. A subclass has the constants of one loss besides."""

    average: bool | None = None
    """The loss reads mean log-probabilities per token, not sums. None is the loss's own way."""
    wpo: bool = False
    """Weigh each comparison by how likely the policy is to write its completions (WPO)."""
    shift_momentum: float = SHIFT_MOMENTUM
    """Momentum of BCO's shift, a moving mean of the rewards."""


def _options(name: str, base: type[RewardLossOptions]) -> type[RewardLossOptions]:
    """A dataclass with the loss's constants, their defaults and its help."""
    function = getattr(rl_fn, name)
    annotations = typing.get_type_hints(function)
    constants = [
        # Arrays cannot be written on a command line: a column of the data has one number a row.
        (option, hint if typing.get_origin(hint := annotations[option]) is Literal else float, field(default=default))
        for option, default in constants_of(name).items()
    ]
    named: Any = ("loss", str, field(default=name, init=False))
    return make_dataclass(
        f"{name}_options",
        [*constants, named],
        bases=(base,),
        frozen=True,
        kw_only=True,
        namespace={"__doc__": inspect.getdoc(function), "__module__": __name__},
    )


LOSSES = {name: _options(name, PreferenceLossOptions) for name in PREFERENCE_LOSSES}
"""Losses of policies."""
REWARD_MODEL_LOSSES = {name: _options(name, RewardLossOptions) for name in REWARD_LOSSES}


def loss_options(name: str, **options: Any) -> RewardLossOptions:
    """The options of a loss by its name.

    >>> loss_options("simpo", gamma=0.5).build().constants
    {'beta': 2.0, 'gamma': 0.5}
    """
    losses = LOSSES | REWARD_MODEL_LOSSES
    if name not in losses:
        raise ValueError(f"unknown loss {name!r}; there is: {', '.join(sorted(losses))}")
    return losses[name](**options)


if TYPE_CHECKING:
    PreferenceLoss = RewardLossOptions
    RewardLoss = RewardLossOptions
else:
    PreferenceLoss = subcommands(LOSSES)
    RewardLoss = subcommands(REWARD_MODEL_LOSSES)


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions(RowOptions):
    """Options of recipes that learn from comparisons. Without ``data`` it is two-digit addition, right and wrong."""

    held_out: int = 200


def inputs_of(options: ComparisonOptions, loss: ComparisonLoss) -> Inputs:
    """Model, comparisons and held-out ones, each row checked and encoded.

    The tokenizer of a reward model gets a pad token with which no row ends.

    Raises:
        FileNotFoundError, ValueError: as ``load_comparisons``, ``load_model`` and ``encoded_comparisons`` do.
    """
    census = Census()
    parts = load_comparisons(options, census)
    both = [row for part in parts for row in part]
    seed_everything(options.seed)  # a reader of the user's may have drawn numbers
    source, tokenizer = load_model_for(options, both)
    remark_on_unread(tokenizer, both, options.apply_chat_template)
    train, held_out = (encoded_comparisons(source, tokenizer, part, loss, **options.reading()) for part in parts)
    if options.max_length is not None:
        left_out = (len(part) - rows_in(read) for part, read in zip(parts, (train, held_out), strict=True))
        census.leave_out(too_long(options.max_length), *left_out)
    if loss.name in REWARD_LOSSES:
        templated = options.apply_chat_template and any(map(has_roles, both))
        pad_of_rewards(source, tokenizer, [*train, *held_out], templated=templated)
    else:
        remark_on_ends(source, tokenizer)
    model = Model(source, tokenizer)
    return Inputs(
        model=model,
        rows=rows_for_loss(model, train, seed=options.seed, fingerprint=""),
        held_out=rows_for_loss(model, held_out, fingerprint=""),
        census=census,
        fingerprints={"data": _content(*parts), HELD_OUT: _content(parts[1]), **undivided(census)},
    )


def settled(options: ComparisonOptions, inputs: Inputs, loss: ComparisonLoss) -> dict[str, str]:
    """Count the comparisons, and return what a resumed run compares; see ``RowOptions.settle``."""
    trained, held_out = rows_in(inputs.rows.rows), rows_in(inputs.held_out.rows)
    return options.settle(inputs, trained=trained, held_out=held_out, loss=loss)


def load_comparisons(
    options: ComparisonOptions, census: Census | None = None
) -> tuple[list[Comparison], list[Comparison]]:
    """Rows to train on and rows held out; ``census`` gets the numbers of both sources."""
    census = Census() if census is None else census
    if options.data is None:
        rows = addition()
        census.data = SourceCensus(name=ADDITION, read=len(rows))
    else:
        rows = read_comparisons(options.data, census.data)
    if options.eval_data is not None:
        census.eval_data = SourceCensus()
        held_rows = read_comparisons(options.eval_data, census.eval_data)
        remark_on_shared(*([{"prompt": row.prompt} for row in part] for part in (rows, held_rows)))
        census.content = _content(rows, held_rows)
        return rows, held_rows
    census.content = _content(rows)
    named = [{"prompt": row.prompt, "row": row} for row in rows]
    train, held_out = split(options, named, census)
    return [row["row"] for row in train], [row["row"] for row in held_out]


def _content(*parts: Sequence[Comparison]) -> str:
    return of_rows(*([{**vars(row), "where": ""} for row in part] for part in parts))


def addition() -> list[Comparison]:
    """Two-digit addition: the sum, and a number that is off by 1 or 10.

    >>> addition()[0].prompt, addition()[0].completions
    ('10+10=', ('20', '21'))
    """
    rows = []
    for number, row in enumerate(arithmetic_rows(["+"])):
        wrong = int(row["answer"]) + (1, -1, 10, -10)[number % 4]
        completions = (row["answer"], str(wrong))
        where = f"{ADDITION}, row {number + 1}"
        rows.append(Comparison(kind="pair", prompt=row["prompt"], completions=completions, where=where))
    return rows


def load_model_for(
    options: ComparisonOptions, rows: Sequence[Comparison]
) -> tuple[ModelSource, PreTrainedTokenizerBase]:
    """The model and its tokenizer; a new model can spell all rows."""
    spelled = [
        {
            "prompt": chat_of(row.prompt).prompt,
            "answer": "".join(map(str, (*row.completions, row.gold or ""))),
            "_where": row.where,
        }
        for row in rows
    ]
    return load_model(options, spelled)


def accuracy_of(metrics: Mapping[str, float]) -> str:
    """One sentence about held-out comparisons."""
    accuracy, low, high = (metrics[f"held_out_accuracy{end}"] for end in ("", "_low", "_high"))
    return f"held-out accuracy {accuracy:.2f} (95 % interval {low:.2f} … {high:.2f})"
