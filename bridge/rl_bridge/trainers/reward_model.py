"""A reward model from comparisons of completions: Bradley–Terry of pairs, Plackett–Luce of ranked lists."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rl_bridge.data.examples import Example, batch_of
from rl_bridge.data.pair_batch import PairBatch
from rl_bridge.data.stream import RowStream
from rl_bridge.engines import NeedParallel, TrainEngine
from rl_bridge.memory.collecting import collector_waits, phase_ended
from rl_bridge.messages import given
from rl_bridge.tracking.run import Run
from rl_bridge.trainers.comparison_steps import accumulate, held_out_metrics
from rl_bridge.trainers.modules.comparison_loss import ComparisonLoss


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """One step is one update on ``rows_per_step`` comparisons."""

    steps: int = 200
    rows_per_step: int = 64
    evaluate_every: int = 25

    def __post_init__(self) -> None:
        """Refuse counts that train nothing."""
        if min(self.steps, self.rows_per_step, self.evaluate_every) < 1:
            raise ValueError(f"counts must be ≥ 1, got {given(self, 'steps', 'rows_per_step', 'evaluate_every')}")


@collector_waits()
def train_reward_model(
    run: Run,
    model: TrainEngine,
    stream: RowStream[Example],
    loss: ComparisonLoss,
    config: RewardModelConfig,
    *,
    evaluate: Callable[[], Mapping[str, float]],
    pad_token_id: int,
) -> None:
    """Score the completions, compare, update; every step is logged, checkpointed when due, and resumable.

    What ``evaluate`` returns is logged when due and after the last step.
    """
    for step in run.steps("reward_model", config.steps, state={"model": model, "stream": stream}):
        batch = batch_of(stream.take(config.rows_per_step), pad_token_id)
        metrics = accumulate(model, loss, batch, {}) | model.optimizer_step()
        if (step + 1) % config.evaluate_every == 0 or step + 1 == config.steps:
            metrics |= evaluate()
        run.log(step, metrics, tokens=sum(batch.row_tokens()), batch=batch)
        phase_ended()


def evaluate_reward_model(model: TrainEngine, loss: ComparisonLoss, held_out: PairBatch) -> dict[str, float]:
    """Loss, rewards and accuracy on held-out comparisons, with an interval."""
    return held_out_metrics(loss, held_out, model.completion_rewards(NeedParallel(held_out)), {})
