"""Supervised fine-tuning: an update, and the loop of a warm start."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rl_bridge.common.terminal import given
from rl_bridge.data.rows import RowStream
from rl_bridge.data.token_batch import TokenBatch, collate
from rl_bridge.data.trajectory import Trajectory
from rl_bridge.engines import NeedParallel, TrainEngine
from rl_bridge.engines.train import one_update
from rl_bridge.memory.garbage_collection import collector_waits, phase_ended
from rl_bridge.modules.policy import mean
from rl_bridge.modules.trainable import OptimizerConfig
from rl_bridge.run.run import Run


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """Supervised steps before reinforcement learning. 0: a model that follows instructions already needs none."""

    steps: int = 0
    """Supervised updates before reinforcement learning."""
    rows_per_step: int = 256
    """Rows of a supervised update."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-3, warmup=50)

    def __post_init__(self) -> None:
        """Refuse counts that cannot be."""
        if self.steps < 0 or self.rows_per_step < 1:
            raise ValueError(f"need steps ≥ 0 and rows_per_step ≥ 1, got {given(self, 'steps', 'rows_per_step')}")


@collector_waits()
def train_sft(
    run: Run,
    policy: TrainEngine,
    stream: RowStream,
    to_trajectory: Callable[[Any], Trajectory],
    config: WarmStart,
    *,
    pad_token_id: int,
) -> None:
    """Train on the rows' own completions; every step is logged, checkpointed when due, and resumable."""
    for step in run.steps("sft", config.steps, state={"policy": policy, "stream": stream}):
        batch = supervised_batch(stream.take(config.rows_per_step), to_trajectory, pad_token_id)
        metrics = supervised_update(policy, batch)
        run.log(step, metrics, tokens=int(batch.lengths.sum()), batch=batch)
        phase_ended()


def supervised_update(policy: TrainEngine, batch: TokenBatch) -> dict[str, float]:
    """One update on the tokens that count, and its metrics.

    Raises:
        ValueError: no token counts, so that there is nothing to learn.
    """
    counted = float(batch.mask.sum())
    if not counted:
        raise ValueError(
            f"none of the {int(batch.lengths.sum())} tokens in the batch's {len(batch.mask)} rows counts: mask must be "
            "True where a token is to be learnt"
        )
    with one_update(policy):
        totals = policy.train_step(NeedParallel(batch), counted)
        return {name: mean(value) for name, value in totals.items()} | policy.optimizer_step()


def held_out_nll(policy: TrainEngine, batch: TokenBatch) -> float:
    """Mean negative log-likelihood of the tokens that count, under the present weights."""
    return mean(policy.nll(NeedParallel(batch))["nll"])


def supervised_batch(rows: Sequence[Any], to_trajectory: Callable[[Any], Trajectory], pad_token_id: int) -> TokenBatch:
    """The rows' own completions as if they had been sampled."""
    return collate([to_trajectory(row) for row in rows], pad_token_id)
