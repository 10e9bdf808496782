"""Off-policy corrections as components: weights, or masks of 0 and 1, that multiply the policy loss."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from rl_fn._numerics import Number, require
from rl_fn.importance import ratios, rejection
from rl_fn.objectives.batch import Batch
from rl_fn.objectives.components.component import PerToken, Several, describe
from rl_fn.policy_losses import covariance

ROLLOUT = ("rollout_logprobs",)


class Correction(PerToken):
    """A correction of the library: a statistic of a token or of its sequence, checked when it is made."""

    accepts_packed = True
    over_batch = False
    gradient_without_advantage = False
    required_fields = ROLLOUT

    def __post_init__(self) -> None:
        # The function's own checks of its hyper-parameters, when the component is made and not at the first batch.
        row, mask = (jax.ShapeDtypeStruct((1,), dtype) for dtype in (jnp.float32, jnp.bool_))
        jax.eval_shape(lambda x, m: self(Batch(x, x, x, m, rollout_logprobs=x, entropies=x)), row, mask)

    def __call__(self, batch: Batch) -> jax.Array:
        """Return the weight per token: 1 where kept, else 0."""
        return self.kept(batch).astype(jnp.asarray(batch.logprobs).dtype)

    def kept(self, batch: Batch) -> jax.Array:
        """Return whether the token is kept."""
        raise NotImplementedError


def log_old_over_rollout(batch: Batch) -> jax.Array:
    """Return log π_old/μ per token."""
    assert batch.rollout_logprobs is not None
    return ratios.log_ratio(batch.old_logprobs, batch.rollout_logprobs, batch.mask)


@dataclasses.dataclass(frozen=True)
class TIS(Correction):
    """Truncated importance sampling: weights min(π_old/μ, cap), see truncated_importance_weights."""

    cap: Number = 2.0
    level: str = "token"
    weighs_rollout = True
    equation = "min(exp(old_logprobs − rollout_logprobs), {cap}) per {level}"

    def __call__(self, batch: Batch) -> jax.Array:
        """Return the weight per token."""
        constants = {"cap": self.cap, "level": self.level, "segment_ids": batch.segment_ids}
        return ratios.truncated_importance_weights(log_old_over_rollout(batch), batch.mask, **constants)


@dataclasses.dataclass(frozen=True)
class IcePop(Correction):
    """IcePop, masked importance sampling (MIS): weights π_old/μ inside [low, high], else 0."""

    low: Number = 0.5
    high: Number = 5.0
    level: str = "token"
    weighs_rollout = True
    equation = "exp(old_logprobs − rollout_logprobs) inside [{low}, {high}], else 0, per {level}"

    def __call__(self, batch: Batch) -> jax.Array:
        """Return the weight per token, see masked_importance_weights."""
        constants = {"low": self.low, "high": self.high, "level": self.level, "segment_ids": batch.segment_ids}
        return ratios.masked_importance_weights(log_old_over_rollout(batch), batch.mask, **constants)


@dataclasses.dataclass(frozen=True)
class Rejection(Correction):
    """Keep what is close to the policy that sampled, see rejection_mask."""

    threshold: Number
    statistic: str = "k3"
    level: str = "token"
    equation = "1 where |{statistic}(old ‖ rollout)| ≤ {threshold} per {level}, else 0"

    def kept(self, batch: Batch) -> jax.Array:
        """Return whether the token is kept."""
        constants = {"threshold": self.threshold, "statistic": self.statistic, "level": self.level}
        ratio, ids = log_old_over_rollout(batch), batch.segment_ids
        return rejection.rejection_mask(ratio, batch.mask, **constants, segment_ids=ids)


@dataclasses.dataclass(frozen=True)
class M2POMask(Correction):
    """M2PO: without the largest (log ρ)², until the mean of the rest is small, see second_moment_mask."""

    threshold: Number = 0.04
    over_batch = True
    required_fields = ()
    equation = "1 on the largest set of smallest (log ρ)² whose mean is ≤ {threshold}, else 0"

    def kept(self, batch: Batch) -> jax.Array:
        """Return whether the token is kept."""
        ratio = jax.lax.stop_gradient(ratios.log_ratio(batch.logprobs, batch.old_logprobs, batch.mask))
        return rejection.second_moment_mask(ratio, batch.mask, threshold=self.threshold)


class Drift(Correction):
    """A mask by how far the policy has gone from the one that sampled, and by the sign of the advantage."""

    threshold: Number
    function: ClassVar

    def kept(self, batch: Batch) -> jax.Array:
        """Return whether the token is kept."""
        arrays = (batch.advantages, jax.lax.stop_gradient(batch.logprobs), batch.rollout_logprobs, batch.mask)
        return type(self).function(*arrays, threshold=self.threshold, segment_ids=batch.segment_ids)


@dataclasses.dataclass(frozen=True)
class OffPolicySequenceMask(Drift):
    """DeepSeek-V3.2's mask of bad completions that the policy has left behind, see off_policy_sequence_mask."""

    threshold: Number
    function = staticmethod(rejection.off_policy_sequence_mask)
    equation = "0 where A < 0 and the sequence's mean of rollout_logprobs − logprobs > {threshold}, else 1"


@dataclasses.dataclass(frozen=True)
class VACOMask(Drift):
    """VACO's mask of outward tokens in sequences that drifted too far, see total_variation_mask."""

    threshold: Number
    function = staticmethod(rejection.total_variation_mask)
    equation = "0 where ½ mean |π/μ − 1| of the sequence > {threshold} and A log(π/μ) > 0, else 1"


@dataclasses.dataclass(frozen=True)
class HighEntropyMask(Correction):
    """Only the tokens of highest entropy learn, see high_entropy_mask."""

    quantile: Number = 0.8
    over_batch = True
    required_fields = ("entropies",)
    equation = "1 where H ≥ its {quantile}-quantile, else 0"

    def kept(self, batch: Batch) -> jax.Array:
        """Return whether the token is kept."""
        assert batch.entropies is not None
        return covariance.high_entropy_mask(jax.lax.stop_gradient(batch.entropies), batch.mask, quantile=self.quantile)


@dataclasses.dataclass(frozen=True)
class Product(Several):
    """Several corrections multiplied, a weight and masks for instance; at most one of them may weigh by π_old/μ."""

    def __post_init__(self) -> None:
        super().__post_init__()
        weighing = [part for part in self.parts if part.weighs_rollout]
        reason = "each multiplies by π_old/μ, which must be counted once: keep one of them"
        require(len(weighing) < 2, f"{reason}; got {weighing}")

    def __call__(self, batch: Batch) -> jax.Array:
        """Return the weight per token; 0 where one of them is 0, whatever the others are."""
        first, *others = (jnp.asarray(part(batch)) for part in self.parts)
        for other in others:
            first = jnp.where((first == 0) | (other == 0), 0.0, first * other)
        return first

    def explain(self) -> str:
        """Return the factors."""
        return " · ".join(f"[{describe(part)}]" for part in self.parts)
