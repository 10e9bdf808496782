"""The module that learns a reward from comparisons: a model with a head of one number, which scores completions."""

from typing import Any

import torch

from rl_bridge.data.pair_batch import PairBatch
from rl_bridge.engines.results import returns
from rl_bridge.models.source import ModelSource
from rl_bridge.trainers.modules.comparison_loss import REWARD_LOSSES, ComparisonLoss
from rl_bridge.trainers.modules.optimizer import OptimizerConfig
from rl_bridge.trainers.modules.preference import ComparisonModule
from rl_bridge.trainers.modules.value import ValueScorer


class RewardModule(ComparisonModule, ValueScorer):
    """A reward model that learns by a loss of rewards. Its ``scores`` of a batch are the rewards of rows."""

    def __init__(self, source: ModelSource, optimizer: OptimizerConfig, loss: ComparisonLoss, **options: Any) -> None:
        """``source`` is a ``ValueSource`` or a ``PretrainedValueSource``; ``options`` are those of every module."""
        super().__init__(source, optimizer, loss, **options)
        if loss.name not in REWARD_LOSSES:
            raise ValueError(f"{loss.name} trains a policy; a reward model takes {' or '.join(REWARD_LOSSES)}")

    def outputs(self, batch: PairBatch) -> torch.Tensor:
        """The reward of each completion, read after its last token, [N, K]."""
        return self.at_end(batch.completions).view(batch.present.shape)

    @returns("rows")
    def completion_rewards(self, batch: PairBatch) -> torch.Tensor:
        """The reward of each completion under the present weights, [N, K]."""
        return self.all_outputs(batch)
