"""The parts of a trained module beyond its scores: an optimiser, its schedule, and their state."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from rl_bridge.common.argument_kinds import check_options
from rl_bridge.common.terminal import given
from rl_bridge.data.token_batch import MicroBatch, TokenBatch
from rl_bridge.engines.dispatch import returns
from rl_bridge.engines.module import load_optimizer_state, optimizer_state, require_states
from rl_bridge.memory.token_budget import optimizer_within_memory, update_counts
from rl_bridge.models.model_source import ModelSource
from rl_bridge.modules.router_balance import Part, require_whole_rows, router_balance
from rl_bridge.modules.scoring import Scorer, ScoringConfig, TokenScorer
from rl_bridge.parallel.config import ParallelConfig
from rl_bridge.parallel.fsdp import forget_pass
from rl_bridge.parallel.mesh import clip_grad_norm
from rl_bridge.parallel.probe import any_worker

# The optimiser's options and its schedule.

Decay = Literal["constant", "linear", "cosine"]
TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with linear warm-up and a decay that reaches ``final`` of the learning rate after the last update.

    With ``initial`` the schedules are optax's: ``warmup_constant_schedule``, ``warmup_cosine_decay_schedule``, and a
    linear warm-up joined to a ``linear_schedule``.
    """

    learning_rate: float
    """The highest rate, right after the warm-up."""
    warmup: int = 10
    """Updates that the rate rises over."""
    initial: float | None = None
    """Share of the learning rate that the warm-up begins at. None: the first update has 1 / warmup of the rate."""
    decay: Decay = "linear"
    """Form of the way from the highest rate to the last."""
    final: float = 0.1
    """Share of the learning rate that the decay ends at."""
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    """A longer gradient is scaled down to this norm."""

    def __post_init__(self) -> None:
        """Refuse what cannot train."""
        check_options(self)
        if 0 < self.learning_rate < TINY:
            raise ValueError(
                f"learning_rate must be at least {TINY:.4g}, float32's smallest normal number, below which nothing "
                f"moves, got {self.learning_rate:g}"
            )
        if not (0 < self.learning_rate < math.inf and self.max_grad_norm > 0) or not (
            self.warmup >= 0 and 0 <= self.final <= 1
        ):
            raise ValueError(
                "need a finite learning_rate > 0, max_grad_norm > 0, warmup ≥ 0 and final in [0, 1], got "
                f"{given(self, 'learning_rate', 'max_grad_norm', 'warmup', 'final')}"
            )
        if self.initial is not None and not 0 <= self.initial <= 1:
            raise ValueError(f"need initial in [0, 1] or None, got {given(self, 'initial')}")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and self.weight_decay >= 0):
            raise ValueError(
                "need beta1 and beta2 in [0, 1) and weight_decay ≥ 0, got "
                f"{given(self, 'beta1', 'beta2', 'weight_decay')}"
            )

    def highest(self, updates: int) -> float:
        """The largest share of the learning rate that a run of so many updates comes to.

        >>> OptimizerConfig(learning_rate=1.0, warmup=100).highest(10)
        0.1
        """
        return self.scale(min(self.warmup, updates - 1), updates)

    def scale(self, step: int, total: int) -> float:
        """The share of the learning rate that update ``step`` (from 0) of ``total`` is made with."""
        if step < self.warmup:
            rest = 1.0 if self.initial is None else 1.0 - self.initial
            return (step + 1) / self.warmup if self.initial is None else self.initial + rest * step / self.warmup
        if self.decay == "constant":
            return 1.0
        progress = min(1.0, (step - self.warmup) / max(1, total - self.warmup))
        remaining = (
            1 - progress if self.decay == "linear" else float(0.5 * (1 + torch.cos(torch.tensor(progress * torch.pi))))
        )
        return self.final + (1 - self.final) * remaining


# The base of trained modules.


class Trainable(Scorer):
    """The optimiser's half of a trained module: a class names it before the scorer that it trains.

    ``updates`` is the number of updates that the schedule is made for.
    """

    trainable: ClassVar[bool] = True

    def __init__(
        self,
        source: ModelSource,
        optimizer: OptimizerConfig,
        *,
        updates: int,
        scoring: ScoringConfig | None = None,
        parallel: ParallelConfig | None = None,
    ) -> None:
        super().__init__(source, scoring, parallel=parallel)
        self.optimizer_config, self._updates = optimizer, updates
        self._losses_are_finite: bool | torch.Tensor = True
        self._gradient_is_whole = True
        self.balance = router_balance(self.model)

    def parallelize(self, mesh: DeviceMesh) -> None:
        """Cut the model over the mesh, if its loss is right there."""
        self._mesh = mesh
        if self.balance is not None:
            require_whole_rows(self)
        super().parallelize(mesh)

    def on_weights_materialized(self) -> None:
        """Make optimiser and schedule: they hold on to the parameters, which must be the last ones."""
        config = self.optimizer_config
        self.optimizer = torch.optim.AdamW(
            self.trained_parameters(),
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: config.scale(step, self._updates)
        )

    def trained_parameters(self) -> list[torch.nn.Parameter]:
        """All of them, or those that the source did not freeze."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def balanced(
        self, parts: Sequence[Part], forward: Callable[[Part], Any], batch_of: Callable[[Part], TokenBatch]
    ) -> Iterator[Part]:
        """The micro-batches of a step, one after another, each until ``backward`` of it is through.

        ``backward`` adds the load-balancing loss of a mixture whose configuration asks for it.
        """
        yield from parts if self.balance is None else self.balance.parts(self, parts, forward, batch_of)

    def balance_metrics(self) -> dict[str, Any]:
        """Metrics of the step of ``balanced``: "router_balance", without its coefficient, where there is the loss."""
        return {} if self.balance is None else self.balance.metrics()

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a scalar loss, and remember whether the loss is finite for ``optimizer_step``."""
        term = None if self.balance is None else self.balance.term()
        loss = loss if term is None else loss + term
        loss.backward()
        self._losses_are_finite = self._losses_are_finite & torch.isfinite(loss.detach())

    def backward_through_values(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Carry gradients on from values that the model computed, (value, gradient), as ``backward`` does of a loss."""
        term = None if self.balance is None else self.balance.term()
        pairs = [*pairs, *([] if term is None else [(term, torch.ones_like(term))])]
        torch.autograd.backward([value for value, _ in pairs], [gradient for _, gradient in pairs])

    def _has_gradient(self) -> bool:
        """Whether a call has added to the gradient since the last ``optimizer_step`` or ``zero_grad``."""
        return any(parameter.grad is not None for parameter in self.trained_parameters())

    def _whole(self, add: Callable[[], Any]) -> Any:
        """``add()``, which adds to the gradient: where it ends early, by an error or Ctrl-C, its part is dropped.

        The part cannot be told from a gradient that was there before: then ``optimizer_step`` refuses both.
        """
        self._require_whole_gradient()
        had_gradient, finite = self._has_gradient(), self._losses_are_finite
        self._gradient_is_whole = False
        try:
            result = add()
        except BaseException:
            with suppress(Exception):  # of a collective that failed: the first error is the cause
                forget_pass(self.model)
                if self.balance is not None:
                    self.balance.forget()
                if not had_gradient:
                    self._drop_gradient()
                    self._losses_are_finite, self._gradient_is_whole = finite, True
            raise
        self._gradient_is_whole = True
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradient of all calls since the last ``optimizer_step``, whole or not."""
        super().zero_grad(set_to_none)
        self._losses_are_finite, self._gradient_is_whole = True, True

    def _drop_gradient(self) -> None:
        for parameter in self.trained_parameters():
            parameter.grad = None

    def _require_whole_gradient(self) -> None:
        if not self._gradient_is_whole:
            raise RuntimeError(
                "an earlier call ended in the middle, and its part of the gradient cannot be told from that of the "
                "batches before it: call zero_grad(), then train_step of each of these batches again"
            )

    @returns("same")
    def optimizer_step(self) -> dict[str, float]:
        """Clip, update, advance the schedule.

        Where a loss since the last call or the gradient is not finite, on any worker, nothing is updated: the gradient
        is dropped, schedule and version stay, and the result has ``skipped`` 1.

        Raises:
            RuntimeError: a ``train_step`` that added to the gradient of an earlier one, or this method, ended early.
        """
        self._require_whole_gradient()
        self._gradient_is_whole = False
        norm = clip_grad_norm(self.trained_parameters(), self.optimizer_config.max_grad_norm, self._mesh)
        version = self.weights_version()
        require_states([self.optimizer])
        rate = self.optimizer.param_groups[0]["lr"]
        # A fault of one worker alone would let the copies drift apart.
        skipped = any_worker(not (self._losses_are_finite and bool(torch.isfinite(norm))), self._mesh)
        if not skipped:
            self._update(version)
        self.optimizer.zero_grad(set_to_none=True)
        self._gradient_is_whole = True
        self._losses_are_finite = True
        metrics = {"grad_norm": float(norm), "learning_rate": rate} | ({"skipped": 1.0} if skipped else {})
        if self.budget is not None:
            metrics |= {"micro_batch_tokens": float(self.micro_batch_tokens())}
            metrics |= {"out_of_memory": float(self.budget.failures)} if self._mesh is None else {}
        return metrics

    def _update(self, version: int) -> None:
        """Make the weights' next version. Where that ends half-way they are of none, and nobody may use them."""
        before = update_counts(self.optimizer)
        self.weight_receiver().version = None
        try:
            optimizer_within_memory(self.optimizer, self.compute_device())
            self.scheduler.step()
        except BaseException:
            if update_counts(self.optimizer) == before:
                self.weight_receiver().version = version
            raise
        self.weight_receiver().version = version + 1

    def optimizer_states(self) -> dict[str, Any]:
        """States of optimiser and schedule, by the names of the model's parameters."""
        return {
            "optimizer": optimizer_state(self.model, self.optimizer),
            "scheduler": self.scheduler.state_dict(),
        }

    def load_optimizer_states(self, state: Mapping[str, Any]) -> None:
        """Take back the moments and the number of updates that ``optimizer_states`` gave.

        Rate, betas, weight decay and schedule are those of this module's own options, also for the next update.
        """
        options = [{key: value for key, value in group.items() if key != "params"} for group in self._groups()]
        load_optimizer_state(self.model, self.optimizer, state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.scheduler.base_lrs = [group["initial_lr"] for group in options]
        share = self.optimizer_config.scale(self.scheduler.last_epoch, self._updates)
        for group, own in zip(self._groups(), options, strict=True):
            group.update(own, lr=own["initial_lr"] * share)
        self.scheduler._last_lr = [group["lr"] for group in self._groups()]
        self.zero_grad()

    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups


class CausalLMModule(Trainable, TokenScorer):
    """A causal LM with its optimiser and schedule."""

    def balanced_parts(self, parts: Sequence[MicroBatch]) -> Iterator[MicroBatch]:
        """``balanced`` for micro-batches of tokens."""
        return self.balanced(parts, lambda part: self(part.batch), lambda part: part.batch)
