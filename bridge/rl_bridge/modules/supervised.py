"""The module that supervised fine-tuning trains.

The file stands alone since each module that workers hold has one that bears the name of what it trains.
"""

from typing import Any

import torch

from rl_bridge.data.token_batch import TokenBatch
from rl_bridge.engines.dispatch import returns
from rl_bridge.functional import from_jax
from rl_bridge.memory.token_budget import scores_within_memory, within_memory
from rl_bridge.modules.policy import detached
from rl_bridge.modules.trainable import CausalLMModule
from rl_fn import Ratio, aggregate_parts

_aggregate_parts = from_jax(aggregate_parts)


class SupervisedModule(CausalLMModule):
    """Mean negative log-likelihood of the rows' own completions."""

    @returns("sum")
    @within_memory
    def train_step(self, batch: TokenBatch, denominator: float) -> dict[str, Ratio]:
        """Add the gradient of Σ −log π / ``denominator`` (the whole batch's tokens); returns the undivided loss.

        And that of a mixture's load-balancing loss, where the model's configuration asks for one.
        """
        total: Any = 0
        for _, part in self.balanced_parts(self.micro_batches(batch)):
            loss = self._loss(part)
            self.backward(loss.total / denominator)
            total = total + detached(loss)
        return {"nll": total, **self.balance_metrics()}

    @returns("sum")
    @scores_within_memory
    @torch.no_grad()
    def nll(self, batch: TokenBatch) -> dict[str, Ratio]:
        """The undivided loss under the present weights, without a gradient."""
        return {"nll": sum(detached(self._loss(part)) for _, part in self.micro_batches(batch))}  # type: ignore[dict-item]

    def _loss(self, part: TokenBatch) -> Any:
        return _aggregate_parts(-self(part)[0], part.mask, "token-mean")
