"""The module that policy-gradient algorithms train: an ``rl_fn`` objective over a causal LM."""

from collections.abc import Mapping
from typing import Any

import torch

from rl_bridge.data.micro_batches import MicroBatch, restore
from rl_bridge.data.token_batch import TokenBatch
from rl_bridge.engines.results import returns
from rl_bridge.functional import from_jax
from rl_bridge.memory.within import within_memory
from rl_bridge.models.source import ModelSource
from rl_bridge.parallel.config import ParallelConfig
from rl_bridge.trainers.modules.coefficients import share_of
from rl_bridge.trainers.modules.fused import fused_share, require_token_local
from rl_bridge.trainers.modules.optimizer import OptimizerConfig
from rl_bridge.trainers.modules.scoring import ScoringConfig
from rl_bridge.trainers.modules.trainable import CausalLMModule
from rl_bridge.trainers.modules.watching import Seen, Watch
from rl_fn import Batch, Objective, Ratio

SHARED = tuple(name for name in Batch._fields if name in TokenBatch._fields)
"""Fields that an objective reads and a batch brings along."""


class PolicyModule(CausalLMModule):
    """``train_step`` accumulates the gradient of the objective over micro-batches; ``optimizer_step`` applies it."""

    def __init__(
        self,
        source: ModelSource,
        optimizer: OptimizerConfig,
        objective: Objective,
        *,
        updates: int,
        scoring: ScoringConfig | None = None,
        parallel: ParallelConfig | None = None,
        fused_loss: bool = False,
    ) -> None:
        """With ``fused_loss`` the head computes each logit once, not twice: for losses that are a sum over tokens.

        Raises:
            ValueError: ``fused_loss`` with a loss in which the term of a token depends on another token.
        """
        super().__init__(source, optimizer, updates=updates, scoring=scoring, parallel=parallel)
        self.objective, self.fused_loss = objective, fused_loss
        if fused_loss:
            require_token_local(objective)
        self._share = from_jax(share_of(objective))
        self._watch = Watch()

    @returns("sum")
    @within_memory
    def train_step(
        self,
        batch: TokenBatch,
        denominator: float,
        coefficients: Mapping[str, float] | None = None,
        watched: torch.Tensor | None = None,
    ) -> dict[str, Ratio]:
        """Add the gradient of Σ per-token losses / ``denominator`` to the parameters' gradients.

        ``denominator`` is ``objective.denominator`` of the whole batch, over all micro-batches and workers: the
        gradient then does not depend on how the batch was cut. A denominator of 0 (a sum) means 1. Returns undivided
        metrics, which add up likewise. ``coefficients`` are of terms in place of the objective's own: they may change
        from step to step without a new trace. ``watched`` [N] int64: a number for each row that ``take_watched`` is to
        tell of, −1 for others.
        """
        if batch.old_logprobs is None or batch.advantages is None:
            raise ValueError("train_step needs batch.old_logprobs and batch.advantages")
        parts, numbers = self.micro_batches(batch), {"denominator": denominator, **(coefficients or {})}
        if self.objective.over_batch and len(parts) > 1:
            return self._step_over_batch(batch.to(self.compute_device()), parts, numbers, watched)
        metrics: dict[str, Any] = {}
        for part in self.balanced_parts(parts):
            marks = None if watched is None else watched[part.places.cpu()]
            step = self._fused if self.fused_loss else self._apart
            found = step(part.batch, numbers, marks)
            for name, value in found.items():
                metrics[name] = metrics.get(name, 0) + value
        return metrics | self.balance_metrics()

    @returns("local")
    def take_watched(self) -> dict[int, dict[str, list[float]]]:
        """What the loss had of each watched row since the last call, by the row's number; see ``Watch``."""
        return self._watch.take()

    def _apart(
        self, batch: TokenBatch, numbers: Mapping[str, float], marks: torch.Tensor | None = None
    ) -> dict[str, Any]:
        logprobs, entropies = self(batch)
        return self._backward(batch, logprobs, entropies, numbers, marks)

    def _fused(
        self, batch: TokenBatch, numbers: Mapping[str, float], marks: torch.Tensor | None = None
    ) -> dict[str, Any]:
        if self._ranks("tensor") > 1 or self._ranks("sequence") > 1:
            raise ValueError(f"fused_loss needs the whole vocabulary and whole rows on each worker, got {self._mesh}")
        seen = None if marks is None else Seen(batch)
        loss, metrics = fused_share(
            self, self._share, batch, numbers, SHARED, self.objective.entropy is not None, seen=seen
        )
        if seen is not None and marks is not None:
            self._watch.see(batch, *seen.columns(), marks)
        self.backward(loss)
        return {name: detached(part) for name, part in metrics.items()}

    def _backward(
        self,
        batch: TokenBatch,
        logprobs: torch.Tensor,
        entropies: torch.Tensor,
        numbers: Mapping[str, float],
        marks: torch.Tensor | None = None,
    ) -> dict[str, Any]:
        """Send the loss of these log-probabilities back through them; returns the metrics."""
        if marks is not None:
            self._watch.see(batch, logprobs, entropies, marks)
        fields: dict[str, Any] = {name: getattr(batch, name) for name in SHARED}
        fields["logprobs"] = logprobs
        # Shown as a metric always; differentiated only where the objective has an entropy bonus.
        fields["entropies"] = entropies if self.objective.entropy is not None else entropies.detach()
        scalars = {name: torch.tensor(float(value), device=logprobs.device) for name, value in numbers.items()}
        loss, metrics = self._share(Batch(**fields), scalars.pop("denominator"), scalars)
        self.backward(loss)
        return {name: detached(part) for name, part in metrics.items()}

    def _step_over_batch(
        self, batch: TokenBatch, parts: list[MicroBatch], numbers: Mapping[str, float], marks: torch.Tensor | None
    ) -> dict:
        """``train_step`` of a loss that reads statistics of the whole batch: two forward passes, the same memory.

        The first pass, without a graph, gives the loss every log-probability at once, and the loss gives each of them
        its gradient. The second pass carries these gradients to the parameters, one micro-batch at a time.
        """
        with torch.no_grad():
            outputs = [self(part.batch) for part in parts]
        logprobs, entropies = (
            restore([(part.places, x) for part, x in zip(parts, column, strict=True)], batch.tokens).requires_grad_()
            for column in zip(*outputs, strict=True)
        )
        metrics = self._backward(batch, logprobs, entropies, numbers, marks)
        for part in self.balanced_parts(parts):
            pairs = [
                (x, part.of(w.grad))
                for x, w in zip(self(part.batch), (logprobs, entropies), strict=True)
                if w.grad is not None
            ]
            term = None if self.balance is None else self.balance.term()
            pairs += [] if term is None else [(term, torch.ones_like(term))]
            torch.autograd.backward([x for x, _ in pairs], [gradient for _, gradient in pairs])
        return metrics | self.balance_metrics()


def detached(part: Any) -> Any:
    """A ``Ratio`` of torch scalars without its graph, in float64 for the sum over many parts."""
    return Ratio(*(value.detach().double() for value in part))


def mean(metric: Any) -> float:
    """The value of a ``Ratio`` of torch scalars as a Python number, once all of its parts are in."""
    total, denominator = float(metric.total), float(metric.denominator)
    return total / denominator if denominator else total
