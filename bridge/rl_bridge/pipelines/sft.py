"""Supervised fine-tuning from a config: data, model, training, evaluation, the best model exported."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from rl_bridge.algorithms.supervised_training import SFTConfig, held_out_nll, train_sft
from rl_bridge.data.census import Census, too_long
from rl_bridge.data.rows import RowStream, refuse, supervised_row
from rl_bridge.data.token_batch import collate
from rl_bridge.data.trajectory import Trajectory
from rl_bridge.models.encoding import encode_row
from rl_bridge.models.model_source import ModelSource
from rl_bridge.models.pretrained import save_pretrained
from rl_bridge.models.row_checks import check_rows, remark_on_conversations
from rl_bridge.models.turn_ends import remark_on_ends
from rl_bridge.modules.trainable import OptimizerConfig
from rl_bridge.pipelines.training import TrainingOptions, common_summary, load_model, load_rows, prepare_processes
from rl_bridge.run.options import MAY_CHANGE, require_used
from rl_bridge.run.provenance import of_rows
from rl_bridge.run.run import Observer, open_run


@dataclass(frozen=True, kw_only=True)
class SFTPipeline(TrainingOptions):
    """Supervised fine-tuning. Rows have ``messages``, or ``prompt`` and ``response``, ``completion`` or ``answer``.

    The loss counts every turn of the assistant and nothing else. Without ``data`` it is two-digit addition, without
    ``model`` a tiny new Qwen2.
    """

    trainer: ClassVar[str] = "sft"
    sft: SFTConfig = SFTConfig()
    epochs: float | None = None
    """Passes over the rows, in place of ``sft.steps``."""
    name: str = field(default="sft", metadata=MAY_CHANGE)
    held_out: int = 100
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-4, beta2=0.999)
    apply_chat_template: bool = True
    """Render messages by the tokenizer's template. False concatenates their contents, and ends each turn of the
    assistant with the end-of-sequence token."""
    max_length: int | None = None
    """Rows with more tokens are left out, and counted. None keeps them all."""

    def __post_init__(self) -> None:
        """Refuse counts that train nothing."""
        super().__post_init__()
        if (self.epochs is not None and not self.epochs > 0) or (self.max_length is not None and self.max_length < 2):
            raise ValueError(f"need epochs > 0 and max_length ≥ 2, got {self.epochs} and {self.max_length}")
        if self.epochs is not None:
            require_used(self.sft, ("steps",), f"beside --epochs {self.epochs}", part="sft")
        elif self.sft.steps < 1:
            raise ValueError(f"need sft.steps ≥ 1, got {self.sft.steps}")

    def steps_for(self, rows: int) -> int:
        """Updates for so many rows: ``sft.steps``, or what the epochs take, the last one rounded up."""
        return self.sft.steps if self.epochs is None else math.ceil(self.epochs * rows / self.sft.rows_per_step)

    def reading(self) -> dict[str, Any]:
        """How rows become tokens: arguments of ``encoded``."""
        return {"apply_chat_template": self.apply_chat_template, "max_length": self.max_length}


def run_sft(pipeline: SFTPipeline, observers: Sequence[Observer] = ()) -> dict[str, Any]:
    """Run the pipeline to its end and return the summary that ``summary.json`` holds."""
    executor = pipeline.start()
    census = Census()
    train_rows, held_rows = load_rows(pipeline, (), supervised_row, census)
    prepare_processes(pipeline, executor)
    source, tokenizer = load_model(pipeline, [*train_rows, *held_rows])
    remark_on_ends(source, tokenizer)
    rows = [*train_rows, *held_rows]
    remark_on_conversations(tokenizer, rows, apply_chat_template=pipeline.apply_chat_template)
    train, left_out = encoded(source, tokenizer, train_rows, **pipeline.reading())
    held_out, held_left_out = encoded(source, tokenizer, held_rows, **pipeline.reading())
    if pipeline.max_length is not None:
        census.leave_out(too_long(pipeline.max_length), left_out, held_left_out)
    step = {"--sft.rows-per-step": pipeline.sft.rows_per_step}
    census.settle(trained=len(train), held_out=len(held_out), step=step)
    config = replace(pipeline.sft, steps=pipeline.steps_for(len(train)))
    mesh = pipeline.mesh.of(len(executor.slots))
    engines = pipeline.engines(executor, mesh, source)
    engines.rehearse_export(tokenizer, pipeline.export_dtype)
    pad = tokenizer.pad_token_id
    assert isinstance(pad, int)
    batch = collate(held_out, pad)
    fingerprints = {"data": of_rows(train_rows, held_rows)} | pipeline.fingerprints(tokenizer)
    with engines, open_run(pipeline, fingerprints, executor, observers) as run:
        engines.serve(run)
        folder = run.folder
        run.keep_best("held_out_nll", "min")
        policy = engines.supervised(pipeline.optimizer, updates=config.steps, scoring=pipeline.scoring())
        before = run.cached_result("before", lambda: held_out_nll(policy, batch))
        stream = RowStream(train, seed=pipeline.seed)
        train_sft(run, policy, stream, lambda row: row, config, pad_token_id=pad, held_out=batch)
        after = held_out_nll(policy, batch)
        best = run.load_best({"policy": policy})
        save_pretrained(folder / "model", policy, tokenizer, engines.types)
        summary = {
            "result": f"held-out nll {before:.3f} → {after:.3f}; {folder / 'model'} has the "
            + ("last: no step had one" if best is None else f"best, {best:.3f}"),
            "nll_before": before,
            "nll_after": after,
            "nll_best": best,
            "steps": config.steps,
            "seconds": round(run.seconds, 1),
            **common_summary(pipeline, source, engines, census),
        }
        run.finish(summary)
    return summary


def encoded(
    source: ModelSource,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[dict],
    *,
    apply_chat_template: bool = True,
    max_length: int | None = None,
) -> tuple[list[Trajectory], int]:
    """The rows as tokens, once for the whole run, and the number of rows that are left out for their length.

    Raises:
        ValueError: rows that cannot be encoded or that the model cannot read, the first few of them; or none is short
            enough.
    """
    trajectories: list[Trajectory] = []
    refusals: list[str] = []
    for row in rows:
        try:
            trajectories.append(encode_row(tokenizer, row, apply_chat_template=apply_chat_template))
        except ValueError as error:
            refusals.append(f"{row.get('_where', 'a row')}: {error}")
    refuse(refusals, len(rows))
    short = [t for t in trajectories if max_length is None or len(t.tokens) <= max_length]
    if not short:
        raise ValueError(f"all of {len(rows)} rows are longer than max_length {max_length}")
    in_order = iter(short)
    check_rows(source, tokenizer, [t.row for t in short], lambda _: ((t := next(in_order)).messages, t.tokens))
    return short, len(rows) - len(short)
