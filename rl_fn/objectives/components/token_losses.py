"""Policy losses as pieces, of the kind whose token depends on itself alone (or on a statistic of the batch)."""

import dataclasses
from typing import Any, ClassVar

import jax

from rl_fn._numerics import require
from rl_fn.objectives.batch import Batch
from rl_fn.objectives.components.base import BehaviourLoss, FunctionLoss, describe, read_by
from rl_fn.policy_losses import covariance as covariance_losses
from rl_fn.policy_losses import ppo as policy_losses
from rl_fn.policy_losses import regularised as regularised_losses
from rl_fn.policy_losses import token_level as token_losses

SUMS = ("token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm")


@dataclasses.dataclass(frozen=True)
class Clip:
    """PPO's clipped loss, see ppo_clip."""

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None

    def __post_init__(self) -> None:
        require(self.low >= 0 and self.high >= 0, f"clips must not be negative, got {self}")
        require(self.dual is None or self.dual > 1, f"the dual clip must exceed 1, got {self}")

    def _constants(self) -> dict[str, Any]:
        return {"clip_low": self.low, "clip_high": self.high, "dual_clip": self.dual}

    def __call__(self, batch: Batch) -> jax.Array:
        """Return the loss per token."""
        b = batch
        return policy_losses.ppo_clip(b.logprobs, b.old_logprobs, b.advantages, b.mask, **self._constants())

    def clipped(self, batch: Batch) -> jax.Array:
        """Return the tokens whose gradient is cut."""
        b = batch
        return policy_losses.clipped_tokens(b.logprobs, b.old_logprobs, b.advantages, b.mask, **self._constants())

    def explain(self) -> str:
        """Return the equation."""
        return _clipped("ρ", self.low, self.high, self.dual)


def _clipped(ratio: str, low: float, high: float, dual: float | None) -> str:
    loss = f"−min({ratio}A, clip({ratio}, 1 − {low:g}, 1 + {high:g})A)"
    return loss if dual is None else f"{loss}, at most −{dual:g}A where A < 0"


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
class Surrogate:
    """−ρA: PPO's surrogate with an interval of (0, ∞), that is, without a clip."""

    def __call__(self, batch: Batch) -> jax.Array:
        """Return the loss per token."""
        b = batch
        open_interval = {"clip_low": 1.0, "clip_high": float("inf")}
        return policy_losses.ppo_clip(b.logprobs, b.old_logprobs, b.advantages, b.mask, **open_interval)

    def explain(self) -> str:
        """Return the equation."""
        return "−ρA"


@dataclasses.dataclass(frozen=True)
class DecoupledClip:
    """AReaL's clip around π_old (its proximal policy), weighted by π_old/μ, see decoupled_ppo."""

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None
    weight_cap: float | None = None
    weighs_rollout: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("rollout_logprobs",)

    def __post_init__(self) -> None:
        Clip(self.low, self.high, self.dual)
        require(self.weight_cap is None or self.weight_cap > 0, f"weight_cap must be positive, got {self}")

    def __call__(self, batch: Batch) -> jax.Array:
        """Return the loss per token."""
        b = batch
        assert b.rollout_logprobs is not None
        constants = {"clip_low": self.low, "clip_high": self.high, "dual_clip": self.dual}
        return token_losses.decoupled_ppo(
            b.logprobs,
            b.old_logprobs,
            b.rollout_logprobs,
            b.advantages,
            b.mask,
            weight_cap=self.weight_cap,
            **constants,
        )

    def clipped(self, batch: Batch) -> jax.Array:
        """Return the tokens whose gradient is cut."""
        return Clip(self.low, self.high, self.dual).clipped(batch)

    def explain(self) -> str:
        """Return the equation."""
        weight = "exp(old_logprobs − rollout_logprobs)"
        weight = weight if self.weight_cap is None else f"min({weight}, {self.weight_cap:g})"
        return f"{weight} · {_clipped('ρ', self.low, self.high, self.dual)}"


@dataclasses.dataclass(frozen=True)
class CISPO(FunctionLoss):
    """A clipped weight on REINFORCE, see cispo; clip_high is the offset from 1, not the cap."""

    clip_high: float = 4.0
    clip_low: float | None = None
    function = staticmethod(token_losses.cispo)

    def explain(self) -> str:
        """Return the equation."""
        low = "" if self.clip_low is None else f"1 − {self.clip_low:g}"
        weight = f"min(ρ, 1 + {self.clip_high:g})" if not low else f"clip(ρ, {low}, 1 + {self.clip_high:g})"
        return f"−sg({weight}) A log π"


@dataclasses.dataclass(frozen=True)
class SAPO(FunctionLoss):
    """A soft gate in place of the clip, see sapo."""

    tau_pos: float = 1.0
    tau_neg: float = 1.05
    function = staticmethod(token_losses.sapo)

    def explain(self) -> str:
        """Return the equation."""
        return f"−(4/τ) σ(τ(ρ − 1)) A, τ = {self.tau_pos:g} where A > 0, else {self.tau_neg:g}"


@dataclasses.dataclass(frozen=True)
class DPPO(BehaviourLoss):
    """A trust region in the token's probability, see dppo."""

    threshold: float = 0.15
    divergence: str = "tv"
    ratio_cap: float | None = None
    function = staticmethod(token_losses.dppo)

    def explain(self) -> str:
        """Return the equation."""
        ratio = "r" if self.ratio_cap is None else f"min(r, {self.ratio_cap:g})"
        region = f"0 where the {self.divergence} of the token's probability exceeds {self.threshold:g} and would grow"
        return f"−{ratio} A, {region}, r = exp(logprobs − {self.symbol()})"


@dataclasses.dataclass(frozen=True)
class DRO(FunctionLoss):
    """REINFORCE with a quadratic pull to π_old, see dro."""

    beta: float = 1.0
    level: str = "sequence_sum"
    function = staticmethod(regularised_losses.dro)
    beside_advantage: ClassVar[bool] = True
    packs: ClassVar[bool] = True

    @property
    def modes(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A sequence's square is spread over its tokens: only a sum puts it together again."""
        return SUMS if self.level == "sequence_sum" else FunctionLoss.modes

    def explain(self) -> str:
        """Return the equation."""
        return f"−(A log π − {self.beta:g}/2 (log ρ)²), log ρ per {self.level}"


@dataclasses.dataclass(frozen=True)
class Kimi(FunctionLoss):
    """Kimi k1.5's mirror descent step, see kimi."""

    tau: float = 0.1
    level: str = "sequence_sum"
    function = staticmethod(regularised_losses.kimi)
    beside_advantage: ClassVar[bool] = True
    packs: ClassVar[bool] = True

    @property
    def modes(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A sequence's square is spread over its tokens: only a sum puts it together again."""
        return SUMS if self.level == "sequence_sum" else FunctionLoss.modes

    def explain(self) -> str:
        """Return the equation."""
        return f"−(A log π − {self.tau:g}/2 (log ρ)²), log ρ per {self.level}"


@dataclasses.dataclass(frozen=True)
class ClipCov(FunctionLoss):
    """PPO's clip without a few tokens of high covariance, see clip_cov; drawn by batch.noise where there is one."""

    fraction: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    over_batch: ClassVar[bool] = True

    @staticmethod
    def function(*arrays: Any, **constants: Any) -> jax.Array:
        """See clip_cov."""
        return covariance_losses.clip_cov(*arrays, **constants)

    def __call__(self, batch: Batch) -> jax.Array:
        """Return the loss per token."""
        b = batch
        return self.function(b.logprobs, b.old_logprobs, b.advantages, b.mask, b.noise, **self.constants())

    def clipped(self, batch: Batch) -> jax.Array:
        """Return the tokens whose gradient the clip cuts."""
        return Clip(self.clip_low, self.clip_high).clipped(batch)

    def explain(self) -> str:
        """Return the equation."""
        dropped = f"0 for {self.fraction:g} of the tokens, with {self.cov_low:g} < cov(A, log π) < {self.cov_high:g}"
        return f"{_clipped('ρ', self.clip_low, self.clip_high, None)}, {dropped}"


@dataclasses.dataclass(frozen=True)
class KLCov(FunctionLoss):
    """An unclipped ratio with a penalty on the tokens of highest covariance, see kl_cov."""

    fraction: float = 2e-4
    coef: float = 1.0
    function = staticmethod(covariance_losses.kl_cov)
    beside_advantage: ClassVar[bool] = True
    over_batch: ClassVar[bool] = True

    def explain(self) -> str:
        """Return the equation."""
        return f"−ρA, + {self.coef:g} |log ρ| for the {self.fraction:g} of the tokens with the largest cov(A, log π)"


@dataclasses.dataclass(frozen=True)
class PositiveExample:
    """coef · −log π on the tokens of answers that earned the reward (batch.correct): VAPO's language-model loss."""

    coef: float = 0.1
    beside_advantage: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("correct",)

    def __post_init__(self) -> None:
        require(self.coef >= 0, f"coef must not be negative, got {self}")

    def __call__(self, batch: Batch) -> jax.Array:
        """Return the loss per token."""
        logprobs = jax.numpy.asarray(batch.logprobs)
        assert batch.correct is not None
        weight = jax.numpy.asarray(batch.correct).astype(logprobs.dtype) * self.coef
        return policy_losses.reinforce(logprobs, weight, batch.mask)

    def explain(self) -> str:
        """Return the equation."""
        return f"−{self.coef:g} log π where correct"


@dataclasses.dataclass(frozen=True)
class Sum:
    """Several losses added up, each with what it reads."""

    losses: tuple[Any, ...]

    def __post_init__(self) -> None:
        require(len(self.losses) > 0, "a Sum must have a loss")

    def __call__(self, batch: Batch) -> jax.Array:
        """Return the loss per token."""
        first, *others = (loss(batch) for loss in self.losses)
        for other in others:
            first = first + other
        return first

    @property
    def reads(self) -> tuple[str, ...]:
        """Fields that one of them reads."""
        return tuple(dict.fromkeys(name for loss in self.losses for name in read_by(loss)))

    @property
    def sequence(self) -> bool:
        """Whether one of them is of the whole sequence."""
        return any(getattr(loss, "sequence", False) for loss in self.losses)

    @property
    def over_batch(self) -> bool:
        """Whether one of them has a statistic of the batch."""
        return any(getattr(loss, "over_batch", False) for loss in self.losses)

    @property
    def beside_advantage(self) -> bool:
        """Whether one of them has a gradient where the advantage is 0."""
        return any(getattr(loss, "beside_advantage", False) for loss in self.losses)

    @property
    def weighs_rollout(self) -> bool:
        """Whether one of them weighs by the rollout's probabilities."""
        return any(getattr(loss, "weighs_rollout", False) for loss in self.losses)

    @property
    def modes(self) -> tuple[str, ...]:
        """Aggregations that suit all of them."""
        every = (getattr(loss, "modes", FunctionLoss.modes) for loss in self.losses)
        return tuple(sorted(set(FunctionLoss.modes).intersection(*every)))

    def explain(self) -> str:
        """Return the equations."""
        return " + ".join(f"[{describe(loss)}]" for loss in self.losses)
