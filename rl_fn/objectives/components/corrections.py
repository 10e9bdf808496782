"""Off-policy corrections as components: weights, or masks of 0 and 1, that multiply the policy loss."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from rl_fn._numerics import Number, require
from rl_fn.importance import ratios, rejection
from rl_fn.objectives.batch import Batch
from rl_fn.objectives.components.component import Known, Several, constants_of
from rl_fn.policy_losses import covariance


class Correction(Known):
    """A correction of the library: a statistic of a token or of its sequence."""

    slots = ("correction",)
    required_fields = ("rollout_logprobs",)

    def __call__(self, batch: Batch) -> jax.Array:
        """Return the weight per token; 1 where a mask keeps the token, else 0."""
        weights = self.weights(batch)
        return weights.astype(jnp.asarray(batch.logprobs).dtype) if weights.dtype == jnp.bool_ else weights

    def weights(self, batch: Batch) -> jax.Array:
        """Return the weight per token, or whether the token is kept."""
        raise NotImplementedError


class FunctionCorrection(Correction):
    """A function of log π_old/μ and the mask: the component's fields are its hyper-parameters."""

    function: ClassVar[Callable[..., jax.Array]]

    def arrays(self, batch: Batch) -> tuple[Any, ...]:
        """Return the positional arguments of the function."""
        assert batch.rollout_logprobs is not None
        return ratios.log_ratio(batch.old_logprobs, batch.rollout_logprobs, batch.mask), batch.mask

    def weights(self, batch: Batch) -> jax.Array:
        """Return what the function returns per token."""
        return type(self).function(*self.arrays(batch), **constants_of(self), segment_ids=batch.segment_ids)


@dataclasses.dataclass(frozen=True)
class TIS(FunctionCorrection):
    """Truncated importance sampling: weights min(π_old/μ, cap), see truncated_importance_weights."""

    cap: Number = 2.0
    level: str = "token"
    weighs_rollout = True
    function = staticmethod(ratios.truncated_importance_weights)
    equation = "min(exp(old_logprobs − rollout_logprobs), {cap}) per {level}"


@dataclasses.dataclass(frozen=True)
class IcePop(FunctionCorrection):
    """IcePop, masked importance sampling (MIS): weights π_old/μ inside [low, high], see masked_importance_weights."""

    low: Number = 0.5
    high: Number = 5.0
    level: str = "token"
    weighs_rollout = True
    function = staticmethod(ratios.masked_importance_weights)
    equation = "exp(old_logprobs − rollout_logprobs) inside [{low}, {high}], else 0, per {level}"


@dataclasses.dataclass(frozen=True)
class Rejection(FunctionCorrection):
    """Keep what is close to the policy that sampled, see rejection_mask."""

    threshold: Number
    statistic: str = "k3"
    level: str = "token"
    function = staticmethod(rejection.rejection_mask)
    equation = "1 where |{statistic}(old ‖ rollout)| ≤ {threshold} per {level}, else 0"


@dataclasses.dataclass(frozen=True)
class M2POMask(Correction):
    """M2PO: without the largest (log ρ)², until the mean of the rest is small, see second_moment_mask."""

    threshold: Number = 0.04
    over_batch = True
    required_fields = ()
    equation = "1 on the largest set of smallest (log ρ)² whose mean is ≤ {threshold}, else 0"

    def weights(self, batch: Batch) -> jax.Array:
        """Return whether the token is kept."""
        ratio = jax.lax.stop_gradient(ratios.log_ratio(batch.logprobs, batch.old_logprobs, batch.mask))
        return rejection.second_moment_mask(ratio, batch.mask, threshold=self.threshold)


class Drift(FunctionCorrection):
    """A mask by how far the policy has gone from the one that sampled, and by the sign of the advantage."""

    def arrays(self, batch: Batch) -> tuple[Any, ...]:
        """Return the positional arguments of the function."""
        return batch.advantages, jax.lax.stop_gradient(batch.logprobs), batch.rollout_logprobs, batch.mask


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

    def weights(self, batch: Batch) -> jax.Array:
        """Return whether the token is kept."""
        assert batch.entropies is not None
        return covariance.high_entropy_mask(jax.lax.stop_gradient(batch.entropies), batch.mask, quantile=self.quantile)


@dataclasses.dataclass(frozen=True)
class Product(Several):
    """Several corrections multiplied, a weight and masks for instance; at most one of them may weigh by π_old/μ."""

    slots = ("correction",)

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
        return " · ".join(f"[{part.explain()}]" for part in self.parts)
