"""KL terms and aggregations with the constants of other libraries."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from rl_fn import aggregation
from rl_fn._numerics import Array, as_float, exp, require
from rl_fn.divergences import estimators as divergences
from rl_fn.importance import ratios as importance
from rl_fn.objectives.batch import Batch
from rl_fn.objectives.components import KL, Aggregation

GRADIENTS = ("own", "k2", "weighted k2", "score")
WEIGHTS = (None, "token", "sequence", "rollout")


@dataclasses.dataclass(frozen=True)
class BoundedKL(KL):
    """A KL estimator between bounds, with a choice of gradient and weight.

    d = log π − log π_ref is held inside [low, high] and the estimate inside ±bound; their gradient is 0 outside.
    `gradient`: "own"; "k2", the value with k2's gradient; "weighted k2", that times sg(min(ρ, 10)); "score", the
    estimator's own plus that of the sampling probability, kl · π/sg(π). `weight`: ρ of this level, differentiable,
    multiplies the estimate; "rollout" takes π/μ.
    """

    low: float = -math.inf
    high: float = math.inf
    bound: float = math.inf
    gradient: str = "own"
    weight: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.gradient in GRADIENTS, f"gradient must be one of {GRADIENTS}, got {self.gradient!r}")
        require(self.weight in WEIGHTS, f"weight must be one of {WEIGHTS}, got {self.weight!r}")
        require(not self.estimator.endswith("+"), f"say gradient='k2' instead of estimator {self.estimator!r}")

    @property
    def required_fields(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """ref_logprobs, and rollout_logprobs for a weight of π/μ."""
        return ("ref_logprobs", "rollout_logprobs") if self.weight == "rollout" else ("ref_logprobs",)

    def estimate(self, batch: Batch) -> jax.Array:
        """Return the estimate per token, without the coefficient."""
        assert batch.ref_logprobs is not None
        new, old, ref = as_float(batch.logprobs, batch.old_logprobs, batch.ref_logprobs)
        d = jnp.clip(new - ref, self.low, self.high)
        value = getattr(divergences, f"kl_{self.estimator}")(d, jnp.zeros_like(d), batch.mask)
        value = jnp.clip(value, -self.bound, self.bound)
        if self.gradient in ("k2", "weighted k2"):
            k2 = divergences.kl_k2(new, ref, batch.mask)
            if self.gradient == "weighted k2":
                k2 = jax.lax.stop_gradient(jnp.minimum(exp(new - old), 10.0)) * k2
            value = divergences.kl_straight_through(value, k2)
        if self.gradient == "score":
            value = value * jnp.exp(new - jax.lax.stop_gradient(new))
        if self.weight == "rollout":
            if batch.rollout_logprobs is None:
                raise ValueError(f"{self} needs batch.rollout_logprobs; it is None")
            value = value * exp(importance.log_ratio(new, batch.rollout_logprobs, batch.mask))
        elif self.weight is not None:
            ratio = importance.log_ratio(new, old, batch.mask, level=self.weight, segment_ids=batch.segment_ids)
            value = value * exp(ratio)
        return value

    def explain(self) -> str:
        """Return the equation."""
        terms = [super().explain()]
        terms += [f"d in [{self.low:g}, {self.high:g}]"] if math.isfinite(self.low) or math.isfinite(self.high) else []
        terms += [f"at most ±{self.bound:g}"] if math.isfinite(self.bound) else []
        terms += [f"gradient: {self.gradient}"] if self.gradient != "own" else []
        terms += [f"times the {self.weight} ratio"] if self.weight is not None else []
        return ", ".join(terms)


@dataclasses.dataclass(frozen=True)
class AllRows(Aggregation):
    """An aggregation over sequences that counts those without a token too, as a mean over the rows of a tensor does."""

    accepts_packed = False

    def __call__(self, x: Array, mask: Array, segment_ids: Array | None) -> aggregation.Ratio:
        """Return the undivided aggregate."""
        require(segment_ids is None, "rows are counted as sequences: unpack segment_ids first")
        total = super().__call__(x, mask, segment_ids).total
        rows = math.prod(mask.shape[:-1])
        return aggregation.Ratio(total, jnp.asarray(rows * (self.max_completion_length or 1.0), total.dtype))

    def explain(self) -> str:
        """Return the mode and what it counts."""
        return f"{super().explain()}, fully masked sequences counted"


@dataclasses.dataclass(frozen=True)
class OverWidth(Aggregation):
    """seq-mean-token-sum divided by the width of the batch, padding included: it depends on how rows were padded."""

    mode: str = "seq-mean-token-sum"
    accepts_packed = False

    def __call__(self, x: Array, mask: Array, segment_ids: Array | None) -> aggregation.Ratio:
        """Return the undivided aggregate."""
        total, sequences = super().__call__(x, mask, segment_ids)
        return aggregation.Ratio(total, sequences * mask.shape[-1])

    def explain(self) -> str:
        """Return the mode and what it divides by."""
        return f"{self.mode} / padded width"
