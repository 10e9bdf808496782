"""A reward model from a config: data, model, training, evaluation, results."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rl_bridge.data.examples import batch_of
from rl_bridge.data.stream import RowStream
from rl_bridge.memory.profiler import profiled
from rl_bridge.models.loading import save_pretrained
from rl_bridge.models.padding import pad_with_no_end
from rl_bridge.models.values import ValueSource
from rl_bridge.pipelines.comparisons import ComparisonOptions, accuracy_of, load_data
from rl_bridge.pipelines.losses import REWARD_MODEL_LOSSES, RewardLoss
from rl_bridge.pipelines.training import common_summary, prepare_processes
from rl_bridge.tracking.options import MAY_CHANGE
from rl_bridge.tracking.run import open_run
from rl_bridge.trainers.reward_model import RewardModelConfig, evaluate_reward_model, train_reward_model


@dataclass(frozen=True, kw_only=True)
class RewardModelPipeline(ComparisonOptions):
    """Everything a run depends on. The trunk is that of ``model``; the head of one number starts at zero."""

    name: str = field(default="reward-model", metadata=MAY_CHANGE)
    reward_model: RewardModelConfig = RewardModelConfig()
    loss: RewardLoss = field(default_factory=REWARD_MODEL_LOSSES["bradley_terry"])

    def __post_init__(self) -> None:
        """Refuse constants that the loss does not take, and what nothing would read."""
        super().__post_init__()
        self.require_steps(self.reward_model, "reward_model")
        self.loss.build()


def run_reward_model(pipeline: RewardModelPipeline) -> dict[str, Any]:
    """Run the pipeline to its end and return the summary that ``summary.json`` holds."""
    executor = pipeline.start()
    prepare_processes(pipeline, executor)
    loss = pipeline.loss.build()
    data = load_data(pipeline, loss)
    read = (t.tokens for example in (*data.examples, *data.held_out) for t in example.completions)
    pad = pad_with_no_end(data.tokenizer, data.source, read)
    if not data.templated:
        data.tokenizer.chat_template = None  # whoever reads the folder is to render what was trained on
    source = ValueSource(data.source, pad_token=pad)
    config = replace(pipeline.reward_model, steps=pipeline.steps_for(len(data.examples), pipeline.reward_model))
    engines = pipeline.engines(executor, pipeline.mesh.of(len(executor.slots)), source)
    with engines, open_run(pipeline, data.fingerprints) as run, profiled(run, executor, pipeline.memory):
        engines.serve(run)
        model = engines.reward_model(pipeline.optimizer, loss, updates=config.steps, scoring=pipeline.scoring())
        run.keep_best("held_out_loss", "min")
        evaluate = partial(evaluate_reward_model, model, loss, batch_of(data.held_out, pad))
        stream = RowStream(data.examples, seed=pipeline.seed)
        train_reward_model(run, model, stream, loss, config, evaluate=evaluate, pad_token_id=pad)
        found = evaluate()
        best = run.load_best({"model": model})
        save_pretrained(run.folder / "model", model, data.tokenizer)
        summary = {
            "result": accuracy_of(found),
            "after": found,
            "best_loss": best,
            "steps": config.steps,
            "loss": {"name": loss.name, **loss.constants},
            "rows": len(data.examples),
            "held_out": len(data.held_out),
            "seconds": round(run.seconds, 1),
            **common_summary(pipeline, source, engines),
        }
        run.finish(summary)
    return summary
