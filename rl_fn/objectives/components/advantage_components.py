"""Advantage estimators as components: called with Rollouts, they return advantages per token, and a critic's returns."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from rl_fn import distillation
from rl_fn._numerics import Array, as_float, require
from rl_fn.advantages import baselines, group, passk, token, whitened
from rl_fn.advantages.returns import Advantages, gae, length_adaptive_lambda, whiten
from rl_fn.objectives.batch import Rollouts, counted, on_every_token, rewards_of, token_rewards_of
from rl_fn.objectives.components.component import Component, shown


class Advantage(Component):
    """An estimator called with Rollouts; advantages are per token, zero where masked and where not valid.

    required_fields: what it reads of Rollouts beyond the mask. rewards_shape: of the rewards.
    per_token: advantages may differ inside a completion. critic: it reads values and gives a critic its returns.
    token_rewards: it takes Rollouts.token_rewards in place of rewards.
    takes_penalty: Rollouts.penalties are taken off what it reads. accepts_packed: it takes Rollouts.segment_ids.
    """

    required_fields: tuple[str, ...] = ("rewards",)
    rewards_shape: str = "*batch G"
    per_token: bool = True
    critic: bool = False
    token_rewards: bool = False
    takes_penalty: bool = False
    accepts_packed: bool = False

    def __call__(self, rollouts: Rollouts) -> Advantages:
        """Return advantages and returns per token; returns are None without a critic."""
        return Advantages(self.per_token_advantages(rollouts), None)  # pyright: ignore[reportArgumentType]

    def per_token_advantages(self, rollouts: Rollouts) -> jax.Array:
        """Return the advantage per token."""
        raise NotImplementedError


class PerCompletion(Advantage):
    """An estimator of one number per completion: a function of rewards, valid and group_ids, with constants."""

    function: ClassVar[Callable[..., jax.Array]]
    per_token = False
    takes_penalty = True

    def __post_init__(self) -> None:
        # The function's own checks of its hyper-parameters, when the component is made and not at the first rollout.
        jax.eval_shape(lambda r: type(self).function(r, **self.constants()), jnp.zeros((1, 8)))

    def constants(self) -> dict[str, Any]:
        """Return the keyword arguments of the function."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # pyright: ignore[reportArgumentType]

    def per_completion(self, rollouts: Rollouts) -> jax.Array:
        """Return the advantage per completion."""
        of = {"valid": rollouts.valid, "group_ids": rollouts.group_ids}
        return type(self).function(rewards_of(rollouts), **of, **self.constants())

    def per_token_advantages(self, rollouts: Rollouts) -> jax.Array:
        """Return the completion's advantage on each of its tokens."""
        return on_every_token(self.per_completion(rollouts), counted(rollouts))


@dataclasses.dataclass(frozen=True)
class CustomAdvantage(PerCompletion):
    """Any function of rewards `*batch G` that returns one number per completion; it sees no valid and no group_ids."""

    of_rewards: Callable[[Any], jax.Array]

    def __post_init__(self) -> None:
        """Nothing is known of the function before it is called."""

    def per_completion(self, rollouts: Rollouts) -> jax.Array:
        """Return the advantage per completion."""
        unseen = rollouts.valid is None and rollouts.group_ids is None
        require(unseen, f"{self.explain()} is a function of rewards alone: it cannot leave out what is not valid")
        return self.of_rewards(rewards_of(rollouts))

    def explain(self) -> str:
        """Return the function's name."""
        return getattr(self.of_rewards, "__name__", repr(self.of_rewards))


@dataclasses.dataclass(frozen=True)
class GRPOAdvantage(PerCompletion):
    """(r − mean)/(std + eps) in each group, see grpo_advantages; Dr. GRPO's with scale "none"."""

    scale: str = "group"
    eps: float = 1e-6
    function = staticmethod(group.grpo_advantages)

    @property
    def equation(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Divided by the std or not."""
        return "r − mean" if self.scale == "none" else "(r − mean)/(std of the {scale} + {eps})"


@dataclasses.dataclass(frozen=True)
class RLOOAdvantage(PerCompletion):
    """The mean reward of the others is the baseline, see rloo_advantages."""

    function = staticmethod(group.rloo_advantages)
    equation = "r − mean of the others"


@dataclasses.dataclass(frozen=True)
class RawReward(PerCompletion):
    """The reward less a constant baseline, for plain REINFORCE."""

    baseline: float = 0.0
    equation = "r − {baseline}"

    @staticmethod
    def function(rewards: Array, *, baseline: float, **unread: Any) -> jax.Array:
        """Return r − b."""
        return as_float(rewards)[0] - baseline


@dataclasses.dataclass(frozen=True)
class GPGAdvantage(PerCompletion):
    """Centred rewards scaled up for the completions without a gradient, see gpg_advantages."""

    norm: float = 1.0
    alpha: str = "informative"
    function = staticmethod(baselines.gpg_advantages)

    @property
    def equation(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """With α where there is one."""
        plain = "(r − mean)/{norm}"
        return plain if self.alpha == "none" else f"α {plain}, α = answers / {{alpha}} answers of the batch"


@dataclasses.dataclass(frozen=True)
class MaxRLAdvantage(PerCompletion):
    """(r − mean)/mean, see maxrl_advantages."""

    function = staticmethod(baselines.maxrl_advantages)
    equation = "(r − mean)/mean, 0 where the mean is 0"


@dataclasses.dataclass(frozen=True)
class PassKAdvantage(PerCompletion):
    """The reward of the best of k completions, over all sets of k, see passk_analytic_advantages."""

    k: int = 4
    function = staticmethod(passk.passk_analytic_advantages)
    equation = "(mean R of the sets of {k} with the answer − mean R)/(std of R), R = the set's best r"

    def __post_init__(self) -> None:
        require(self.k >= 1, f"k must be at least 1, got {self.k}")


@dataclasses.dataclass(frozen=True)
class GRPOPassKAdvantage(PerCompletion):
    """Only the best completion learns, by its lead over the second best, see passk_advantages."""

    scale: bool = True
    eps: float = 1e-6
    function = staticmethod(passk.passk_advantages)

    @property
    def equation(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Divided by the std or not."""
        return f"{'(r₁ − r₂)/(std + {eps})' if self.scale else 'r₁ − r₂'} for the group's best, else 0"


@dataclasses.dataclass(frozen=True)
class OPOAdvantage(PerCompletion):
    """The mean reward weighted by length is the baseline, see opo_advantages."""

    equation = "r − Σ l r / Σ l, l = tokens of the answer"

    def __post_init__(self) -> None:
        """There is no constant."""

    def per_completion(self, rollouts: Rollouts) -> jax.Array:
        """Return the advantage per completion."""
        lengths = jnp.sum(counted(rollouts), axis=-1, dtype=jnp.int32)
        return baselines.opo_advantages(rewards_of(rollouts), lengths, rollouts.valid, group_ids=rollouts.group_ids)


@dataclasses.dataclass(frozen=True)
class ReMaxAdvantage(PerCompletion):
    """The reward of the greedy completion is the baseline, see remax_advantages."""

    required_fields = ("rewards", "greedy_rewards")
    equation = "r − r(greedy)"

    def __post_init__(self) -> None:
        """There is no constant."""

    def per_completion(self, rollouts: Rollouts) -> jax.Array:
        """Return the advantage per completion."""
        assert rollouts.greedy_rewards is not None
        return baselines.remax_advantages(rewards_of(rollouts), rollouts.greedy_rewards)


@dataclasses.dataclass(frozen=True)
class GDPOAdvantage(PerCompletion):
    """Each of R rewards normalised in its group, their weighted sum over the batch, see gdpo_advantages."""

    weights: tuple[float, ...] | None = None
    eps: float = 1e-6
    rewards_shape = "*batch R G"
    takes_penalty = False

    def __post_init__(self) -> None:
        require(self.eps >= 0, f"eps must not be negative, got {self.eps}")

    def per_completion(self, rollouts: Rollouts) -> jax.Array:
        """Return the advantage per completion."""
        rewards = rewards_of(rollouts)
        kinds = rewards.shape[-2] if rewards.ndim > 1 else 0
        require(kinds > 0, f"GDPO needs rewards (*batch, R, G), R of them a completion, got {rewards.shape}")
        fits = self.weights is None or len(self.weights) == kinds
        require(fits, f"GDPO has weights {self.weights} for {kinds} rewards: give one a reward, or none")
        weights = None if self.weights is None else jnp.array(self.weights, jnp.float32)
        valid, ids = rollouts.valid, rollouts.group_ids
        return whitened.gdpo_advantages(rewards, weights, valid, eps=self.eps, group_ids=ids)

    def explain(self) -> str:
        """Return the equation with its constants."""
        weights = "1" if self.weights is None else f"({', '.join(shown(w) for w in self.weights)})"
        of = f"S = Σₖ wₖ (rₖ − mean)/(std of the group + {shown(self.eps)})"
        return f"S whitened over the batch, {of}, w = {weights}"


@dataclasses.dataclass(frozen=True)
class GiGPOAdvantage(Advantage):
    """An episode against its group, a step against those from the same state, see step_group_advantages."""

    gamma: float = 0.95
    weight: float = 1.0
    scale: str = "group"
    eps: float = 1e-6
    required_fields = ("rewards", "state_ids")
    rewards_shape = "*batch G S"
    per_token = False

    def __post_init__(self) -> None:
        require(0 <= self.gamma <= 1, f"gamma must be in [0, 1], got {self.gamma}")
        scales = token.STEP_SCALES
        require(self.scale in scales, f"scale must be one of {scales}, got {self.scale!r}")
        require(self.eps >= 0, f"eps must not be negative, got {self.eps}")

    def per_token_advantages(self, rollouts: Rollouts) -> jax.Array:
        """Return a step's advantage on each of its tokens."""
        assert rollouts.rewards is not None and rollouts.state_ids is not None
        mask = counted(rollouts)
        constants = {"gamma": self.gamma, "weight": self.weight, "scale": self.scale, "eps": self.eps}
        taken = jnp.any(mask, axis=-1)
        per_step = token.step_group_advantages(rollouts.rewards, rollouts.state_ids, taken, **constants)
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

    gamma: float = 1.0
    eps: float = 1e-8
    token_rewards = True
    takes_penalty = True
    equation = "(G − mean)/√(var + {eps}) over the batch's tokens, Gₜ = rₜ + {gamma} Gₜ₊₁"

    def __post_init__(self) -> None:
        require(0 <= self.gamma <= 1, f"gamma must be in [0, 1], got {self.gamma}")
        require(self.eps >= 0, f"eps must not be negative, got {self.eps}")

    @property
    def per_token(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Discounting makes a difference between the first token and the last."""
        return self.gamma < 1

    def per_token_advantages(self, rollouts: Rollouts) -> jax.Array:
        """Return the advantage per token."""
        rewards, mask = token_rewards_of(rollouts), counted(rollouts)
        return whitened.reinforce_pp_advantages(rewards, mask, gamma=self.gamma, eps=self.eps)


@dataclasses.dataclass(frozen=True)
class ReinforcePPBaselineAdvantage(Advantage):
    """Group mean off, whitened over the batch's tokens, see reinforce_pp_baseline_advantages."""

    eps: float = 1e-8
    per_token = False
    takes_penalty = True
    equation = "(d − mean)/√(var + {eps}) over the batch's tokens, d = r − mean of the group"

    def __post_init__(self) -> None:
        require(self.eps >= 0, f"eps must not be negative, got {self.eps}")

    def per_token_advantages(self, rollouts: Rollouts) -> jax.Array:
        """Return the advantage per token."""
        of = {"eps": self.eps, "group_ids": rollouts.group_ids}
        return whitened.reinforce_pp_baseline_advantages(rewards_of(rollouts), counted(rollouts), **of)


@dataclasses.dataclass(frozen=True)
class DistillationAdvantage(Advantage):
    """On-policy distillation: the teacher's log-probability less the student's, see distillation_advantages."""

    clip: float | None = None
    required_fields = ("old_logprobs", "teacher_logprobs")
    rewards_shape = "none"

    def __post_init__(self) -> None:
        require(self.clip is None or self.clip > 0, f"clip must be positive, got {self.clip}")

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

    gamma: float = 1.0
    lam: float = 0.95
    whiten: bool = True
    required_fields = ("rewards", "values")
    critic = True
    token_rewards = True
    takes_penalty = True
    accepts_packed = True

    def __post_init__(self) -> None:
        require(0 <= self.gamma <= 1 and 0 <= self.lam <= 1, f"gamma and lam must be in [0, 1], got {self}")

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

    lam: float = 1.0
    alpha: float = 0.05
    accepts_packed = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.alpha > 0, f"alpha must be positive, got {self.alpha}")

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
