"""The optimiser's options and its schedule."""

from dataclasses import dataclass
from typing import Literal

import torch

from rl_bridge.messages import given


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
    decay: Literal["constant", "linear", "cosine"] = "linear"
    final: float = 0.1
    """Share of the learning rate that the decay ends at."""
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    """A longer gradient is scaled down to this norm."""

    def __post_init__(self) -> None:
        """Refuse what cannot train."""
        if not (self.learning_rate > 0 and self.max_grad_norm > 0 and self.warmup >= 0 and 0 <= self.final <= 1):
            raise ValueError(
                "need learning_rate > 0, max_grad_norm > 0, warmup ≥ 0 and final in [0, 1], got "
                f"{given(self, 'learning_rate', 'max_grad_norm', 'warmup', 'final')}"
            )
        if self.initial is not None and not 0 <= self.initial <= 1:
            raise ValueError(f"need initial in [0, 1] or None, got {given(self, 'initial')}")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and self.weight_decay >= 0):
            raise ValueError(
                "need beta1 and beta2 in [0, 1) and weight_decay ≥ 0, got "
                f"{given(self, 'beta1', 'beta2', 'weight_decay')}"
            )

    def scale(self, step: int, total: int) -> float:
        """The share of the learning rate that update ``step`` (from 0) of ``total`` is made with."""
        if step < self.warmup:
            rest = 1.0 if self.initial is None else 1.0 - self.initial
            return (step + 1) / self.warmup if self.initial is None else self.initial + rest * step / self.warmup
        if self.decay == "constant":
            return 1.0
        done = min(1.0, (step - self.warmup) / max(1, total - self.warmup))
        remaining = 1 - done if self.decay == "linear" else float(0.5 * (1 + torch.cos(torch.tensor(done * torch.pi))))
        return self.final + (1 - self.final) * remaining
