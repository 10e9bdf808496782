"""Policy losses as components, each named after its algorithm."""

import dataclasses

import jax
import jax.numpy as jnp

from rl_fn._numerics import NOT_NEGATIVE, Array, Number, numbers
from rl_fn.objectives.batch import Batch
from rl_fn.objectives.components.component import BehaviourLoss, FunctionLoss, Several
from rl_fn.policy_losses import covariance, ppo, regularised, token_level
from rl_fn.policy_losses import sequence_level as by_sequence

SUMS = ("token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm")
# Every token holds its sequence's loss: what a mean over tokens would weight by length once more.
BY_SEQUENCE = ("seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def clip_equation(ratio: str, dual_clip: Number | None) -> str:
    """Return PPO's clip on a ratio, to be filled with the constants."""
    bound = "" if dual_clip is None else ", at most −{dual_clip}A where A < 0"
    return f"−min({ratio}A, clip({ratio}, 1 − {{clip_low}}, 1 + {{clip_high}})A){bound}"


@dataclasses.dataclass(frozen=True)
class Reinforce(FunctionLoss):
    """−A log π, see reinforce."""

    function = staticmethod(ppo.reinforce)
    reads = ("logprobs", "advantages", "mask")
    equation = "−A log π"


@dataclasses.dataclass(frozen=True)
class PPOClip(FunctionLoss):
    """PPO's clipped loss, see ppo_clip."""

    clip_low: Number = 0.2
    clip_high: Number = 0.2
    dual_clip: Number | None = None
    function = staticmethod(ppo.ppo_clip)

    @property
    def equation(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """PPO's clip on ρ."""
        return clip_equation("ρ", self.dual_clip)

    def clipped(self, batch: Batch) -> jax.Array | None:
        """Return the tokens whose gradient is cut."""
        clips = {name: getattr(self, name) for name in ("clip_low", "clip_high", "dual_clip")}
        return ppo.clipped_tokens(batch.logprobs, batch.old_logprobs, batch.advantages, batch.mask, **clips)


@dataclasses.dataclass(frozen=True)
class Surrogate(FunctionLoss):
    """−ρA: PPO's surrogate with an interval of (0, ∞), that is, without a clip."""

    equation = "−ρA"

    @staticmethod
    def function(*arrays: Array) -> jax.Array:
        """See ppo_clip."""
        return ppo.ppo_clip(*arrays, clip_low=1.0, clip_high=float("inf"))


@dataclasses.dataclass(frozen=True)
class DecoupledPPO(PPOClip):
    """AReaL's clip around π_old (its proximal policy), weighted by π_old/μ, see decoupled_ppo."""

    weight_cap: Number | None = None
    function = staticmethod(token_level.decoupled_ppo)
    weighs_rollout = True
    reads = ("logprobs", "old_logprobs", "rollout_logprobs", "advantages", "mask")
    required_fields = ("rollout_logprobs",)

    @property
    def equation(self) -> str:
        """PPO's clip with a weight."""
        weight = "exp(old_logprobs − rollout_logprobs)"
        weight = weight if self.weight_cap is None else f"min({weight}, {{weight_cap}})"
        return f"{weight} · {clip_equation('ρ', self.dual_clip)}"


@dataclasses.dataclass(frozen=True)
class CISPO(FunctionLoss):
    """A clipped weight on REINFORCE, see cispo; clip_high is the offset from 1, not the cap."""

    clip_high: Number = 4.0
    clip_low: Number | None = None
    function = staticmethod(token_level.cispo)

    @property
    def equation(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Without a lower bound the clip is a minimum."""
        weight = "min(ρ, 1 + {clip_high})" if self.clip_low is None else "clip(ρ, 1 − {clip_low}, 1 + {clip_high})"
        return f"−sg({weight}) A log π"


@dataclasses.dataclass(frozen=True)
class SAPO(FunctionLoss):
    """A soft gate in place of the clip, see sapo."""

    tau_pos: Number = 1.0
    tau_neg: Number = 1.05
    function = staticmethod(token_level.sapo)
    equation = "−(4/τ) σ(τ(ρ − 1)) A, τ = {tau_pos} where A > 0, else {tau_neg}"


@dataclasses.dataclass(frozen=True)
class DPPO(BehaviourLoss):
    """A trust region in the token's probability, see dppo."""

    threshold: Number = 0.15
    divergence: str = "tv"
    ratio_cap: Number | None = None
    function = staticmethod(token_level.dppo)

    @property
    def equation(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The ratio is bare without a cap."""
        region = "0 where the {divergence} of the token's probability exceeds {threshold} and would grow"
        ratio = "r" if self.ratio_cap is None else "min(r, {ratio_cap})"
        return f"−{ratio} A, {region}, r = exp(logprobs − {{behaviour}}_logprobs)"


class QuadraticPull(FunctionLoss):
    """REINFORCE with a quadratic pull to π_old, on tokens or on sequences."""

    level: str
    segments = True
    gradient_without_advantage = True

    @property
    def modes(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A sequence's square is spread over its tokens: only a sum puts it together again."""
        return SUMS if self.level == "sequence_sum" else FunctionLoss.modes


@dataclasses.dataclass(frozen=True)
class DRO(QuadraticPull):
    """REINFORCE with a quadratic pull to π_old, see dro."""

    beta: Number = 1.0
    level: str = "sequence_sum"
    function = staticmethod(regularised.dro)
    equation = "−(A log π − {beta}/2 (log ρ)²), log ρ per {level}"


@dataclasses.dataclass(frozen=True)
class Kimi(QuadraticPull):
    """Kimi k1.5's mirror descent step, see kimi."""

    tau: Number = 0.1
    level: str = "sequence_sum"
    function = staticmethod(regularised.kimi)
    equation = "−(A log π − {tau}/2 (log ρ)²), log ρ per {level}"


@dataclasses.dataclass(frozen=True)
class ClipCov(FunctionLoss):
    """PPO's clip without a few tokens of high covariance, see clip_cov; drawn by batch.noise where there is one."""

    fraction: Number = 2e-4
    cov_low: Number = 1.0
    cov_high: Number = 5.0
    clip_low: Number = 0.2
    clip_high: Number = 0.2
    function = staticmethod(covariance.clip_cov)
    reads = (*FunctionLoss.reads, "noise")
    over_batch = True
    equation = (
        "−min(ρA, clip(ρ, 1 − {clip_low}, 1 + {clip_high})A), "
        "0 for {fraction} of the tokens, with {cov_low} < cov(A, log π) < {cov_high}"
    )

    def clipped(self, batch: Batch) -> jax.Array | None:
        """Return the tokens whose gradient the clip cuts."""
        return PPOClip(self.clip_low, self.clip_high).clipped(batch)


@dataclasses.dataclass(frozen=True)
class KLCov(FunctionLoss):
    """An unclipped ratio with a penalty on the tokens of highest covariance, see kl_cov."""

    fraction: Number = 2e-4
    coef: Number = 1.0
    function = staticmethod(covariance.kl_cov)
    gradient_without_advantage = True
    over_batch = True
    equation = "−ρA, + {coef} |log ρ| for the {fraction} of the tokens with the largest cov(A, log π)"


@dataclasses.dataclass(frozen=True)
class GSPO(FunctionLoss):
    """PPO's clip on a length-normalised ratio of the sequence, see gspo."""

    clip_low: Number = 3e-4
    clip_high: Number = 4e-4
    dual_clip: Number | None = None
    function = staticmethod(by_sequence.gspo)
    segments = True
    sequence_level = True
    modes = BY_SEQUENCE
    around = "<clip>, s = exp(mean of log ρ)"

    @property
    def equation(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """PPO's clip on s."""
        return self.around.replace("<clip>", clip_equation("s", self.dual_clip))


@dataclasses.dataclass(frozen=True)
class GSPOToken(GSPO):
    """GSPO's ratio with a gradient per token, see gspo_token."""

    function = staticmethod(by_sequence.gspo_token)
    sequence_level = False
    modes = FunctionLoss.modes
    around = "<clip>, s = sg(exp(mean of log ρ)) π/sg(π)"


@dataclasses.dataclass(frozen=True)
class LUSPO(GSPO):
    """GSPO's loss times the length, see luspo."""

    clip_low: Number = 2e-3
    clip_high: Number = 2.5e-3
    function = staticmethod(by_sequence.luspo)
    # The length is a factor already: a sum over tokens would make it the length squared.
    modes = ("seq-mean-token-mean",)
    around = "|y| · (<clip>), s = exp(mean of log ρ)"


@dataclasses.dataclass(frozen=True)
class GMPO(FunctionLoss):
    """A geometric mean of ratios that are clipped first, see gmpo; clips in nats."""

    clip_low: Number = 0.4
    clip_high: Number = 0.4
    function = staticmethod(by_sequence.gmpo)
    segments = True
    sequence_level = True
    modes = BY_SEQUENCE
    equation = "−A exp(mean of x), x = min(log ρ, {clip_high}) where A > 0, max(log ρ, −{clip_low}) where A < 0"


@dataclasses.dataclass(frozen=True)
class VESPO(BehaviourLoss):
    """REINFORCE weighted by a smooth bump in the sequence's weight, see vespo."""

    k_pos: Number = 2.0
    lambda_pos: Number = 3.0
    k_neg: Number = 3.0
    lambda_neg: Number = 2.0
    function = staticmethod(by_sequence.vespo)
    segments = True
    equation = (
        "−sg(e^λ wᵏ e^(−λw)) A log π, (k, λ) = ({k_pos}, {lambda_pos}) where A ≥ 0, else ({k_neg}, {lambda_neg}), "
        "w = exp(Σ logprobs − {behaviour}_logprobs)"
    )


@dataclasses.dataclass(frozen=True)
class TOPR(BehaviourLoss):
    """Full weight on good completions, a truncated one on bad ones, see topr."""

    level: str = "sequence_sum"
    function = staticmethod(regularised.topr)
    segments = True
    equation = (
        "−A log π where A ≥ 0, −sg(min(r, 1)) A log π where A < 0, r = exp(logprobs − {behaviour}_logprobs) per {level}"
    )


@dataclasses.dataclass(frozen=True)
class PositiveExample(FunctionLoss):
    """coef · −log π on the tokens of completions that earned the reward (batch.correct): VAPO's language-model loss."""

    coef: Number = 0.1
    reads = ("logprobs", "correct", "mask")
    gradient_without_advantage = True
    required_fields = ("correct",)
    equation = "−{coef} log π where correct"

    @staticmethod
    def function(logprobs: Array, correct: Array, mask: Array, *, coef: Number) -> jax.Array:
        """−coef · log π where correct."""
        logprobs = jnp.asarray(logprobs)
        (weight,) = numbers(logprobs.dtype, NOT_NEGATIVE, coef=coef)
        return ppo.reinforce(logprobs, jnp.asarray(correct).astype(logprobs.dtype) * weight, mask)


@dataclasses.dataclass(frozen=True)
class Sum(Several):
    """Several losses added up."""

    slots = ("loss",)

    def __call__(self, batch: Batch) -> jax.Array:
        """Return the loss per token."""
        first, *others = (loss(batch) for loss in self.parts)
        for other in others:
            first = first + other
        return first

    def explain(self) -> str:
        """Return the equations."""
        return " + ".join(f"[{loss.explain()}]" for loss in self.parts)
