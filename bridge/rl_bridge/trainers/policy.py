"""The module that policy-gradient algorithms train: an ``rl_fn`` objective over a causal LM."""

from typing import Any

import torch
from transformers import PreTrainedModel

from rl_bridge.functional import from_jax
from rl_bridge.trainers.module import CausalLMModule, OptimizerConfig
from rl_bridge.trainers.scoring import ScoringConfig
from rl_bridge.types import TokenBatch
from rl_fn import Batch, Objective, Ratio


class PolicyModule(CausalLMModule):
    """``train_step`` accumulates the gradient of the objective over micro-batches; ``optimizer_step`` applies it."""

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: OptimizerConfig,
        objective: Objective,
        *,
        updates: int,
        scoring: ScoringConfig | None = None,
        first_version: int = 0,
    ) -> None:
        super().__init__(model, optimizer, updates=updates, scoring=scoring, first_version=first_version)
        self.objective = objective
        self._share = from_jax(objective.share)

    def train_step(self, batch: TokenBatch, denominator: float) -> dict[str, Ratio]:
        """Add the gradient of Σ per-token losses / ``denominator`` to the parameters' gradients.

        ``denominator`` is ``objective.denominator`` of the whole batch, over all micro-batches and workers: the
        gradient then does not depend on how the batch was cut. Returns undivided metrics, which add up likewise.
        """
        if batch.old_logprobs is None or batch.advantages is None:
            raise ValueError("train_step needs batch.old_logprobs and batch.advantages")
        metrics: dict[str, Any] = {}
        whole = torch.tensor(float(denominator))  # a tensor: a number would be a constant of the program
        for piece in batch.micro_batches(self.scoring.micro_batch_tokens):
            logprobs, entropies = self(piece)
            fields: dict[str, Any] = {
                "logprobs": logprobs,
                "old_logprobs": piece.old_logprobs,
                "advantages": piece.advantages,
                "mask": piece.mask,
                "rollout_logprobs": piece.rollout_logprobs,
                "ref_logprobs": piece.ref_logprobs,
                # Shown as a metric always; differentiated only where the objective has an entropy bonus.
                "entropies": entropies if self.objective.entropy is not None else entropies.detach(),
            }
            loss, parts = self._share(Batch(**fields), whole)
            loss.backward()
            for name, part in parts.items():
                metrics[name] = metrics.get(name, 0) + detached(part)
        return metrics


def detached(part: Any) -> Any:
    """A ``Ratio`` of torch scalars without its graph, in float64 for the sum over many parts."""
    return Ratio(*(value.detach().double() for value in part))


def mean(metric: Any) -> float:
    """The value of a ``Ratio`` of torch scalars as a Python number, once all of its parts are in."""
    total, denominator = float(metric.total), float(metric.denominator)
    return total / denominator if denominator else total
