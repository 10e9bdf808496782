"""The critic: values of the states between tokens, frozen or trained by an objective's value loss."""

from typing import Any

import torch

from rl_bridge.data.token_batch import TokenBatch, restore
from rl_bridge.engines.dispatch import returns
from rl_bridge.functional import from_jax
from rl_bridge.memory.token_budget import scores_within_memory, within_memory
from rl_bridge.models.model_source import ModelSource
from rl_bridge.modules.policy import detached
from rl_bridge.modules.scoring import Scorer, ScoringConfig
from rl_bridge.modules.trainable import OptimizerConfig, Trainable
from rl_bridge.parallel.config import ParallelConfig
from rl_bridge.parallel.heads import scored_places, token_values
from rl_fn import Batch, Objective, Ratio

READ = ("mask", "old_values", "returns")
"""Fields of a batch that a value loss reads beside the values."""


class ValueScorer(Scorer):
    """A model with a head of one number (``ValueSource``). Frozen, it is a critic to start from or a reward model."""

    def forward(self, batch: TokenBatch) -> torch.Tensor:
        """Values [N, L] with the place of log-probabilities: ``values[n, t]`` is of the state before token t is drawn.

        Zero where the mask is False.
        """
        return torch.nn.functional.pad(self.after(batch)[:, :-1], (1, 0)).masked_fill(~batch.mask, 0.0)

    def after(self, batch: TokenBatch) -> torch.Tensor:
        """The head's number after reading token t, [N, L]; zero or any number behind the last token of a row."""
        self.require_weights()
        documents = self.documents(batch, batch.lengths)
        if documents is None:
            # Padding is on the right, where attention is causal and needs no mask.
            return self._after(batch.tokens, use_cache=False)
        packed = self._after(documents.take(batch.tokens), **self.packed_kwargs(documents))
        return documents.put(packed, batch.tokens.shape)

    def at_end(self, batch: TokenBatch) -> torch.Tensor:
        """The head's number after the last token of each row, [N]: a reward model's score, with its graph.

        The last token is that of transformers' classifiers: the last one that is not the model's own padding.
        """
        return self.after(batch).gather(1, scored_places(self.model, batch.tokens, batch.lengths)[:, None])[:, 0]

    def _after(self, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
        with self.autocast(tokens.device):
            return token_values(self.model, tokens, **options)

    @returns("rows")
    @scores_within_memory
    @torch.no_grad()
    def values(self, batch: TokenBatch) -> torch.Tensor:
        """Values under the present weights, [N, L]: of the state before each token that counts, else zero."""
        parts = self.micro_batches(batch)
        return restore([(part.places, self(part.batch)) for part in parts], batch.tokens)

    @returns("rows")
    @scores_within_memory
    @torch.no_grad()
    def scores(self, batch: TokenBatch) -> torch.Tensor:
        """The head's number after the last token of each row, [N], as ``at_end`` reads it."""
        row_scores = torch.zeros(len(batch.lengths), device=batch.tokens.device)
        for part in self.micro_batches(batch):
            numbers = self.at_end(part.batch)
            if len(part.places):
                row_scores[part.places] = numbers.to(row_scores)
        return row_scores


class ValueModule(Trainable, ValueScorer):
    """A critic with its optimiser. ``train_step`` accumulates the gradient of the objective's value loss."""

    def __init__(
        self,
        source: ModelSource,
        optimizer: OptimizerConfig,
        objective: Objective,
        *,
        updates: int,
        scoring: ScoringConfig | None = None,
        parallel: ParallelConfig | None = None,
    ) -> None:
        super().__init__(source, optimizer, updates=updates, scoring=scoring, parallel=parallel)
        if objective.value is None:
            raise ValueError(f"{objective.name} has no critic's loss: give value=ValueLoss()")
        self.objective = objective
        self._value_parts = from_jax(objective.value_parts)

    @returns("sum")
    @within_memory
    def train_step(self, batch: TokenBatch, denominator: float) -> dict[str, Ratio]:
        """Add the gradient of Σ value losses / ``denominator`` to the parameters' gradients.

        ``denominator`` is ``objective.denominator`` of the whole batch, over all micro-batches and workers: the
        gradient then does not depend on how the batch was cut. A denominator of 0 (a sum) means 1. Returns undivided
        metrics, which add up likewise: ``value_loss``, ``values``, ``returns``.
        """
        if batch.returns is None:
            raise ValueError("a critic's train_step needs batch.returns")
        metrics: dict[str, Any] = {}
        for part in self.micro_batches(batch):
            fields: dict[str, Any] = {name: getattr(part.batch, name) for name in READ}
            nothing = torch.zeros_like(part.batch.mask, dtype=torch.float32)
            policy = {"logprobs": nothing, "old_logprobs": nothing, "advantages": nothing}
            loss, shares = self._value_parts(Batch(**policy, **fields, values=self(part.batch)))
            self.backward(loss.total / (denominator or 1.0))
            for name, value in shares.items():
                metrics[name] = metrics.get(name, 0) + detached(value)
        return metrics
