"""What every trained module needs beyond its scores: an optimiser, its schedule, and their state."""

from typing import Any, ClassVar

import torch

from rl_bridge.checkpoints.optimizers import load_optimizer_state, optimizer_state
from rl_bridge.engines.results import returns
from rl_bridge.memory.within import optimizer_within_memory
from rl_bridge.models.source import ModelSource
from rl_bridge.parallel.config import ParallelConfig
from rl_bridge.parallel.gradients import agree_max, clip_grad_norm
from rl_bridge.parallel.mesh import DIMS
from rl_bridge.trainers.modules.optimizer import OptimizerConfig
from rl_bridge.trainers.modules.scoring import Scorer, ScoringConfig, TokenScorer


class Trainable(Scorer):
    """The optimiser's half of a trained module: a class names it before the scorer that it trains.

    ``updates`` is the number of updates that the schedule is made for.
    """

    trainable: ClassVar[bool] = True
    movable: ClassVar[tuple[str, ...]] = ("weights", "optimizer")

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

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a scalar loss, and remember whether the loss is finite for ``optimizer_step``."""
        loss.backward()
        self._losses_are_finite = self._losses_are_finite & torch.isfinite(loss.detach())

    @returns("same")
    def optimizer_step(self) -> dict[str, float]:
        """Clip, update, advance the schedule.

        Where a loss since the last call or the gradient is not finite, on any worker, nothing is updated: the gradient
        is dropped, schedule and version stay, and the result has ``skipped`` 1.
        """
        norm = clip_grad_norm(self.trained_parameters(), self.optimizer_config.max_grad_norm, self._mesh)
        version = self.weights_version()
        self._require_optimizer()
        rate = self.optimizer.param_groups[0]["lr"]
        skipped = self._any_worker(not (self._losses_are_finite and bool(torch.isfinite(norm))))
        if not skipped:
            optimizer_within_memory(self.optimizer, self.compute_device())
            self.scheduler.step()
            self.weight_receiver().version = version + 1
        self.optimizer.zero_grad(set_to_none=True)
        self._losses_are_finite = True
        found = {"grad_norm": float(norm), "learning_rate": rate} | ({"skipped": 1.0} if skipped else {})
        if self.budget is not None:
            found |= {"micro_batch_tokens": float(self.micro_batch_tokens())}
            found |= {"out_of_memory": float(self.budget.failures)} if self._mesh is None else {}
        return found

    def _any_worker(self, here: bool) -> bool:
        """Whether it is so on any of the workers: else a fault of one of them would let the copies drift apart."""
        there = int(here)
        for axis in DIMS:
            if self._mesh is not None and self._ranks(axis) > 1:
                there = agree_max(there, self._mesh.get_group(axis))
        return bool(there)

    def checkpoint_state(self) -> dict[str, Any]:
        """Everything that the next update depends on; with LoRA the frozen base too."""
        self._require_optimizer()
        return {
            **super().checkpoint_state(),
            "optimizer": optimizer_state(self.model, self.optimizer),
            "scheduler": self.scheduler.state_dict(),
        }

    def load_checkpoint_state(self, state: dict[str, Any]) -> None:
        """Take back what ``checkpoint_state`` gave."""
        super().load_checkpoint_state(state)
        load_optimizer_state(self.model, self.optimizer, state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])

    def move(self, what: str, device: torch.device) -> None:
        """Move the weights or the optimiser's state. What was freed (``meta``) comes back by a checkpoint."""
        super().move(what, device)
        if what == "optimizer":
            if device.type != "meta":
                self._require_optimizer()
            self._move_optimizer(device)

    def make_room(self) -> None:
        """Bring freed weights and a freed optimiser's state back, without values, for a checkpoint to fill."""
        super().make_room()
        if self._optimizer_is_freed():
            self._move_optimizer(self.weights_device())

    def _move_optimizer(self, device: torch.device) -> None:
        for state in self.optimizer.state.values():
            for key, value in state.items():
                # AdamW keeps its step counts on the host.
                if isinstance(value, torch.Tensor) and value.dim():
                    state[key] = torch.empty_like(value, device=device) if value.is_meta else value.to(device)

    def _optimizer_is_freed(self) -> bool:
        states = (value for state in self.optimizer.state.values() for value in state.values())
        return any(isinstance(value, torch.Tensor) and value.is_meta for value in states)

    def _require_optimizer(self) -> None:
        if self._optimizer_is_freed():
            raise ValueError("the optimiser's state was freed: load a checkpoint first")

    def on_parameters_replaced(self, replaced: dict[torch.nn.Parameter, torch.nn.Parameter]) -> None:
        """Point the optimiser at the parameters that took the place of others: old → new."""
        for group in self.optimizer.param_groups:
            group["params"] = [replaced.get(parameter, parameter) for parameter in group["params"]]
        for old, new in replaced.items():
            if old in self.optimizer.state:
                self.optimizer.state[new] = self.optimizer.state.pop(old)


class CausalLMModule(Trainable, TokenScorer):
    """A causal LM with its optimiser and schedule."""
