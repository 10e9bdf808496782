"""Supervised fine-tuning: the module and the loop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rl_bridge.data.stream import RowStream
from rl_bridge.data.token_batch import TokenBatch, collate
from rl_bridge.data.trajectory import Trajectory
from rl_bridge.engines import NeedParallel, TrainEngine
from rl_bridge.engines.results import returns
from rl_bridge.functional import from_jax
from rl_bridge.tracking.run import Run
from rl_bridge.trainers.module import CausalLMModule, OptimizerConfig
from rl_bridge.trainers.policy import detached, mean
from rl_fn import Ratio, aggregate_parts

_aggregate_parts = from_jax(aggregate_parts)


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """``steps`` 0 skips it: a model that follows instructions already needs no warm start."""

    steps: int = 0
    rows_per_step: int = 256
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-3, warmup=50)


class SupervisedModule(CausalLMModule):
    """Mean negative log-likelihood of the rows' own completions."""

    @returns("sum")
    def train_step(self, batch: TokenBatch, denominator: float) -> dict[str, Ratio]:
        """Add the gradient of Σ −log π / ``denominator`` (the whole batch's tokens); returns the undivided loss."""
        total: Any = 0
        for _, part in self.micro_batches(batch):
            loss = _aggregate_parts(-self(part)[0], part.mask, "token-mean")
            (loss.total / denominator).backward()
            total = total + detached(loss)
        return {"nll": total}


def sft(
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
