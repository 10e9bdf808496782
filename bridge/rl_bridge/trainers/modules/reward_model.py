"""The module that learns a reward from comparisons: a model with a head of one number, which scores completions."""

from collections.abc import Mapping

import torch

from rl_bridge.data.pair_batch import PairBatch
from rl_bridge.engines.results import returns
from rl_bridge.models.source import ModelSource
from rl_bridge.parallel.config import ParallelConfig
from rl_bridge.trainers.modules.comparison_loss import REWARD_LOSSES, ComparisonLoss
from rl_bridge.trainers.modules.optimizer import OptimizerConfig
from rl_bridge.trainers.modules.preference import ComparisonScorer
from rl_bridge.trainers.modules.scoring import ScoringConfig
from rl_bridge.trainers.modules.trainable import Trainable
from rl_bridge.trainers.modules.value import ValueScorer
from rl_fn import Ratio


class RewardModule(Trainable, ComparisonScorer, ValueScorer):
    """``train_step`` adds the gradient of a loss of rewards. Its ``scores`` of a batch are the rewards of rows."""

    def __init__(
        self,
        source: ModelSource,
        optimizer: OptimizerConfig,
        loss: ComparisonLoss,
        *,
        updates: int,
        scoring: ScoringConfig | None = None,
        parallel: ParallelConfig | None = None,
    ) -> None:
        """``source`` is a ``ValueSource`` or a ``PretrainedValueSource``."""
        super().__init__(source, optimizer, updates=updates, scoring=scoring, parallel=parallel)
        if loss.name not in REWARD_LOSSES:
            raise ValueError(f"{loss.name} trains a policy; a reward model takes {' or '.join(REWARD_LOSSES)}")
        self.loss = loss

    def outputs(self, batch: PairBatch) -> torch.Tensor:
        """The reward of each completion, read after its last token, [N, K]."""
        return self.at_end(batch.completions).view(batch.present.shape)

    @returns("rows")
    def completion_rewards(self, batch: PairBatch) -> torch.Tensor:
        """The reward of each completion under the present weights, [N, K]."""
        return self.all_outputs(batch)

    @returns("sum")
    def train_step(
        self, batch: PairBatch, denominator: float, statistics: Mapping[str, float] | None = None
    ) -> dict[str, Ratio]:
        """Add the gradient of Σ losses / ``denominator`` (the whole batch's comparisons); returns undivided metrics."""
        return self.backward_of(self.loss, batch, denominator, statistics)
