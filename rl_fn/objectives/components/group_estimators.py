"""Advantage estimators as pieces that need one reward per answer and nothing else: rewards `*batch G` to advantages."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from rl_fn._numerics import Array, require
from rl_fn.advantages import baselines
from rl_fn.advantages import group as group_advantages
from rl_fn.advantages.passk import passk_advantages, passk_analytic_advantages


@dataclasses.dataclass(frozen=True)
class GroupNormalised:
    """(r − mean)/(std + eps) in each group, see grpo_advantages."""

    scale: str = "group"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        scales = group_advantages.SCALES
        require(self.scale in scales, f"scale must be one of {scales}, got {self.scale!r}")
        require(self.eps >= 0, f"eps must not be negative, got {self.eps}")

    def __call__(self, rewards: Array) -> jax.Array:
        """Return the advantage per answer."""
        return group_advantages.grpo_advantages(rewards, scale=self.scale, eps=self.eps)

    def explain(self) -> str:
        """Return the equation."""
        return "r − mean" if self.scale == "none" else f"(r − mean)/(std of the {self.scale} + {self.eps:g})"


@dataclasses.dataclass(frozen=True)
class LeaveOneOut:
    """The mean reward of the others is the baseline, see rloo_advantages."""

    def __call__(self, rewards: Array) -> jax.Array:
        """Return the advantage per answer."""
        return group_advantages.rloo_advantages(rewards)

    def explain(self) -> str:
        """Return the equation."""
        return "r − mean of the others"


@dataclasses.dataclass(frozen=True)
class RawReward:
    """The reward less a constant baseline, for plain REINFORCE."""

    baseline: float = 0.0

    def __call__(self, rewards: Array) -> jax.Array:
        """Return the advantage per answer."""
        return jnp.asarray(rewards) - self.baseline

    def explain(self) -> str:
        """Return the equation."""
        return f"r − {self.baseline:g}"


@dataclasses.dataclass(frozen=True)
class InformativeShare:
    """Centred rewards scaled up for the answers without a gradient, see gpg_advantages."""

    norm: float = 1.0
    alpha: str = "informative"
    kinds: ClassVar[tuple[str, ...]] = ("informative", "nonzero", "none")

    def __post_init__(self) -> None:
        require(self.norm > 0, f"norm must be positive, got {self.norm}")
        require(self.alpha in self.kinds, f"alpha must be one of {self.kinds}, got {self.alpha!r}")

    def __call__(self, rewards: Array) -> jax.Array:
        """Return the advantage per answer."""
        return baselines.gpg_advantages(rewards, norm=self.norm, alpha=self.alpha)

    def explain(self) -> str:
        """Return the equation."""
        alpha = "" if self.alpha == "none" else f"α = answers / {self.alpha} answers of the batch"
        return f"(r − mean)/{self.norm:g}" if not alpha else f"α (r − mean)/{self.norm:g}, {alpha}"


@dataclasses.dataclass(frozen=True)
class MeanNormalised:
    """(r − mean)/mean, MaxRL's, see maxrl_advantages."""

    def __call__(self, rewards: Array) -> jax.Array:
        """Return the advantage per answer."""
        return baselines.maxrl_advantages(rewards)

    def explain(self) -> str:
        """Return the equation."""
        return "(r − mean)/mean, 0 where the mean is 0"


@dataclasses.dataclass(frozen=True)
class BestOfSets:
    """The reward of the best of k answers, over all sets of k, see passk_analytic_advantages."""

    k: int = 4

    def __post_init__(self) -> None:
        require(self.k >= 1, f"k must be at least 1, got {self.k}")

    def __call__(self, rewards: Array) -> jax.Array:
        """Return the advantage per answer."""
        return passk_analytic_advantages(rewards, k=self.k)

    def explain(self) -> str:
        """Return the equation."""
        return f"(mean R of the sets of {self.k} with the answer − mean R)/(std of R), R = the set's best r"


@dataclasses.dataclass(frozen=True)
class BestOnly:
    """Only the best answer learns, by its lead over the second best, see passk_advantages."""

    scale: bool = True
    eps: float = 1e-6

    def __post_init__(self) -> None:
        require(self.eps >= 0, f"eps must not be negative, got {self.eps}")

    def __call__(self, rewards: Array) -> jax.Array:
        """Return the advantage per answer."""
        return passk_advantages(rewards, scale=self.scale, eps=self.eps)

    def explain(self) -> str:
        """Return the equation."""
        lead = f"(r₁ − r₂)/(std + {self.eps:g})" if self.scale else "r₁ − r₂"
        return f"{lead} for the group's best, else 0"
