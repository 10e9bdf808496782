"""Off-policy corrections as pieces: weights, or masks of 0 and 1, that multiply the policy loss."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from rl_fn._numerics import require
from rl_fn.importance import ratios as importance
from rl_fn.importance import rejection as corrections
from rl_fn.objectives.batch import Batch
from rl_fn.objectives.components.base import describe, read_by
from rl_fn.policy_losses import covariance as covariance_losses


def _log_old_over_rollout(batch: Batch) -> jax.Array:
    assert batch.rollout_logprobs is not None
    return importance.log_ratio(batch.old_logprobs, batch.rollout_logprobs, batch.mask)


def _weight(kept: jax.Array, batch: Batch) -> jax.Array:
    return kept.astype(jnp.asarray(batch.logprobs).dtype)


@dataclasses.dataclass(frozen=True)
class TruncatedImportance:
    """TIS: weights min(π_old/μ, cap), see truncated_importance_weights."""

    cap: float = 2.0
    level: str = "token"
    weighs_rollout: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("rollout_logprobs",)

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
    weighs_rollout: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("rollout_logprobs",)

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


@dataclasses.dataclass(frozen=True)
class Rejection:
    """Keep what is close to the policy that sampled, see rejection_mask."""

    threshold: float
    statistic: str = "k3"
    level: str = "token"
    reads: ClassVar[tuple[str, ...]] = ("rollout_logprobs",)

    def __post_init__(self) -> None:
        row, mask = (jax.ShapeDtypeStruct((1,), dtype) for dtype in (jnp.float32, jnp.bool_))
        jax.eval_shape(lambda x, m: self(Batch(x, x, x, m, rollout_logprobs=x)), row, mask)

    def __call__(self, batch: Batch) -> jax.Array:
        """Return 1 where kept, else 0."""
        constants = {"threshold": self.threshold, "statistic": self.statistic, "level": self.level}
        ids = batch.segment_ids
        kept = corrections.rejection_mask(_log_old_over_rollout(batch), batch.mask, **constants, segment_ids=ids)
        return _weight(kept, batch)

    def explain(self) -> str:
        """Return the equation."""
        return f"1 where |{self.statistic}(old ‖ rollout)| ≤ {self.threshold:g} per {self.level}, else 0"


@dataclasses.dataclass(frozen=True)
class SecondMoment:
    """M2PO's mask: without the largest (log ρ)², until the mean of the rest is small, see second_moment_mask."""

    threshold: float = 0.04
    over_batch: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        require(self.threshold > 0, f"threshold must be positive, got {self.threshold}")

    def __call__(self, batch: Batch) -> jax.Array:
        """Return 1 where kept, else 0."""
        ratios = jax.lax.stop_gradient(importance.log_ratio(batch.logprobs, batch.old_logprobs, batch.mask))
        return _weight(corrections.second_moment_mask(ratios, batch.mask, threshold=self.threshold), batch)

    def explain(self) -> str:
        """Return the equation."""
        return f"1 on the largest set of smallest (log ρ)² whose mean is ≤ {self.threshold:g}, else 0"


@dataclasses.dataclass(frozen=True)
class SequenceMask:
    """DeepSeek-V3.2's mask of bad answers that the policy has left behind, see off_policy_sequence_mask."""

    threshold: float
    reads: ClassVar[tuple[str, ...]] = ("rollout_logprobs",)

    def __call__(self, batch: Batch) -> jax.Array:
        """Return 1 where kept, else 0."""
        b = batch
        assert b.rollout_logprobs is not None
        new = jax.lax.stop_gradient(b.logprobs)
        ids = b.segment_ids
        kept = corrections.off_policy_sequence_mask(
            b.advantages, new, b.rollout_logprobs, b.mask, threshold=self.threshold, segment_ids=ids
        )
        return _weight(kept, b)

    def explain(self) -> str:
        """Return the equation."""
        return f"0 where A < 0 and the sequence's mean of rollout_logprobs − logprobs > {self.threshold:g}, else 1"


@dataclasses.dataclass(frozen=True)
class TotalVariation:
    """VACO's mask of outward tokens in sequences that drifted too far, see total_variation_mask."""

    threshold: float
    reads: ClassVar[tuple[str, ...]] = ("rollout_logprobs",)

    def __post_init__(self) -> None:
        require(self.threshold > 0, f"threshold must be positive, got {self.threshold}")

    def __call__(self, batch: Batch) -> jax.Array:
        """Return 1 where kept, else 0."""
        b = batch
        assert b.rollout_logprobs is not None
        new = jax.lax.stop_gradient(b.logprobs)
        ids = b.segment_ids
        kept = corrections.total_variation_mask(
            b.advantages, new, b.rollout_logprobs, b.mask, threshold=self.threshold, segment_ids=ids
        )
        return _weight(kept, b)

    def explain(self) -> str:
        """Return the equation."""
        return f"0 where ½ mean |π/μ − 1| of the sequence > {self.threshold:g} and A log(π/μ) > 0, else 1"


@dataclasses.dataclass(frozen=True)
class HighEntropy:
    """Only the tokens of highest entropy learn, see high_entropy_mask."""

    quantile: float = 0.8
    over_batch: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("entropies",)

    def __post_init__(self) -> None:
        require(0 <= self.quantile <= 1, f"quantile must be in [0, 1], got {self.quantile}")

    def __call__(self, batch: Batch) -> jax.Array:
        """Return 1 where kept, else 0."""
        assert batch.entropies is not None
        entropies = jax.lax.stop_gradient(batch.entropies)
        return _weight(covariance_losses.high_entropy_mask(entropies, batch.mask, quantile=self.quantile), batch)

    def explain(self) -> str:
        """Return the equation."""
        return f"1 where H ≥ its {self.quantile:g}-quantile, else 0"


@dataclasses.dataclass(frozen=True)
class Product:
    """Several corrections multiplied, a weight and masks for instance; at most one of them may weigh by π_old/μ."""

    factors: tuple[Any, ...]

    def __post_init__(self) -> None:
        weighing = [factor for factor in self.factors if getattr(factor, "weighs_rollout", False)]
        reason = "each multiplies by π_old/μ, which must be counted once: keep one of them"
        require(len(weighing) < 2, f"{reason}; got {weighing}")
        require(len(self.factors) > 0, "a Product must have a factor")

    def __call__(self, batch: Batch) -> jax.Array:
        """Return the weight per token."""
        first, *others = (jnp.asarray(factor(batch)) for factor in self.factors)
        for other in others:
            first = first * other
        return first

    @property
    def weighs_rollout(self) -> bool:
        """Whether a factor weighs by π_old/μ."""
        return any(getattr(factor, "weighs_rollout", False) for factor in self.factors)

    @property
    def over_batch(self) -> bool:
        """Whether a factor has a statistic of the batch."""
        return any(getattr(factor, "over_batch", False) for factor in self.factors)

    @property
    def reads(self) -> tuple[str, ...]:
        """Fields that a factor reads."""
        return tuple(dict.fromkeys(name for factor in self.factors for name in read_by(factor)))

    def explain(self) -> str:
        """Return the factors."""
        return " · ".join(f"[{describe(factor)}]" for factor in self.factors)
