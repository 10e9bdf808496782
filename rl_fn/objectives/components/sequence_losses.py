"""Policy losses as pieces, of the kind that has one ratio for a whole sequence."""

import dataclasses
from typing import ClassVar

from rl_fn.objectives.components.base import BehaviourLoss, FunctionLoss
from rl_fn.policy_losses import regularised as regularised_losses
from rl_fn.policy_losses import sequence_level as sequence_losses

# Every token holds its sequence's loss: what a mean over tokens would weight by length once more.
BY_SEQUENCE = ("seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def _clipped(ratio: str, low: float, high: float, dual: float | None) -> str:
    bound = "" if dual is None else f", at most −{dual:g}A where A < 0"
    return f"−min({ratio}A, clip({ratio}, 1 − {low:g}, 1 + {high:g})A){bound}"


@dataclasses.dataclass(frozen=True)
class GSPO(FunctionLoss):
    """PPO's clip on a length-normalised ratio of the sequence, see gspo."""

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    dual_clip: float | None = None
    function = staticmethod(sequence_losses.gspo)
    packs: ClassVar[bool] = True
    sequence: ClassVar[bool] = True
    modes: ClassVar[tuple[str, ...]] = BY_SEQUENCE

    def explain(self) -> str:
        """Return the equation."""
        return f"{_clipped('s', self.clip_low, self.clip_high, self.dual_clip)}, s = exp(mean of log ρ)"


@dataclasses.dataclass(frozen=True)
class GSPOToken(FunctionLoss):
    """GSPO's ratio with a gradient per token, see gspo_token."""

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    dual_clip: float | None = None
    function = staticmethod(sequence_losses.gspo_token)
    packs: ClassVar[bool] = True

    def explain(self) -> str:
        """Return the equation."""
        ratio = "s = sg(exp(mean of log ρ)) π/sg(π)"
        return f"{_clipped('s', self.clip_low, self.clip_high, self.dual_clip)}, {ratio}"


@dataclasses.dataclass(frozen=True)
class LUSPO(FunctionLoss):
    """GSPO's loss times the length, see luspo."""

    clip_low: float = 2e-3
    clip_high: float = 2.5e-3
    dual_clip: float | None = None
    function = staticmethod(sequence_losses.luspo)
    packs: ClassVar[bool] = True
    sequence: ClassVar[bool] = True
    # The length is a factor already: a sum over tokens would make it the length squared.
    modes: ClassVar[tuple[str, ...]] = ("seq-mean-token-mean",)

    def explain(self) -> str:
        """Return the equation."""
        loss = _clipped("s", self.clip_low, self.clip_high, self.dual_clip)
        return f"|y| · ({loss}), s = exp(mean of log ρ)"


@dataclasses.dataclass(frozen=True)
class GMPO(FunctionLoss):
    """A geometric mean of ratios that are clipped first, see gmpo; clips in nats."""

    clip_low: float = 0.4
    clip_high: float = 0.4
    function = staticmethod(sequence_losses.gmpo)
    packs: ClassVar[bool] = True
    sequence: ClassVar[bool] = True
    modes: ClassVar[tuple[str, ...]] = BY_SEQUENCE

    def explain(self) -> str:
        """Return the equation."""
        clipped = f"min(log ρ, {self.clip_high:g}) where A > 0, max(log ρ, −{self.clip_low:g}) where A < 0"
        return f"−A exp(mean of x), x = {clipped}"


@dataclasses.dataclass(frozen=True)
class VESPO(BehaviourLoss):
    """REINFORCE weighted by a smooth bump in the sequence's weight, see vespo."""

    k_pos: float = 2.0
    lambda_pos: float = 3.0
    k_neg: float = 3.0
    lambda_neg: float = 2.0
    function = staticmethod(sequence_losses.vespo)
    packs: ClassVar[bool] = True

    def explain(self) -> str:
        """Return the equation."""
        pairs = f"({self.k_pos:g}, {self.lambda_pos:g}) where A ≥ 0, else ({self.k_neg:g}, {self.lambda_neg:g})"
        weight = f"w = exp(Σ logprobs − {self.symbol()})"
        return f"−sg(e^λ wᵏ e^(−λw)) A log π, (k, λ) = {pairs}, {weight}"


@dataclasses.dataclass(frozen=True)
class TOPR(BehaviourLoss):
    """Full weight on good answers, a truncated one on bad ones, see topr."""

    level: str = "sequence_sum"
    function = staticmethod(regularised_losses.topr)
    packs: ClassVar[bool] = True

    def explain(self) -> str:
        """Return the equation."""
        ratio = f"r = exp(logprobs − {self.symbol()}) per {self.level}"
        return f"−A log π where A ≥ 0, −sg(min(r, 1)) A log π where A < 0, {ratio}"
