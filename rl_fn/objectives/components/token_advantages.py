"""Advantage estimators as components whose advantages may differ inside a completion, a critic's among them."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.core import Tracer

from rl_fn import distillation
from rl_fn._numerics import NOT_NEGATIVE, POSITIVE, UNIT, Array, Number, require
from rl_fn.advantages import token, whitened
from rl_fn.advantages.returns import Advantages, gae, length_adaptive_lambda, whiten
from rl_fn.objectives.batch import Rollouts, counted, on_every_token, rewards_of, token_rewards_of
from rl_fn.objectives.components.advantage_components import Advantage
from rl_fn.objectives.components.component import check_numbers, constants_of


@dataclasses.dataclass(frozen=True)
class GiGPOAdvantage(Advantage):
    """An episode against its group, a step against those from the same state, see step_group_advantages."""

    gamma: Number = 0.95
    weight: Number = 1.0
    scale: str = "group"
    eps: Number = 1e-6
    required_fields = ("rewards", "state_ids")
    rewards_shape = "*batch G S"
    per_token = False
    takes_valid = True
    takes_group_ids = True

    def __post_init__(self) -> None:
        check_numbers(UNIT, gamma=self.gamma)
        scales = token.STEP_SCALES
        require(self.scale in scales, f"scale must be one of {scales}, got {self.scale!r}")
        check_numbers(NOT_NEGATIVE, eps=self.eps)

    def per_token_advantages(self, rollouts: Rollouts) -> jax.Array:
        """Return a step's advantage on each of its tokens."""
        assert rollouts.rewards is not None and rollouts.state_ids is not None
        mask = counted(rollouts)
        of = {"valid": rollouts.valid, "group_ids": rollouts.group_ids}
        taken = jnp.any(mask, axis=-1)
        per_step = token.step_group_advantages(rollouts.rewards, rollouts.state_ids, taken, **of, **constants_of(self))
        return on_every_token(per_step, mask)

    @property
    def equation(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Divided by the std or not."""
        spread = "" if self.scale == "none" else "/(std + {eps})"
        step = f"(G − mean of the state){spread}, Gₜ = rₜ + {{gamma}} Gₜ₊₁"
        return f"(R − mean of the group){spread} + {{weight}} {step}"


@dataclasses.dataclass(frozen=True)
class ReinforcePPAdvantage(Advantage):
    """Returns whitened over the batch's tokens, see reinforce_pp_advantages."""

    gamma: Number = 1.0
    eps: Number = 1e-8
    token_rewards = True
    takes_penalty = True
    takes_valid = True
    takes_group_ids = True
    equation = "(G − mean)/√(var + {eps}) over the batch's tokens, Gₜ = rₜ + {gamma} Gₜ₊₁"

    def __post_init__(self) -> None:
        check_numbers(UNIT, gamma=self.gamma)
        check_numbers(NOT_NEGATIVE, eps=self.eps)

    @property
    def per_token(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Discounting makes a difference between the first token and the last."""
        return isinstance(self.gamma, Tracer) or bool(self.gamma < 1)

    def per_token_advantages(self, rollouts: Rollouts) -> jax.Array:
        """Return the advantage per token."""
        rewards, mask = token_rewards_of(rollouts), counted(rollouts)
        return whitened.reinforce_pp_advantages(rewards, mask, gamma=self.gamma, eps=self.eps)


@dataclasses.dataclass(frozen=True)
class ReinforcePPBaselineAdvantage(Advantage):
    """Group mean off, whitened over the batch's tokens, see reinforce_pp_baseline_advantages."""

    eps: Number = 1e-8
    per_token = False
    takes_penalty = True
    takes_valid = True
    takes_group_ids = True
    equation = "(d − mean)/√(var + {eps}) over the batch's tokens, d = r − mean of the group"

    def __post_init__(self) -> None:
        check_numbers(NOT_NEGATIVE, eps=self.eps)

    def per_token_advantages(self, rollouts: Rollouts) -> jax.Array:
        """Return the advantage per token."""
        of = {"valid": rollouts.valid, "eps": self.eps, "group_ids": rollouts.group_ids}
        return whitened.reinforce_pp_baseline_advantages(rewards_of(rollouts), counted(rollouts), **of)


@dataclasses.dataclass(frozen=True)
class DistillationAdvantage(Advantage):
    """On-policy distillation: the teacher's log-probability less the student's, see distillation_advantages."""

    clip: Number | None = None
    required_fields = ("old_logprobs", "teacher_logprobs")
    rewards_shape = "none"
    takes_valid = True
    takes_group_ids = True

    def __post_init__(self) -> None:
        check_numbers(POSITIVE, clip=self.clip)

    def per_token_advantages(self, rollouts: Rollouts) -> jax.Array:
        """Return the advantage per token."""
        old, teacher = rollouts.old_logprobs, rollouts.teacher_logprobs
        assert old is not None and teacher is not None
        return distillation.distillation_advantages(old, teacher, counted(rollouts), clip=self.clip)

    @property
    def equation(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Clipped or not."""
        return "teacher_logprobs − old_logprobs" + ("" if self.clip is None else " held in ±{clip}")


@dataclasses.dataclass(frozen=True)
class GAE(Advantage):
    """Generalised advantage estimation from a critic, see gae; whitened over the batch if `whiten`."""

    gamma: Number = 1.0
    lam: Number = 0.95
    whiten: bool = True
    required_fields = ("rewards", "values")
    critic = True
    token_rewards = True
    takes_penalty = True
    takes_valid = True
    takes_group_ids = True
    accepts_packed = True

    def __post_init__(self) -> None:
        check_numbers(UNIT, gamma=self.gamma, lam=self.lam)

    def __call__(self, rollouts: Rollouts) -> Advantages:
        """Return advantages and returns per token."""
        assert rollouts.values is not None
        return self.estimate(token_rewards_of(rollouts), rollouts.values, counted(rollouts), rollouts.segment_ids)

    def estimate(self, rewards: Array, values: Array, mask: Array, segment_ids: Array | None) -> Advantages:
        """Return advantages and returns from rewards per token."""
        out = gae(rewards, values, mask, gamma=self.gamma, lam=self.lam, segment_ids=segment_ids)
        return out._replace(advantages=whiten(out.advantages, mask)) if self.whiten else out

    @property
    def equation(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whitened or not."""
        return "Σ ({gamma}·{lam})ˡ δₜ₊ₗ, δ = r + {gamma}·V′ − V" + (", whitened" if self.whiten else "")


@dataclasses.dataclass(frozen=True)
class LengthAdaptiveGAE(GAE):
    """VAPO: λ = 1 − 1/(alpha · length), not below 0, for the policy; `lam` for the critic's returns."""

    lam: Number = 1.0
    alpha: Number = 0.05
    accepts_packed = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(POSITIVE, alpha=self.alpha)

    def estimate(self, rewards: Array, values: Array, mask: Array, segment_ids: Array | None) -> Advantages:
        """Return advantages and returns from rewards per token."""
        lengths = jnp.sum(mask, axis=-1, dtype=jnp.int32)
        lam = length_adaptive_lambda(lengths, alpha=self.alpha, minimum=0.0)
        policy = gae(rewards, values, mask, gamma=self.gamma, lam=lam).advantages
        critic = gae(rewards, values, mask, gamma=self.gamma, lam=self.lam).returns
        return Advantages(whiten(policy, mask) if self.whiten else policy, critic)

    @property
    def equation(self) -> str:
        """Two λ, whitened or not."""
        lam = "λ = max(0, 1 − 1/({alpha} l)) for the policy, {lam} for the returns"
        whitened = ", whitened" if self.whiten else ""
        return f"Σ ({{gamma}}·λ)ˡ δₜ₊ₗ, δ = r + {{gamma}}·V′ − V{whitened}, {lam}"
