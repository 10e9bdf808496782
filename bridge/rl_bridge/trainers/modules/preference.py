"""The modules that learn from comparisons by a loss of ``rl_fn``, and the one over log-probabilities of completions."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rl_bridge.data.pair_batch import PairBatch, PairPart, pair_parts, restore_rows, stand_in_pair
from rl_bridge.engines.results import returns
from rl_bridge.memory.within import scores_within_memory, within_memory
from rl_bridge.models.source import ModelSource
from rl_bridge.parallel.config import ParallelConfig
from rl_bridge.trainers.modules.comparison_loss import ComparisonLoss
from rl_bridge.trainers.modules.optimizer import OptimizerConfig
from rl_bridge.trainers.modules.scoring import Scorer, ScoringConfig, TokenScorer
from rl_bridge.trainers.modules.trainable import Trainable
from rl_fn import Ratio


class ComparisonScorer(Scorer):
    """A scorer that takes comparisons: what it makes of a completion a subclass says."""

    def outputs(self, batch: PairBatch) -> torch.Tensor:
        """One number for each completion, [N, K], with its graph."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it makes of a completion")

    def comparison_parts(self, batch: PairBatch) -> list[PairPart]:
        """The batch in parts that one forward pass takes, where the model computes; as many on all workers."""
        parts = pair_parts(batch, self.micro_batch_tokens(), **self.arranged())
        self.largest_micro_batch = max((part.batch.completions.tokens.numel() for part in parts), default=0)
        parts += [stand_in_pair(batch)] * (self.agreed_count(len(parts)) - len(parts))
        return [part._replace(batch=part.batch.to(self.compute_device())) for part in parts]

    @scores_within_memory
    @torch.no_grad()
    def all_outputs(self, batch: PairBatch) -> torch.Tensor:
        """``outputs`` of the whole batch, [N, K], without a graph."""
        parts = self.comparison_parts(batch)
        return restore_rows([(part.places, self.outputs(part.batch)) for part in parts], batch.present)


class ComparisonModule(Trainable, ComparisonScorer):
    """``train_step`` adds the gradient of a loss of comparisons, micro-batch by micro-batch."""

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
        super().__init__(source, optimizer, updates=updates, scoring=scoring, parallel=parallel)
        self.loss = loss

    @returns("sum")
    @within_memory
    def train_step(
        self, batch: PairBatch, denominator: float, statistics: Mapping[str, float] | None = None
    ) -> dict[str, Ratio]:
        """Add the gradient of Σ losses / ``denominator`` (the whole batch's comparisons); returns undivided metrics.

        A loss that sorts the batch sees only the comparisons of this call: it takes ``backward_through``.
        """
        if self.loss.over_batch:
            raise ValueError(f"{self.loss.name} needs all comparisons at once: use backward_through")
        metrics: dict[str, Any] = {}
        for _, part in self.balanced_pairs(batch):
            outputs = self.outputs(part)
            losses = self.loss(part, outputs, statistics)
            self.backward(losses.sum() / denominator)
            for name, value in self.loss.metrics(part, outputs, losses).items():
                metrics[name] = metrics.get(name, 0) + value
        return metrics | self.balance_metrics()

    @returns("same")
    @within_memory
    def backward_through(self, batch: PairBatch, gradient: torch.Tensor, finite: bool) -> None:
        """Carry ``gradient`` [N, K], with respect to ``outputs`` of the batch, on to the parameters.

        ``finite``: whether the loss is, for ``optimizer_step``; an infinite one may have a finite gradient.
        """
        self._losses_are_finite = self._losses_are_finite & finite
        for places, part in self.balanced_pairs(batch):
            outputs = self.outputs(part)
            weights = gradient[places].to(outputs) if len(places) else torch.zeros_like(outputs)
            term = None if self.balance is None else self.balance.term()
            pairs = [(outputs, weights)] + ([] if term is None else [(term, torch.ones_like(term))])
            torch.autograd.backward([x for x, _ in pairs], [x for _, x in pairs])

    def balanced_pairs(self, batch: PairBatch) -> Iterator[PairPart]:
        """``balanced`` for micro-batches of comparisons."""
        parts = self.comparison_parts(batch)
        return self.balanced(parts, lambda part: self.outputs(part.batch), lambda part: part.batch.completions)


class CompletionScorer(ComparisonScorer, TokenScorer):
    """Log-probabilities of whole completions. A frozen reference is one."""

    def outputs(self, batch: PairBatch) -> torch.Tensor:
        """Σ log π over the tokens of each completion that count, [N, K]."""
        return self(batch.completions)[0].sum(1).view(batch.present.shape)

    @returns("rows")
    def completion_logprobs(self, batch: PairBatch) -> torch.Tensor:
        """Σ log π of each completion under the present weights, [N, K]."""
        return self.all_outputs(batch)


class PreferenceModule(ComparisonModule, CompletionScorer):
    """A policy that learns from preferences by a loss of log-probabilities."""
