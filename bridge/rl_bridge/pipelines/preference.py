"""Learning from preferences from a config: data, model, reference, training, evaluation, results."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rl_bridge.data.examples import batch_of
from rl_bridge.data.stream import RowStream
from rl_bridge.memory.profiler import profiled
from rl_bridge.models.loading import save_pretrained
from rl_bridge.pipelines.comparisons import ComparisonOptions, accuracy_of, load_data
from rl_bridge.pipelines.losses import LOSSES, PreferenceLoss
from rl_bridge.pipelines.training import common_summary, prepare_processes
from rl_bridge.tracking.options import MAY_CHANGE, require_used
from rl_bridge.tracking.run import open_run
from rl_bridge.trainers.comparison_steps import with_reference
from rl_bridge.trainers.modules.optimizer import OptimizerConfig
from rl_bridge.trainers.preference import PreferenceConfig, evaluate_preference, train_preference


@dataclass(frozen=True, kw_only=True)
class PreferencePipeline(ComparisonOptions):
    """Everything a run depends on. The policy starts from ``model``, which is the reference too."""

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
            without = f"with loss:{self.loss.loss}, which has no reference"
            require_used(self, ("cache_reference",), without)
        if self.offload == "phases" and not self.cache_reference:
            raise ValueError("offload phases needs cache_reference: else policy and reference compute in every step")


def run_preference(pipeline: PreferencePipeline) -> dict[str, Any]:
    """Run the pipeline to its end and return the summary that ``summary.json`` holds."""
    executor = pipeline.start()
    prepare_processes(pipeline, executor)
    loss = pipeline.loss.build()
    data = load_data(pipeline, loss)
    examples, held_out, pad, scoring = data.examples, data.held_out, data.pad_token_id, pipeline.scoring()
    config = replace(pipeline.preference, steps=pipeline.steps_for(len(examples), pipeline.preference))
    engines = pipeline.engines(executor, pipeline.mesh.of(len(executor.slots)), data.source)
    with engines, open_run(pipeline, data.fingerprints) as run, profiled(run, executor, pipeline.memory):
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
        save_pretrained(run.folder / "model", policy, data.tokenizer)
        summary = {
            "result": accuracy_of(after),
            "before": before,
            "after": after,
            "best_loss": best,
            "steps": config.steps,
            "loss": {"name": loss.name, **loss.constants, "average": loss.average, "wpo": loss.wpo},
            "rows": len(examples),
            "held_out": len(held_out),
            "seconds": round(run.seconds, 1),
            **common_summary(pipeline, data.source, engines),
        }
        run.finish(summary)
    return summary
