"""``rl-fn train preference``: a policy from preferred and rejected completions, DPO and its family."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rl_bridge.loop.loop_run import Run
from rl_bridge.loop.scored import Reference
from rl_bridge.loop.trained import Policy
from rl_bridge.modules.trainable import OptimizerConfig
from rl_bridge.run.options import MAY_CHANGE, require_used
from rl_bridge.run.run import Observer
from rl_train.compared import LOSSES, ComparisonOptions, PreferenceLoss, accuracy_of, inputs_of, settled


@dataclass(frozen=True, kw_only=True)
class PreferencePipeline(ComparisonOptions):
    """Learning from preferences. The policy starts from ``model``, which is the reference too."""

    trainer: ClassVar[str] = "preference"
    name: str = field(default="preference", metadata=MAY_CHANGE)
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-6, beta2=0.999)
    loss: PreferenceLoss = field(default_factory=LOSSES["dpo"])
    cache_reference: bool = True
    """Score all rows with the reference once before training. False scores the rows of each step, beside the policy."""

    def __post_init__(self) -> None:
        """Refuse models that would have to take turns within a step, and what nothing would read."""
        super().__post_init__()
        if not self.loss.build().needs_reference:
            require_used(self, ("cache_reference",), f"with loss:{self.loss.loss}, which has no reference")
        elif self.offload == "phases" and not self.cache_reference:
            raise ValueError("offload phases needs cache_reference: else policy and reference compute in every step")


def run_preference(options: PreferencePipeline, observers: Sequence[Observer] = ()) -> dict[str, Any]:
    """Run the recipe to its end and return the summary that ``summary.json`` holds."""
    options.begin()
    loss = options.loss.build()
    inputs = inputs_of(options, loss)
    model, rows = inputs.model, inputs.rows
    marks, place = settled(options, inputs, loss), options.shared()
    steps = options.steps_for(len(rows))
    options.rehearse(model)
    with (
        ExitStack() as models,
        Run.of(options, marks, census=inputs.census, threads=options.threads, observers=observers) as run,
    ):
        reference = models.enter_context(Reference(model, **place)) if loss.needs_reference else None
        if reference is not None:
            reference.cache(inputs.held_out)
            if options.cache_reference:
                reference.cache(rows)
                reference.release()
        beside = None if options.cache_reference else reference
        policy = models.enter_context(Policy(model, loss, options.adamw(steps), **place, **options.trained_part()))
        about = options.about(policy, *([] if reference is None else [reference]))
        held_out = inputs.held_out.all()
        before = run.once("before", lambda: policy.held_out(held_out))
        run.keep_best("held_out_loss", "min")
        for step in run.steps(steps, [policy, rows]):
            batch = rows.batch(options.rows_per_step)
            # The reference cuts a batch into the policy's own micro-batches: equal weights give equal bits.
            update = policy.update(batch if beside is None else beside.score(batch))
            run.log(update, policy.held_out(held_out) if options.due(step, steps) else {})
        after = policy.held_out(held_out)
        best = run.load_best(policy)
        policy.save(run.folder / "model")
        numbers = {"after": after, "best_loss": best, "steps": steps}
        numbers |= {} if before is None else {"before": before}
        of_loss = {"name": loss.name, **loss.constants, "average": loss.average, "wpo": loss.wpo}
        run.finish(accuracy_of(after), **numbers, loss=of_loss, **about)
    return run.summary
