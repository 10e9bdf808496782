"""One number of several rewards: what a policy is trained on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

import rl_fn
from rl_bridge.functional import from_jax
from rl_bridge.messages import given

_weighted_sum, _tchebycheff = from_jax(rl_fn.weighted_sum), from_jax(rl_fn.tchebycheff)


@dataclass(frozen=True, kw_only=True)
class ScalarOptions:
    """How several rewards become one."""

    method: Literal["weighted_sum", "tchebycheff"] = "weighted_sum"
    """weighted_sum: Σ w r. tchebycheff: −(max w (z − r) + ρ Σ (z − r)), which reaches the concave parts of a front."""
    weights: tuple[float, ...] | None = None
    """w, one a reward in their order. None: those that the rewards come with."""
    ideal: tuple[float, ...] | None = None
    """z of tchebycheff: at least as good as each reward can be."""
    rho: float = 0.01
    """ρ of tchebycheff."""

    def __post_init__(self) -> None:
        """Refuse an ideal point without its method, the method without its point, and a negative ρ."""
        if not 0 <= self.rho < float("inf"):
            raise ValueError(f"rho must be finite and not negative, got {self.rho}")
        if (self.ideal is not None) != (self.method == "tchebycheff"):
            raise ValueError(
                f"ideal goes with method tchebycheff, and tchebycheff with ideal; got {given(self, 'method', 'ideal')}"
            )

    def combine(self, rewards: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
        """[P, R, n] → [P, n], larger is better. ``weights`` are those that the rewards come with.

        Raises:
            ValueError: not a weight (a number of the ideal point) for each reward.
        """
        chosen, count = self.weights or tuple(weights), rewards.shape[1]
        for name, values in (("weights", chosen), ("ideal", self.ideal)):
            if values is not None and len(values) != count:
                raise ValueError(f"{name} has {len(values)} numbers for {count} rewards: {values}")
        objectives, w = rewards.movedim(1, -1), torch.tensor(chosen)
        if self.ideal is None:
            return -_weighted_sum(objectives, w, maximize=True)
        return -_tchebycheff(objectives, w, torch.tensor(self.ideal), maximize=True, rho=self.rho)
