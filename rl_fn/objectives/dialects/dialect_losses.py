"""Policy losses and importance weights with the constants of other libraries."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rl_fn._numerics import Array, Number, as_float, as_mask, exp, magnitude, own_gradient, require
from rl_fn.importance import ratios as importance
from rl_fn.objectives.batch import Batch
from rl_fn.objectives.components import PerToken, PPOClip
from rl_fn.objectives.components.component import joined, per_token
from rl_fn.objectives.components.corrections import Correction
from rl_fn.policy_losses import ppo as policy_losses


@dataclasses.dataclass(frozen=True)
class RatioClip(PPOClip):
    """PPO's clip on a ratio of the token or of its sequence, held between bounds.

    log ρ is held at ±limit before it is averaged, and at most `cap` after; the gradient is 0 outside. `level`:
    "token"; "sequence", the mean over the sequence, gradient through it; "sequence-token", that value with the gradient
    of the token (GSPO-token). `behaviour`: the policy that ρ refers to, "old" or "rollout".
    """

    level: str = "token"
    limit: float = math.inf
    cap: float = math.inf
    behaviour: str = "old"

    @property
    def required_fields(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """rollout_logprobs, if the ratio is to μ."""
        return () if self.behaviour == "old" else ("rollout_logprobs",)

    def constants(self) -> dict[str, Any]:
        """Return the clips."""
        return {name: getattr(self, name) for name in ("clip_low", "clip_high", "dual_clip")}

    def referred(self, batch: Batch) -> Batch:
        """Return the batch with the ratio's logarithm for logprobs, and zeros for old_logprobs."""
        old = batch.old_logprobs if self.behaviour == "old" else batch.rollout_logprobs
        if old is None:
            raise ValueError(f"{self} needs batch.rollout_logprobs; it is None")
        (new,) = as_float(batch.logprobs)
        ratio = jnp.clip(importance.log_ratio(new, old, batch.mask), -self.limit, self.limit)
        if self.level != "token":
            zeros = jnp.zeros_like(ratio)
            ids = batch.segment_ids
            ratio = importance.log_ratio(ratio, zeros, batch.mask, level="sequence", segment_ids=ids)
        if self.level == "sequence-token":
            ratio = jax.lax.stop_gradient(ratio) + own_gradient(new)
        ratio = jnp.minimum(ratio, self.cap)
        return batch._replace(logprobs=ratio, old_logprobs=jnp.zeros_like(ratio))

    def __call__(self, batch: Batch) -> jax.Array:
        """Return the loss per token."""
        return super().__call__(self.referred(batch))

    def clipped(self, batch: Batch) -> jax.Array | None:
        """Return the tokens whose gradient is cut."""
        return super().clipped(self.referred(batch))

    def explain(self) -> str:
        """Return the equation."""
        bounds = "" if math.isinf(self.limit) else f", log ρ in ±{self.limit:g}"
        bounds += "" if math.isinf(self.cap) else f", at most {self.cap:g}"
        return f"{super().explain()}, ρ per {self.level} to the {self.behaviour} policy{bounds}"


@dataclasses.dataclass(frozen=True)
class TokenLoss(PerToken):
    """A loss function of the library with constants: function(logprobs, old_logprobs, advantages, mask, constants)."""

    function: Callable[..., jax.Array]
    constants: tuple[tuple[str, Number | str], ...] = ()
    limit: float = math.inf
    over_batch = False

    def __call__(self, batch: Batch) -> jax.Array:
        """Return the loss per token; with a finite limit the function sees log ρ, held at ±limit, and zeros."""
        b = batch
        new, old = as_float(b.logprobs, b.old_logprobs)
        if math.isfinite(self.limit):
            new, old = jnp.clip(new - old, -self.limit, self.limit), jnp.zeros_like(old)
        return self.function(new, old, b.advantages, b.mask, **dict(self.constants))

    def explain(self) -> str:
        """Return the function's name and its constants."""
        return f"{self.function.__name__}({', '.join(f'{name}={value}' for name, value in self.constants)})"


def capped_reinforce(
    logprobs: Array, old_logprobs: Array, advantages: Array, mask: Array, *, cap: Number, level: str = "token"
) -> jax.Array:
    """−sg(min(ρ, cap)) A log π, ρ of the token or its sequence: CISPO whose cap is the ratio itself, not 1 + ε."""
    ratio = importance.log_ratio(logprobs, old_logprobs, mask, level=level)
    weight = jax.lax.stop_gradient(jnp.minimum(exp(ratio), cap))
    return weight * policy_losses.reinforce(logprobs, advantages, mask)


def trusted_reinforce(
    logprobs: Array,
    old_logprobs: Array,
    advantages: Array,
    mask: Array,
    *,
    low: Number,
    high: Number,
    ratio_cap: Number,
    divergence: str,
) -> jax.Array:
    """DPPO in REINFORCE's form, −sg(M min(ρ, cap)) A log π, with a threshold for each direction.

    M is 0 where the binary divergence of the token's probability exceeds `high` upwards and A > 0, or `low` downwards
    and A ≤ 0. The logarithms of "kl" are of 1 − p + 1e-8.
    """
    new, old, a = as_float(logprobs, old_logprobs, advantages)
    counted = as_mask(mask)
    new, old, a = (jnp.where(counted, x, 0.0) for x in (new, old, a))
    fixed = jax.lax.stop_gradient(new)
    p, q = jnp.exp(fixed), jnp.exp(old)
    if divergence == "tv":
        up, down = p - q > high, p - q < -low
    else:
        distance = q * (old - fixed) + (1.0 - q) * jnp.log((1.0 - q + 1e-8) / (1.0 - p + 1e-8))
        up, down = (distance > high) & (p > q), (distance > low) & (p < q)
    weight = jnp.minimum(exp(fixed - old), ratio_cap)
    return -jnp.where(jnp.where(a > 0, up, down), 0.0, weight) * a * new


@dataclasses.dataclass(frozen=True)
class Gated(PerToken):
    """A loss that some tokens are dropped from; they stay in the aggregation's count."""

    loss: Callable[[Batch], jax.Array]
    gates: tuple[Callable[[Batch], jax.Array], ...]

    def __post_init__(self) -> None:
        for name, value in joined(tuple(per_token(part) for part in (self.loss, *self.gates))).items():
            object.__setattr__(self, name, value)

    def __call__(self, batch: Batch) -> jax.Array:
        """Return the loss per token, 0 where a gate is shut."""
        loss = self.loss(batch)
        for gate in self.gates:
            loss = jnp.where(gate(batch), loss, 0.0)
        return loss

    def explain(self) -> str:
        """Return the loss and its gates."""
        return " where ".join([per_token(self.loss).explain(), *(repr(gate) for gate in self.gates)])


@dataclasses.dataclass(frozen=True)
class ImportanceBand(Correction):
    """Weights of π_old/μ that are clipped into [low, high], or zero where a statistic is outside it.

    `level`: what the ratio is of, "token", "sequence" (geometric mean) or "sequence_sum" (product). `gate`: what the
    interval is for, "ratio", or for masking only the divergence of the token's probability, "binary_kl" or "tv", its
    mean over a sequence if the level is one. `keep_tokens`: what passes the gate of a sequence keeps its token weight.
    """

    low: float = 0.0
    high: float = math.inf
    mode: str = "clip"
    level: str = "token"
    gate: str = "ratio"
    keep_tokens: bool = False
    limit: float = math.inf
    weighs_rollout = True

    def __post_init__(self) -> None:
        require(0 <= self.low <= self.high, f"need 0 ≤ low ≤ high, got {self}")
        require(self.mode in ("clip", "mask"), f"mode must be clip or mask, got {self}")
        require(self.gate in ("ratio", "binary_kl", "tv"), f"gate must be ratio, binary_kl or tv, got {self}")
        require(self.gate == "ratio" or self.mode == "mask", f"a divergence can only mask, got {self}")

    def __call__(self, batch: Batch) -> jax.Array:
        """Return the weight per token."""
        assert batch.rollout_logprobs is not None
        old, rollout = as_float(batch.old_logprobs, batch.rollout_logprobs)
        mask, zeros = as_mask(batch.mask), jnp.zeros_like(old)
        token = jnp.where(mask, old - rollout, 0.0)

        def at_level(x: jax.Array) -> jax.Array:
            return importance.log_ratio(x, zeros, mask, level=self.level, segment_ids=batch.segment_ids)

        weight = exp(jnp.clip(at_level(token), -self.limit, self.limit))
        if self.mode == "clip":
            weight = jnp.clip(weight, self.low, self.high)
        else:
            statistic = weight if self.gate == "ratio" else at_level(_divergence(self.gate, rollout, old))
            kept = exp(token) if self.keep_tokens else weight
            weight = jnp.where((statistic >= self.low) & (statistic <= self.high), kept, 0.0)
        return jax.lax.stop_gradient(jnp.where(mask, weight, 0.0))

    def explain(self) -> str:
        """Return the equation."""
        verb = "clipped into" if self.mode == "clip" else f"0 where the {self.gate} is outside"
        weight = "token" if self.keep_tokens else self.level
        return f"exp(old_logprobs − rollout_logprobs) per {weight}, {verb} [{self.low:g}, {self.high:g}] ({self.level})"


def _divergence(name: str, rollout: jax.Array, old: jax.Array) -> jax.Array:
    """KL or total variation of "this token or another" between μ and π_old, with probabilities inside 1e-6."""
    p, q = (jnp.clip(jnp.exp(x), 1e-6, 1 - 1e-6) for x in (rollout, old))
    if name == "tv":
        return magnitude(p - q)
    return p * jnp.log(p / q) + (1.0 - p) * jnp.log((1.0 - p) / (1.0 - q))
