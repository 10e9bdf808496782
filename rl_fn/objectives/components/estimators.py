"""Advantage estimators as pieces that read more of the rollouts than one reward per answer, and the critic's."""

import abc
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from rl_fn import distillation
from rl_fn._numerics import Array, as_float, as_mask, require
from rl_fn.advantages import baselines
from rl_fn.advantages import returns as advantages
from rl_fn.advantages import token as token_baselines
from rl_fn.advantages import whitened as batch_advantages
from rl_fn.objectives.batch import Rollouts


def on_last_token(per_answer: Array, mask: Array) -> jax.Array:
    """Return `*batch G T`: each answer's number on its last counted token, else 0."""
    counted = as_mask(mask)
    (r,) = as_float(per_answer)
    later = jnp.cumsum(counted[..., ::-1], axis=-1)[..., ::-1]
    return jnp.where(counted & (later == 1), r[..., None], 0.0)


def _on_every_token(per_answer: jax.Array, mask: Array) -> jax.Array:
    return jnp.where(as_mask(mask), per_answer[..., None], 0.0)


class RolloutEstimator(abc.ABC):
    """An estimator called with Rollouts; returns one advantage per token, zero where masked.

    reads: the fields of Rollouts it needs. shape: of the rewards. per_token: advantages differ inside an answer.
    """

    reads: ClassVar[tuple[str, ...]] = ("rewards",)
    shape: ClassVar[str] = "*batch G"

    @property
    def per_token(self) -> bool:
        """Whether advantages differ inside an answer."""
        return False

    @property
    def takes_penalty(self) -> bool:
        """Whether a KL penalty can be part of its rewards."""
        return self.shape == "*batch G"

    @abc.abstractmethod
    def __call__(self, rollouts: Rollouts) -> jax.Array:
        """Return the advantage per token."""


@dataclasses.dataclass(frozen=True)
class LengthWeighted(RolloutEstimator):
    """OPO: the mean reward weighted by length is the baseline, see opo_advantages."""

    def __call__(self, rollouts: Rollouts) -> jax.Array:
        """Return the advantage per token."""
        assert rollouts.rewards is not None
        counted = as_mask(rollouts.mask)
        lengths = jnp.sum(counted, axis=-1, dtype=jnp.int32)
        return _on_every_token(baselines.opo_advantages(rollouts.rewards, lengths), counted)

    def explain(self) -> str:
        """Return the equation."""
        return "r − Σ l r / Σ l, l = tokens of the answer"


@dataclasses.dataclass(frozen=True)
class GreedyBaseline(RolloutEstimator):
    """ReMax: the reward of the greedy answer is the baseline, see remax_advantages."""

    reads: ClassVar[tuple[str, ...]] = ("rewards", "greedy_rewards")

    def __call__(self, rollouts: Rollouts) -> jax.Array:
        """Return the advantage per token."""
        assert rollouts.rewards is not None and rollouts.greedy_rewards is not None
        return _on_every_token(baselines.remax_advantages(rollouts.rewards, rollouts.greedy_rewards), rollouts.mask)

    def explain(self) -> str:
        """Return the equation."""
        return "r − r(greedy)"


@dataclasses.dataclass(frozen=True)
class WhitenedReturns(RolloutEstimator):
    """REINFORCE++: returns whitened over the batch's tokens, see reinforce_pp_advantages."""

    gamma: float = 1.0
    eps: float = 1e-8

    def __post_init__(self) -> None:
        require(0 <= self.gamma <= 1, f"gamma must be in [0, 1], got {self.gamma}")
        require(self.eps >= 0, f"eps must not be negative, got {self.eps}")

    @property
    def per_token(self) -> bool:
        """Discounting makes a difference between the first token and the last."""
        return self.gamma < 1

    def __call__(self, rollouts: Rollouts) -> jax.Array:
        """Return the advantage per token."""
        token_rewards = rollouts.token_rewards
        if token_rewards is None:
            assert rollouts.rewards is not None
            token_rewards = on_last_token(rollouts.rewards, rollouts.mask)
        return batch_advantages.reinforce_pp_advantages(token_rewards, rollouts.mask, gamma=self.gamma, eps=self.eps)

    def explain(self) -> str:
        """Return the equation."""
        return f"(G − mean)/√(var + {self.eps:g}) over the batch's tokens, Gₜ = rₜ + {self.gamma:g} Gₜ₊₁"


@dataclasses.dataclass(frozen=True)
class WhitenedGroup(RolloutEstimator):
    """REINFORCE++-baseline: group mean off, whitened over the batch, see reinforce_pp_baseline_advantages."""

    eps: float = 1e-8

    def __post_init__(self) -> None:
        require(self.eps >= 0, f"eps must not be negative, got {self.eps}")

    def __call__(self, rollouts: Rollouts) -> jax.Array:
        """Return the advantage per token."""
        assert rollouts.rewards is not None
        return batch_advantages.reinforce_pp_baseline_advantages(rollouts.rewards, rollouts.mask, eps=self.eps)

    def explain(self) -> str:
        """Return the equation."""
        return f"(d − mean)/√(var + {self.eps:g}) over the batch's tokens, d = r − mean of the group"


@dataclasses.dataclass(frozen=True)
class SeveralRewards(RolloutEstimator):
    """GDPO: each of R rewards normalised in its group, their weighted sum over the batch, see gdpo_advantages."""

    weights: tuple[float, ...] | None = None
    eps: float = 1e-6
    shape: ClassVar[str] = "*batch R G"

    def __post_init__(self) -> None:
        require(self.eps >= 0, f"eps must not be negative, got {self.eps}")

    def __call__(self, rollouts: Rollouts) -> jax.Array:
        """Return the advantage per token."""
        assert rollouts.rewards is not None
        kinds = rollouts.rewards.shape[-2] if rollouts.rewards.ndim > 1 else 0
        require(kinds > 0, f"GDPO needs rewards (*batch, R, G), R of them an answer, got {rollouts.rewards.shape}")
        fits = self.weights is None or len(self.weights) == kinds
        require(fits, f"GDPO has weights {self.weights} for {kinds} rewards: give one a reward, or none")
        weights = None if self.weights is None else jnp.array(self.weights, jnp.float32)
        return _on_every_token(batch_advantages.gdpo_advantages(rollouts.rewards, weights, eps=self.eps), rollouts.mask)

    def explain(self) -> str:
        """Return the equation."""
        weights = "1" if self.weights is None else f"({', '.join(f'{w:g}' for w in self.weights)})"
        return f"S whitened over the batch, S = Σₖ wₖ (rₖ − mean)/(std of the group + {self.eps:g}), w = {weights}"


@dataclasses.dataclass(frozen=True)
class StepGroups(RolloutEstimator):
    """GiGPO: an episode against its group, a step against those from the same state, see step_group_advantages."""

    gamma: float = 0.95
    weight: float = 1.0
    scale: str = "group"
    eps: float = 1e-6
    reads: ClassVar[tuple[str, ...]] = ("rewards", "state_ids")
    shape: ClassVar[str] = "*batch G S"

    def __post_init__(self) -> None:
        require(0 <= self.gamma <= 1, f"gamma must be in [0, 1], got {self.gamma}")
        scales = token_baselines.STEP_SCALES
        require(self.scale in scales, f"scale must be one of {scales}, got {self.scale!r}")
        require(self.eps >= 0, f"eps must not be negative, got {self.eps}")

    def __call__(self, rollouts: Rollouts) -> jax.Array:
        """Return the advantage per token: a step's on all of its tokens."""
        assert rollouts.rewards is not None and rollouts.state_ids is not None
        counted = as_mask(rollouts.mask)
        constants = {"gamma": self.gamma, "weight": self.weight, "scale": self.scale, "eps": self.eps}
        taken = jnp.any(counted, axis=-1)
        per_step = token_baselines.step_group_advantages(rollouts.rewards, rollouts.state_ids, taken, **constants)
        return _on_every_token(per_step, counted)

    def explain(self) -> str:
        """Return the equation."""
        spread = "" if self.scale == "none" else f"/(std + {self.eps:g})"
        step = f"(G − mean of the state){spread}, Gₜ = rₜ + {self.gamma:g} Gₜ₊₁"
        return f"(R − mean of the group){spread} + {self.weight:g} {step}"


@dataclasses.dataclass(frozen=True)
class TeacherLogRatio(RolloutEstimator):
    """On-policy distillation: the teacher's log-probability less the student's, see distillation_advantages."""

    clip: float | None = None
    reads: ClassVar[tuple[str, ...]] = ("old_logprobs", "teacher_logprobs")
    shape: ClassVar[str] = "none"

    def __post_init__(self) -> None:
        require(self.clip is None or self.clip > 0, f"clip must be positive, got {self.clip}")

    @property
    def per_token(self) -> bool:
        """Every token has a teacher of its own."""
        return True

    def __call__(self, rollouts: Rollouts) -> jax.Array:
        """Return the advantage per token."""
        old, teacher = rollouts.old_logprobs, rollouts.teacher_logprobs
        assert old is not None and teacher is not None
        return distillation.distillation_advantages(old, teacher, rollouts.mask, clip=self.clip)

    def explain(self) -> str:
        """Return the equation."""
        ratio = "teacher_logprobs − old_logprobs"
        return ratio if self.clip is None else f"{ratio} held in ±{self.clip:g}"


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


@dataclasses.dataclass(frozen=True)
class LengthAdaptiveGAE(GAE):
    """VAPO: λ = 1 − 1/(alpha · length), not below 0, for the policy; `lam` for the critic's returns."""

    lam: float = 1.0
    alpha: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.alpha > 0, f"alpha must be positive, got {self.alpha}")

    def __call__(
        self, token_rewards: Array, values: Array, mask: Array, segment_ids: Array | None = None
    ) -> advantages.Advantages:
        """Return advantages and returns per token."""
        remedy = "compute advantages before packing, one sequence a row"
        require(segment_ids is None, f"a λ that depends on the length is one number a row: {remedy}")
        lengths = jnp.sum(as_mask(mask), axis=-1, dtype=jnp.int32)
        lam = advantages.length_adaptive_lambda(lengths, alpha=self.alpha, minimum=0.0)
        policy = advantages.gae(token_rewards, values, mask, gamma=self.gamma, lam=lam).advantages
        critic = advantages.gae(token_rewards, values, mask, gamma=self.gamma, lam=self.lam).returns
        policy = advantages.whiten(policy, mask) if self.whiten else policy
        return advantages.Advantages(policy, critic)

    def explain(self) -> str:
        """Return the equation."""
        whitened = ", whitened" if self.whiten else ""
        lam = f"λ = max(0, 1 − 1/({self.alpha:g} l)) for the policy, {self.lam:g} for the returns"
        return f"Σ ({self.gamma:g}·λ)ˡ δₜ₊ₗ, δ = r + {self.gamma:g}·V′ − V{whitened}, {lam}"
