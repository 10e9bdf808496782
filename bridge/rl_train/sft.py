"""``rl-fn train sft``: supervised fine-tuning on rows; the best model on held-out rows is exported."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rl_bridge.data.census import Census, too_long
from rl_bridge.data.rows import supervised_row
from rl_bridge.loop.data import NLL, Model, rows_for_loss
from rl_bridge.loop.encoded import encoded
from rl_bridge.loop.loop_run import Run
from rl_bridge.loop.trained import Policy
from rl_bridge.models.row_checks import remark_on_conversations
from rl_bridge.models.turn_ends import remark_on_ends
from rl_bridge.modules.trainable import OptimizerConfig
from rl_bridge.pipelines.training import load_model, load_rows, seed_everything, undivided
from rl_bridge.run.options import MAY_CHANGE
from rl_bridge.run.provenance import HELD_OUT, of_rows
from rl_bridge.run.run import Observer
from rl_train.row_options import Inputs, RowOptions


@dataclass(frozen=True, kw_only=True)
class SFTPipeline(RowOptions):
    """Supervised fine-tuning. Rows have ``messages``, or ``prompt`` and ``response``, ``completion`` or ``answer``.

    The loss counts every turn of the assistant and nothing else. Without ``data`` it is two-digit addition, without
    ``model`` a tiny new Qwen2.
    """

    trainer: ClassVar[str] = "sft"
    name: str = field(default="sft", metadata=MAY_CHANGE)
    rows_per_step: int = 32
    held_out: int = 100
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-4, beta2=0.999)


def run_sft(options: SFTPipeline, observers: Sequence[Observer] = ()) -> dict[str, Any]:
    """Run the recipe to its end and return the summary that ``summary.json`` holds."""
    options.begin()
    inputs = inputs_of(options)
    model, rows, held_out = inputs.model, inputs.rows, inputs.held_out.all()
    marks = options.settle(inputs, trained=len(rows), held_out=len(inputs.held_out))
    steps, place = options.steps_for(len(rows)), options.shared()
    options.rehearse(model)
    with (
        ExitStack() as models,
        Run.of(options, marks, census=inputs.census, threads=options.threads, observers=observers) as run,
    ):
        policy = models.enter_context(Policy(model, NLL(), options.adamw(steps), **place, **options.trained_part()))
        about = options.about(policy)
        run.keep_best("held_out_nll", "min")
        before = run.once("before", lambda: policy.held_out(held_out))
        of_before = {} if before is None else {"nll_before": before["held_out_nll"]}
        for step in run.steps(steps, [policy, rows]):
            update = policy.update(rows.batch(options.rows_per_step))
            run.log(update, policy.held_out(held_out) if options.due(step, steps) else {})
        after = policy.held_out(held_out)["held_out_nll"]
        best = run.load_best(policy)
        policy.save(run.folder / "model")
        exported = "last: there is no best one" if best is None else f"best, {best:.3f}"
        both = " → ".join(f"{nll:.3f}" for nll in (*of_before.values(), after))
        run.finish(
            f"held-out nll {both}; {run.folder / 'model'} has the {exported}",
            **{**of_before, "nll_after": after, "nll_best": best, "steps": steps, **about},
        )
    return run.summary


def inputs_of(options: SFTPipeline) -> Inputs:
    """Model, rows and held-out rows, each row checked and encoded.

    Raises:
        FileNotFoundError, ValueError: as ``load_rows``, ``load_model`` and ``encoded`` do.
    """
    census = Census()
    parts = load_rows(options, (), supervised_row, census)
    both = [row for part in parts for row in part]
    seed_everything(options.seed)  # a reader of the user's may have drawn numbers
    source, tokenizer = load_model(options, both)
    model = Model(source, tokenizer)
    remark_on_ends(source, tokenizer)
    remark_on_conversations(tokenizer, both, apply_chat_template=options.apply_chat_template)
    (train, left_out), (held_out, held_left_out) = (
        encoded(source, tokenizer, part, **options.reading()) for part in parts
    )
    if options.max_length is not None:
        census.leave_out(too_long(options.max_length), left_out, held_left_out)
    return Inputs(
        model=model,
        rows=rows_for_loss(model, train, seed=options.seed, fingerprint=""),
        held_out=rows_for_loss(model, held_out, fingerprint=""),
        census=census,
        fingerprints={"data": of_rows(*parts), HELD_OUT: of_rows(parts[1]), **undivided(census)},
    )
