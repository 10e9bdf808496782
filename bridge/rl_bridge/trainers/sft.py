"""Supervised fine-tuning: the loop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rl_bridge.data.stream import RowStream
from rl_bridge.data.token_batch import TokenBatch, collate
from rl_bridge.data.trajectory import Trajectory
from rl_bridge.engines import NeedParallel, TrainEngine
from rl_bridge.tracking.run import Run
from rl_bridge.trainers.modules.optimizer import OptimizerConfig
from rl_bridge.trainers.modules.policy import mean


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """``steps`` 0 skips it: a model that follows instructions already needs no warm start."""

    steps: int = 0
    rows_per_step: int = 256
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-3, warmup=50)


def train_sft(
    run: Run,
    policy: TrainEngine,
    stream: RowStream,
    to_trajectory: Callable[[dict], Trajectory],
    config: SFTConfig,
    *,
    pad_token_id: int,
) -> None:
    """Train on the rows' own completions; every step is logged, checkpointed when due, and resumable."""
    for step in run.steps("sft", config.steps, state={"policy": policy, "stream": stream}):
        batch = supervised_batch(stream.take(config.rows_per_step), to_trajectory, pad_token_id)
        metrics = policy.train_step(NeedParallel(batch), float(batch.mask.sum()))
        update = policy.optimizer_step()
        run.log(step, {name: mean(value) for name, value in metrics.items()} | update, tokens=int(batch.lengths.sum()))


def supervised_batch(
    rows: Sequence[dict], to_trajectory: Callable[[dict], Trajectory], pad_token_id: int
) -> TokenBatch:
    """The rows' own completions as if they had been sampled."""
    return collate([to_trajectory(row) for row in rows], pad_token_id)
