"""The pieces around the policy loss: how it is averaged, KL and entropy terms, the critic's loss."""

import dataclasses

import jax

from rl_fn import aggregation, value_losses
from rl_fn._numerics import Array, require
from rl_fn.divergences import estimators as divergences
from rl_fn.objectives.batch import Batch

KL_ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k3+")


@dataclasses.dataclass(frozen=True)
class Aggregation:
    """How per-token values become one number: a mode of aggregate_parts, and Dr. GRPO's token budget."""

    mode: str
    max_completion_length: float | None = None

    def __post_init__(self) -> None:
        require(self.mode in aggregation.MODES, f"mode must be one of {aggregation.MODES}, got {self.mode!r}")
        norm = self.mode == "seq-mean-token-sum-norm"
        remedy = (
            "give Dr. GRPO's max_completion_length (the generation budget in tokens) with seq-mean-token-sum-norm only"
        )
        require(
            norm == (self.max_completion_length is not None),
            f"need a max_completion_length that fits the mode: {remedy}; got {self}",
        )
        require(
            self.max_completion_length is None or self.max_completion_length > 0,
            f"the max_completion_length must be positive, got {self.max_completion_length}",
        )

    def __call__(self, x: Array, mask: Array, segment_ids: Array | None) -> aggregation.Ratio:
        """Return the undivided aggregate."""
        return aggregation.aggregate_parts(
            x, mask, self.mode, max_completion_length=self.max_completion_length, segment_ids=segment_ids
        )

    def explain(self) -> str:
        """Return the mode and its max_completion_length."""
        return self.mode if self.max_completion_length is None else f"{self.mode} / {self.max_completion_length:g}"


@dataclasses.dataclass(frozen=True)
class KL:
    """coef · KL(π‖π_ref) in the loss; "k1+" and "k3+" have the value of k1 and k3 with the gradient of k2."""

    estimator: str = "k3"
    coef: float = 0.0

    def __post_init__(self) -> None:
        require(self.estimator in KL_ESTIMATORS, f"estimator must be one of {KL_ESTIMATORS}, got {self.estimator!r}")
        require(self.coef >= 0, f"the KL coefficient must not be negative, got {self.coef}")

    def estimate(self, batch: Batch) -> jax.Array:
        """Return the estimate per token, without the coefficient."""
        assert batch.ref_logprobs is not None
        name = self.estimator.removesuffix("+")
        value = getattr(divergences, f"kl_{name}")(batch.logprobs, batch.ref_logprobs, batch.mask)
        if name == self.estimator:
            return value
        k2 = divergences.kl_k2(batch.logprobs, batch.ref_logprobs, batch.mask)
        return divergences.kl_straight_through(value, k2)

    def explain(self) -> str:
        """Return the equation."""
        value = {"k1": "d", "k2": "d²/2", "k3": "e^(−d) + d − 1", "abs": "|d|"}[self.estimator.removesuffix("+")]
        gradient = " (gradient of d²/2)" if self.estimator.endswith("+") else ""
        return f"{value}{gradient}, d = logprobs − ref_logprobs"


@dataclasses.dataclass(frozen=True)
class Entropy:
    """coef · H is subtracted from the loss, see entropy_bonus."""

    coef: float

    def __post_init__(self) -> None:
        require(self.coef >= 0, f"the entropy coefficient must not be negative, got {self.coef}")


@dataclasses.dataclass(frozen=True)
class ValueLoss:
    """The critic's squared error, see value_loss; with `clip` the worse of V and V held near V_old, see value_clip."""

    clip: float | None = None

    def __post_init__(self) -> None:
        require(self.clip is None or self.clip > 0, f"clip must be positive, got {self.clip}")

    @property
    def reads(self) -> tuple[str, ...]:
        """Fields of the batch that the critic's step needs."""
        return ("values", "returns") if self.clip is None else ("values", "returns", "old_values")

    def __call__(self, batch: Batch) -> jax.Array:
        """Return the loss per token."""
        values, returns = batch.values, batch.returns
        assert values is not None and returns is not None
        if self.clip is None:
            return value_losses.value_loss(values, returns, batch.mask)
        assert batch.old_values is not None
        return value_losses.value_clip(values, batch.old_values, returns, batch.mask, clip=self.clip)

    def explain(self) -> str:
        """Return the equation."""
        if self.clip is None:
            return "(V − R)²"
        return f"max((V − R)², (clip(V, V_old − {self.clip:g}, V_old + {self.clip:g}) − R)²)"
