"""Learning from preferences without a reward model: DPO and its family, by the loss."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rl_bridge.data.examples import Example, batch_of
from rl_bridge.data.pair_batch import PairBatch
from rl_bridge.data.stream import RowStream
from rl_bridge.engines import NeedParallel, TrainEngine
from rl_bridge.memory.collecting import collector_waits, phase_ended
from rl_bridge.messages import given
from rl_bridge.tracking.run import Run
from rl_bridge.trainers.comparison_steps import BatchStatistics, accumulate, held_out_metrics, statistics_of
from rl_bridge.trainers.modules.comparison_loss import ComparisonLoss


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    """One step is one update on ``rows_per_step`` comparisons."""

    steps: int = 200
    rows_per_step: int = 64
    evaluate_every: int = 25
    shift_momentum: float = 0.9
    """Of BCO's shift, a moving mean of the rewards."""

    def __post_init__(self) -> None:
        """Refuse counts that train nothing, and a mean that does not move."""
        if min(self.steps, self.rows_per_step, self.evaluate_every) < 1 or not 0 <= self.shift_momentum < 1:
            raise ValueError(
                "counts must be ≥ 1 and shift_momentum in [0, 1), got "
                f"{given(self, 'steps', 'rows_per_step', 'evaluate_every', 'shift_momentum')}"
            )


@collector_waits()
def train_preference(
    run: Run,
    policy: TrainEngine,
    stream: RowStream[Example],
    loss: ComparisonLoss,
    config: PreferenceConfig,
    *,
    evaluate: Callable[[], Mapping[str, float]],
    reference: TrainEngine | None = None,
    pad_token_id: int,
) -> None:
    """Score the completions, compare, update; every step is logged, checkpointed when due, and resumable.

    ``reference`` scores each batch where the examples do not bring its log-probabilities along. What ``evaluate``
    returns is logged when due and after the last step.
    """
    statistics = BatchStatistics(loss, config.shift_momentum)
    state = {"policy": policy, "stream": stream, "statistics": statistics}
    for step in run.steps("preference", config.steps, state=state):
        batch = batch_of(stream.take(config.rows_per_step), pad_token_id)
        if reference is not None:
            # Cut into the same micro-batches as the policy's own: equal weights give equal bits.
            batch = batch._replace(ref_logprobs=reference.completion_logprobs(NeedParallel(batch)))
        given = statistics.of(policy, batch)
        metrics = accumulate(policy, loss, batch, given) | given | policy.optimizer_step()
        statistics.update(metrics)
        if (step + 1) % config.evaluate_every == 0 or step + 1 == config.steps:
            metrics |= evaluate()
        run.log(step, metrics, tokens=sum(batch.row_tokens()), batch=batch)
        phase_ended()


def evaluate_preference(policy: TrainEngine, loss: ComparisonLoss, held_out: PairBatch) -> dict[str, float]:
    """Loss, implicit rewards and accuracy on held-out comparisons, with an interval; statistics are their own."""
    learned = held_out.side(0) if loss.form == "singles" else held_out
    outputs = policy.completion_logprobs(NeedParallel(learned))
    return held_out_metrics(loss, learned, outputs, statistics_of(policy, loss, held_out, outputs))
