"""The pieces of an Objective: small frozen dataclasses around the functions of the library.

Dataclasses and not tuples, because tuples of different classes compare equal when their fields do, and jit would then
mistake one objective for another.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from rl_fn import advantages, aggregation, divergences, group_advantages, importance, policy_losses
from rl_fn._numerics import Array, require
from rl_fn.batch import Batch

KL_ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k3+")


def describe(piece: Any) -> str:
    """Return a piece's equation if it has one, else its name."""
    explain = getattr(piece, "explain", None)
    return explain() if explain is not None else getattr(piece, "__name__", repr(piece))


@dataclasses.dataclass(frozen=True)
class Aggregation:
    """How per-token values become one number: a mode of aggregate_parts, and Dr. GRPO's horizon in tokens."""

    mode: str
    horizon: float | None = None

    def __post_init__(self) -> None:
        require(self.mode in aggregation.MODES, f"mode must be one of {aggregation.MODES}, got {self.mode!r}")
        norm = self.mode == "seq-mean-token-sum-norm"
        require(norm == (self.horizon is not None), f"horizon goes with seq-mean-token-sum-norm only: {self}")
        require(self.horizon is None or self.horizon > 0, f"the horizon must be positive, got {self.horizon}")

    def __call__(self, x: Array, mask: Array, segment_ids: Array | None) -> aggregation.Ratio:
        """Return the undivided aggregate."""
        return aggregation.aggregate_parts(x, mask, self.mode, horizon=self.horizon, segment_ids=segment_ids)

    def explain(self) -> str:
        """Return the mode and its horizon."""
        return self.mode if self.horizon is None else f"{self.mode} / {self.horizon:g}"


@dataclasses.dataclass(frozen=True)
class Clip:
    """PPO's clipped loss, see ppo_clip."""

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None

    def __post_init__(self) -> None:
        require(self.low >= 0 and self.high >= 0, f"clips must not be negative, got {self}")
        require(self.dual is None or self.dual > 1, f"the dual clip must exceed 1, got {self}")

    def __call__(self, batch: Batch) -> jax.Array:
        """Return the loss per token."""
        b = batch
        return policy_losses.ppo_clip(
            b.logprobs,
            b.old_logprobs,
            b.advantages,
            b.mask,
            clip_low=self.low,
            clip_high=self.high,
            dual_clip=self.dual,
        )

    def clipped(self, batch: Batch) -> jax.Array:
        """Return the tokens whose gradient is cut."""
        b = batch
        return policy_losses.clipped_tokens(
            b.logprobs,
            b.old_logprobs,
            b.advantages,
            b.mask,
            clip_low=self.low,
            clip_high=self.high,
            dual_clip=self.dual,
        )

    def explain(self) -> str:
        """Return the equation."""
        loss = f"−min(ρA, clip(ρ, 1 − {self.low:g}, 1 + {self.high:g})A)"
        return loss if self.dual is None else f"{loss}, at most −{self.dual:g}A where A < 0"


@dataclasses.dataclass(frozen=True)
class Reinforce:
    """−A log π, see reinforce."""

    def __call__(self, batch: Batch) -> jax.Array:
        """Return the loss per token."""
        return policy_losses.reinforce(batch.logprobs, batch.advantages, batch.mask)

    def explain(self) -> str:
        """Return the equation."""
        return "−A log π"


@dataclasses.dataclass(frozen=True)
class KL:
    """coef · KL(π‖π_ref) in the loss; "k1+" and "k3+" have the value of k1 and k3 with the gradient of k2."""

    estimator: str = "k3"
    coef: float = 0.0

    def __post_init__(self) -> None:
        require(self.estimator in KL_ESTIMATORS, f"estimator must be one of {KL_ESTIMATORS}, got {self.estimator!r}")
        require(self.coef >= 0, f"the KL coefficient must not be negative, got {self.coef}")

    def estimate(self, batch: Batch) -> jax.Array:
        """Return the estimate per token, without the coefficient."""
        assert batch.ref_logprobs is not None
        name = self.estimator.removesuffix("+")
        value = getattr(divergences, f"kl_{name}")(batch.logprobs, batch.ref_logprobs, batch.mask)
        if name == self.estimator:
            return value
        k2 = divergences.kl_k2(batch.logprobs, batch.ref_logprobs, batch.mask)
        return divergences.kl_straight_through(value, k2)

    def explain(self) -> str:
        """Return the equation."""
        value = {"k1": "d", "k2": "d²/2", "k3": "e^(−d) + d − 1", "abs": "|d|"}[self.estimator.removesuffix("+")]
        gradient = " (gradient of d²/2)" if self.estimator.endswith("+") else ""
        return f"{value}{gradient}, d = logprobs − ref_logprobs"


@dataclasses.dataclass(frozen=True)
class TruncatedImportance:
    """TIS: weights min(π_old/μ, cap), see truncated_importance_weights."""

    cap: float = 2.0
    level: str = "token"

    def __post_init__(self) -> None:
        require(self.cap > 0, f"the cap must be positive, got {self.cap}")
        require(self.level in importance.LEVELS, f"level must be one of {importance.LEVELS}, got {self.level!r}")

    def __call__(self, batch: Batch) -> jax.Array:
        """Return the weight per token."""
        return importance.truncated_importance_weights(
            _log_old_over_rollout(batch), batch.mask, cap=self.cap, level=self.level, segment_ids=batch.segment_ids
        )

    def explain(self) -> str:
        """Return the equation."""
        return f"min(exp(old_logprobs − rollout_logprobs), {self.cap:g}) per {self.level}"


@dataclasses.dataclass(frozen=True)
class MaskedImportance:
    """IcePop / MIS: weights π_old/μ inside [low, high], else 0, see masked_importance_weights."""

    low: float = 0.5
    high: float = 5.0
    level: str = "token"

    def __post_init__(self) -> None:
        require(0 <= self.low < self.high, f"need 0 ≤ low < high, got {self}")
        require(self.level in importance.LEVELS, f"level must be one of {importance.LEVELS}, got {self.level!r}")

    def __call__(self, batch: Batch) -> jax.Array:
        """Return the weight per token."""
        return importance.masked_importance_weights(
            _log_old_over_rollout(batch),
            batch.mask,
            low=self.low,
            high=self.high,
            level=self.level,
            segment_ids=batch.segment_ids,
        )

    def explain(self) -> str:
        """Return the equation."""
        return f"exp(old_logprobs − rollout_logprobs) inside [{self.low:g}, {self.high:g}], else 0, per {self.level}"


def _log_old_over_rollout(batch: Batch) -> jax.Array:
    assert batch.rollout_logprobs is not None
    return importance.log_ratio(batch.old_logprobs, batch.rollout_logprobs, batch.mask)


@dataclasses.dataclass(frozen=True)
class Entropy:
    """coef · H is subtracted from the loss, see entropy_bonus."""

    coef: float

    def __post_init__(self) -> None:
        require(self.coef >= 0, f"the entropy coefficient must not be negative, got {self.coef}")


@dataclasses.dataclass(frozen=True)
class GroupNormalised:
    """(r − mean)/(std + eps) in each group, see grpo_advantages."""

    scale: str = "group"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        scales = group_advantages.SCALES
        require(self.scale in scales, f"scale must be one of {scales}, got {self.scale!r}")

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
class GAE:
    """Generalised advantage estimation from a critic, see gae; whitened over the batch if `whiten`."""

    gamma: float = 1.0
    lam: float = 0.95
    whiten: bool = True

    def __post_init__(self) -> None:
        require(0 <= self.gamma <= 1 and 0 <= self.lam <= 1, f"gamma and lam must be in [0, 1], got {self}")

    def __call__(
        self, token_rewards: Array, values: Array, mask: Array, segment_ids: Array | None = None
    ) -> advantages.Advantages:
        """Return advantages and returns per token."""
        out = advantages.gae(token_rewards, values, mask, gamma=self.gamma, lam=self.lam, segment_ids=segment_ids)
        return out._replace(advantages=advantages.whiten(out.advantages, mask)) if self.whiten else out

    def explain(self) -> str:
        """Return the equation."""
        whitened = ", whitened" if self.whiten else ""
        return f"Σ ({self.gamma:g}·{self.lam:g})ˡ δₜ₊ₗ, δ = r + {self.gamma:g}·V′ − V{whitened}"
