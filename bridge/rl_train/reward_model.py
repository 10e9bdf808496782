"""``rl-fn train reward-model``: a model that scores completions, from pairs or ranked lists."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rl_bridge.loop.loop_run import Run
from rl_bridge.loop.values import RewardModel
from rl_bridge.models.model_source import ValueSource
from rl_bridge.run.options import MAY_CHANGE
from rl_bridge.run.run import Observer
from rl_train.compared import REWARD_MODEL_LOSSES, ComparisonOptions, RewardLoss, accuracy_of, inputs_of, settled


@dataclass(frozen=True, kw_only=True)
class RewardModelPipeline(ComparisonOptions):
    """A reward model. Its trunk is that of ``model``; its head of one number starts at zero."""

    trainer: ClassVar[str] = "reward-model"
    name: str = field(default="reward-model", metadata=MAY_CHANGE)
    loss: RewardLoss = field(default_factory=REWARD_MODEL_LOSSES["bradley_terry"])

    def __post_init__(self) -> None:
        """Refuse constants that the loss does not take."""
        super().__post_init__()
        self.loss.build()


def run_reward_model(options: RewardModelPipeline, observers: Sequence[Observer] = ()) -> dict[str, Any]:
    """Run the recipe to its end and return the summary that ``summary.json`` holds."""
    options.begin()
    loss = options.loss.build()
    inputs = inputs_of(options, loss)
    model, rows, held_out = inputs.model, inputs.rows, inputs.held_out.all()
    marks, place = settled(options, inputs, loss), options.shared()
    steps = options.steps_for(len(rows))
    options.rehearse(model, ValueSource(model.source, pad_token=model.pad_token))
    with (
        ExitStack() as models,
        Run.of(options, marks, census=inputs.census, threads=options.threads, observers=observers) as run,
    ):
        judge = models.enter_context(RewardModel(model, loss, options.adamw(steps), **place, **options.trained_part()))
        about = options.about(judge)
        run.keep_best("held_out_loss", "min")
        for step in run.steps(steps, [judge, rows]):
            update = judge.update(rows.batch(options.rows_per_step))
            run.log(update, judge.held_out(held_out) if options.due(step, steps) else {})
        after = judge.held_out(held_out)
        best = run.load_best(judge)
        judge.save(run.folder / "model")
        numbers = {"after": after, "best_loss": best, "steps": steps, "loss": {"name": loss.name, **loss.constants}}
        run.finish(accuracy_of(after), **numbers, **about)
    return run.summary
