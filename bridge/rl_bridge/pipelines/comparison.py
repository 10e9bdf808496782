"""Learning from comparisons, from a config: preferences and reward models, their losses, rows, evaluation, results."""

import inspect
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union

import tyro
from transformers import PreTrainedTokenizerBase

import rl_fn
from rl_bridge.algorithms.comparison_training import (
    PreferenceConfig,
    RewardModelConfig,
    evaluate_preference,
    evaluate_reward_model,
    train_preference,
    train_reward_model,
    with_reference,
)
from rl_bridge.data.census import Census, SourceCensus, too_long
from rl_bridge.data.comparisons import Comparison, read_comparisons
from rl_bridge.data.examples import Example, batch_of, examples_of, rows_in
from rl_bridge.data.messages import Chat, chat_of
from rl_bridge.data.rows import RowStream
from rl_bridge.data.tasks import arithmetic_rows
from rl_bridge.data.unread_keys import remark_on_keys
from rl_bridge.models.encoding import encode_completion
from rl_bridge.models.model_source import ModelSource, ValueSource
from rl_bridge.models.pretrained import save_pretrained
from rl_bridge.models.row_checks import chat_of_row, check_rows, pad_with_no_end, remark_on_words
from rl_bridge.models.turn_ends import remark_on_ends
from rl_bridge.modules.comparison import PREFERENCE_LOSSES, REWARD_LOSSES, UNMATCHED, ComparisonLoss, constants_of
from rl_bridge.modules.trainable import OptimizerConfig
from rl_bridge.pipelines.training import (
    ADDITION,
    TrainingOptions,
    common_summary,
    load_model,
    prepare_processes,
    remark_on_shared,
    split,
)
from rl_bridge.run.options import MAY_CHANGE, require_used
from rl_bridge.run.provenance import of_rows
from rl_bridge.run.run import Observer, open_run


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


def _choice(losses: dict[str, type[RewardLossOptions]]) -> Any:
    """The type of an option with a sub-command for each loss: loss:dpo."""
    return Union[  # noqa: UP007
        tuple(
            Annotated[options, tyro.conf.subcommand(name, description=(options.__doc__ or "").partition("\n")[0])]
            for name, options in losses.items()
        )
    ]


if TYPE_CHECKING:
    PreferenceLoss = RewardLossOptions
    RewardLoss = RewardLossOptions
else:
    PreferenceLoss = _choice(LOSSES)
    RewardLoss = _choice(REWARD_MODEL_LOSSES)


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
    census: Census

    def settle(self, step: Mapping[str, int]) -> None:
        """Count the rows, and refuse too few for ``step``, as ``Census.settle`` does."""
        trained, held_out = rows_in(self.examples), rows_in(self.held_out)
        self.census.settle(trained=trained, held_out=held_out, step=step, examples=len(self.examples))


def load_data(options: ComparisonOptions, loss: ComparisonLoss) -> ComparisonData:
    """Rows, model and tokenizer of a run.

    Raises:
        FileNotFoundError, ValueError: as ``load_comparisons``, ``load_model`` and ``encoded`` do.
    """
    census = Census()
    parts = load_comparisons(options, census)
    source, tokenizer = load_model_for(options, [row for part in parts for row in part])
    reading: dict[str, Any] = {"apply_chat_template": options.apply_chat_template, "max_length": options.max_length}
    remark_on_unread(tokenizer, [row for part in parts for row in part], options.apply_chat_template)
    examples, held_out = (encoded(source, tokenizer, part, loss, **reading) for part in parts)
    if options.max_length is not None:
        left_out = (len(part) - rows_in(read) for part, read in zip(parts, (examples, held_out), strict=True))
        census.leave_out(too_long(options.max_length), *left_out)
    assert isinstance(tokenizer.pad_token_id, int)
    return ComparisonData(
        source=source,
        tokenizer=tokenizer,
        templated=options.apply_chat_template and any(has_roles(row) for part in parts for row in part),
        pad_token_id=tokenizer.pad_token_id,
        examples=examples,
        held_out=held_out,
        fingerprints=fingerprints_of(options, tokenizer, *parts),
        census=census,
    )


def remark_on_unread(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Comparison], apply_chat_template: bool) -> None:
    """Name keys of messages, tools and the like that change no token, and words that the chat template leaves out."""

    def encode(row: Mapping[str, Any]) -> list[int]:
        tokens: list[int] = []
        for completion in row["completions"]:
            trajectory = encode_completion(tokenizer, Chat.of(row), completion, apply_chat_template=apply_chat_template)
            tokens += trajectory.tokens
        return tokens

    records = [
        {
            **chat_of(row.prompt).row(),
            "completions": [*row.completions, *(() if row.gold is None else (row.gold,))],
            "_where": row.where,
        }
        for row in rows
    ]
    remark_on_keys(records, encode)
    if apply_chat_template:
        remark_on_words(
            tokenizer, records, lambda row: [chat_of_row({**row, "response": c}) for c in row["completions"]]
        )


def has_roles(row: Comparison) -> bool:
    """Whether any text of the row is a conversation."""
    return not all(isinstance(text, str) for text in (chat_of(row.prompt).prompt, *row.completions))


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
        remark_on_shared(*((repr(replace(row, where="")) for row in part) for part in (rows, held_rows)))
        return rows, held_rows
    named = [{"prompt": row.prompt, "row": row} for row in rows]
    train, held_out = split(options, named, census)
    return [row["row"] for row in train], [row["row"] for row in held_out]


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


def fingerprints_of(
    options: ComparisonOptions,
    tokenizer: PreTrainedTokenizerBase,
    train: Sequence[Comparison],
    held_out: Sequence[Comparison],
) -> dict[str, str]:
    """Fingerprints of the rows, of the model and of the chat template. The place of a row does not count."""
    parts = ([{**vars(row), "where": ""} for row in rows] for rows in (train, held_out))
    return {"data": of_rows(*parts)} | options.fingerprints(tokenizer)


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


def encoded(
    source: ModelSource,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Comparison],
    loss: ComparisonLoss,
    *,
    apply_chat_template: bool = True,
    max_length: int | None = None,
) -> list[Example]:
    """The rows as the loss reads them, without those that are too long.

    Raises:
        ValueError: as ``examples_of`` and ``check_rows`` do.
    """
    # A reward is read at the end of the template's text, where a classifier of transformers reads.
    to_end = loss.name in REWARD_LOSSES
    encode = partial(encode_completion, tokenizer, apply_chat_template=apply_chat_template, to_end=to_end)
    unmatched = loss.name in UNMATCHED
    examples = examples_of(rows, loss.form, encode, unmatched=unmatched, what=loss.name, longest=max_length)
    completions = [{**t.row, "trajectory": t} for example in examples for t in example.completions]
    check_rows(source, tokenizer, completions, lambda row: (row["trajectory"].messages, row["trajectory"].tokens))
    return examples


def pad_of_rewards(
    source: ModelSource, tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], *, templated: bool
) -> int:
    """The pad token of a reward model on these examples; the tokenizer is made one that such a model is read with.

    ``templated``: whether the chat template has rendered any of the rows.
    """
    pad = pad_with_no_end(tokenizer, source, (t.tokens for example in examples for t in example.completions))
    if not templated:
        tokenizer.chat_template = None  # whoever reads the folder is to render what was trained on
    return pad


def accuracy_of(metrics: Mapping[str, float]) -> str:
    """One sentence about held-out comparisons."""
    accuracy, low, high = (metrics[f"held_out_accuracy{end}"] for end in ("", "_low", "_high"))
    return f"held-out accuracy {accuracy:.2f} (95 % interval {low:.2f} … {high:.2f})"


@dataclass(frozen=True, kw_only=True)
class PreferencePipeline(ComparisonOptions):
    """Learning from preferences. The policy starts from ``model``, which is the reference too."""

    trainer: ClassVar[str] = "preference"
    name: str = field(default="preference", metadata=MAY_CHANGE)
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-6, beta2=0.999)
    preference: PreferenceConfig = PreferenceConfig()
    loss: PreferenceLoss = field(default_factory=LOSSES["dpo"])
    cache_reference: bool = True
    """Score all rows with the reference once before training. False scores the rows of each step, beside the policy."""

    def __post_init__(self) -> None:
        """Refuse models that would have to take turns within a step, and what nothing would read."""
        super().__post_init__()
        self.require_steps(self.preference, "preference")
        if not self.loss.build().needs_reference:
            require_used(self, ("cache_reference",), f"with loss:{self.loss.loss}, which has no reference")
        if self.offload == "phases" and not self.cache_reference:
            raise ValueError("offload phases needs cache_reference: else policy and reference compute in every step")


def run_preference(pipeline: PreferencePipeline, observers: Sequence[Observer] = ()) -> dict[str, Any]:
    """Run the pipeline to its end and return the summary that ``summary.json`` holds."""
    executor = pipeline.start()
    prepare_processes(pipeline, executor)
    loss = pipeline.loss.build()
    data = load_data(pipeline, loss)
    remark_on_ends(data.source, data.tokenizer)
    data.settle({"--preference.rows-per-step": pipeline.preference.rows_per_step})
    examples, held_out, pad, scoring = data.examples, data.held_out, data.pad_token_id, pipeline.scoring()
    config = replace(pipeline.preference, steps=pipeline.steps_for(len(examples), pipeline.preference))
    engines = pipeline.engines(executor, pipeline.mesh.of(len(executor.slots)), data.source)
    engines.rehearse_export(data.tokenizer, pipeline.export_dtype)
    with engines, open_run(pipeline, data.fingerprints, executor, observers) as run:
        engines.serve(run)
        reference = engines.completion_scorer(scoring) if loss.needs_reference else None
        if reference is not None:
            held_out = with_reference(held_out, reference, pad)
            if pipeline.cache_reference:
                examples = with_reference(examples, reference, pad)
                reference.release()
                reference = None
        policy = engines.preference(pipeline.optimizer, loss, updates=config.steps, scoring=scoring)
        evaluate = partial(evaluate_preference, policy, loss, batch_of(held_out, pad))
        before = run.cached_result("before", evaluate)
        run.keep_best("held_out_loss", "min")
        train_preference(
            run,
            policy,
            RowStream(examples, seed=pipeline.seed),
            loss,
            config,
            evaluate=evaluate,
            reference=reference,
            pad_token_id=pad,
        )
        after = evaluate()
        best = run.load_best({"policy": policy})
        save_pretrained(run.folder / "model", policy, data.tokenizer, engines.types)
        summary = {
            "result": accuracy_of(after),
            "before": before,
            "after": after,
            "best_loss": best,
            "steps": config.steps,
            "loss": {"name": loss.name, **loss.constants, "average": loss.average, "wpo": loss.wpo},
            "seconds": round(run.seconds, 1),
            **common_summary(pipeline, data.source, engines, data.census),
        }
        run.finish(summary)
    return summary


@dataclass(frozen=True, kw_only=True)
class RewardModelPipeline(ComparisonOptions):
    """A reward model. Its trunk is that of ``model``; its head of one number starts at zero."""

    trainer: ClassVar[str] = "reward-model"
    name: str = field(default="reward-model", metadata=MAY_CHANGE)
    reward_model: RewardModelConfig = RewardModelConfig()
    loss: RewardLoss = field(default_factory=REWARD_MODEL_LOSSES["bradley_terry"])

    def __post_init__(self) -> None:
        """Refuse constants that the loss does not take, and what nothing would read."""
        super().__post_init__()
        self.require_steps(self.reward_model, "reward_model")
        self.loss.build()


def run_reward_model(pipeline: RewardModelPipeline, observers: Sequence[Observer] = ()) -> dict[str, Any]:
    """Run the pipeline to its end and return the summary that ``summary.json`` holds."""
    executor = pipeline.start()
    prepare_processes(pipeline, executor)
    loss = pipeline.loss.build()
    data = load_data(pipeline, loss)
    data.settle({"--reward-model.rows-per-step": pipeline.reward_model.rows_per_step})
    pad = pad_of_rewards(data.source, data.tokenizer, [*data.examples, *data.held_out], templated=data.templated)
    source = ValueSource(data.source, pad_token=pad)
    config = replace(pipeline.reward_model, steps=pipeline.steps_for(len(data.examples), pipeline.reward_model))
    engines = pipeline.engines(executor, pipeline.mesh.of(len(executor.slots)), source)
    engines.rehearse_export(data.tokenizer, pipeline.export_dtype)
    with engines, open_run(pipeline, data.fingerprints, executor, observers) as run:
        engines.serve(run)
        model = engines.reward_model(pipeline.optimizer, loss, updates=config.steps, scoring=pipeline.scoring())
        run.keep_best("held_out_loss", "min")
        evaluate = partial(evaluate_reward_model, model, loss, batch_of(data.held_out, pad))
        stream = RowStream(data.examples, seed=pipeline.seed)
        train_reward_model(run, model, stream, loss, config, evaluate=evaluate, pad_token_id=pad)
        after = evaluate()
        best = run.load_best({"model": model})
        save_pretrained(run.folder / "model", model, data.tokenizer, engines.types)
        summary = {
            "result": accuracy_of(after),
            "after": after,
            "best_loss": best,
            "steps": config.steps,
            "loss": {"name": loss.name, **loss.constants},
            "seconds": round(run.seconds, 1),
            **common_summary(pipeline, source, engines, data.census),
        }
        run.finish(summary)
    return summary
