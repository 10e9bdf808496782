"""The optimiser's options and its schedule."""

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with linear warm-up and a decay that reaches ``final`` of the learning rate after the last update."""

    learning_rate: float
    warmup: int = 10
    decay: Literal["constant", "linear", "cosine"] = "linear"
    final: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a learning rate or a gradient norm that cannot train."""
        if not (self.learning_rate > 0 and self.max_grad_norm > 0 and self.warmup >= 0 and 0 <= self.final <= 1):
            raise ValueError(f"need learning_rate > 0, max_grad_norm > 0, warmup ≥ 0 and final in [0, 1], got {self}")

    def scale(self, step: int, total: int) -> float:
        """The share of the learning rate that update ``step`` (from 0) of ``total`` is made with."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.decay == "constant":
            return 1.0
        done = min(1.0, (step - self.warmup) / max(1, total - self.warmup))
        remaining = 1 - done if self.decay == "linear" else float(0.5 * (1 + torch.cos(torch.tensor(done * torch.pi))))
        return self.final + (1 - self.final) * remaining
