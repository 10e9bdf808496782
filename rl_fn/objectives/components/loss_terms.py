"""The components around the policy loss: aggregation, KL and entropy terms, the critic's loss, dynamic sampling."""

import dataclasses

import jax
import jax.numpy as jnp

from rl_fn import aggregation, rewards, value_losses
from rl_fn._numerics import NOT_NEGATIVE, POSITIVE, Array, Number, require
from rl_fn.divergences import estimators as divergences
from rl_fn.objectives.batch import Batch, Rollouts
from rl_fn.objectives.components.component import Component, check_numbers, check_once, constants_of

KL_ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k3+")
KL_EQUATIONS = {"k1": "d", "k2": "d²/2", "k3": "e^(−d) + d − 1", "abs": "|d|"}


@dataclasses.dataclass(frozen=True)
class Aggregation(Component):
    """How per-token values become one number: a mode of aggregate_parts, and Dr. GRPO's token budget."""

    mode: str
    max_completion_length: Number | None = None
    accepts_packed = True

    def __post_init__(self) -> None:
        require(self.mode in aggregation.MODES, f"mode must be one of {aggregation.MODES}, got {self.mode!r}")
        remedy = "give the generation budget in tokens with seq-mean-token-sum-norm (Dr. GRPO), and with it only"
        normed = self.mode == "seq-mean-token-sum-norm"
        given = f"mode {self.mode!r} and max_completion_length {self.max_completion_length}"
        fits = normed == (self.max_completion_length is not None)
        require(fits, f"need a max_completion_length that fits the mode: {remedy}; got {given}")
        # Shapes, for an array would start a backend where a module makes an objective as it is imported.
        x, mask = jax.ShapeDtypeStruct((1, 1, 1), jnp.float32), jax.ShapeDtypeStruct((1, 1, 1), jnp.bool_)
        check_once(self, lambda: jax.eval_shape(lambda x, mask: Aggregation.__call__(self, x, mask, None), x, mask))

    def __call__(self, x: Array, mask: Array, segment_ids: Array | None) -> aggregation.Ratio:
        """Return the undivided aggregate."""
        return aggregation.aggregate_parts(
            x, mask, self.mode, max_completion_length=self.max_completion_length, segment_ids=segment_ids
        )

    @property
    def equation(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The mode and its max_completion_length."""
        return "{mode}" if self.max_completion_length is None else "{mode} / {max_completion_length}"


@dataclasses.dataclass(frozen=True)
class KL(Component):
    """coef · KL(π‖π_ref) in the loss; "k1+" and "k3+" have the value of k1 and k3 with the gradient of k2."""

    estimator: str = "k3"
    coef: Number = 0.0
    required_fields = ("ref_logprobs",)

    def __post_init__(self) -> None:
        require(self.estimator in KL_ESTIMATORS, f"estimator must be one of {KL_ESTIMATORS}, got {self.estimator!r}")
        check_numbers(NOT_NEGATIVE, **{"kl.coef": self.coef})

    def estimate(self, batch: Batch) -> jax.Array:
        """Return the estimate per token, without the coefficient."""
        assert batch.ref_logprobs is not None
        name = self.estimator.removesuffix("+")
        value = getattr(divergences, f"kl_{name}")(batch.logprobs, batch.ref_logprobs, batch.mask)
        if name == self.estimator:
            return value
        k2 = divergences.kl_k2(batch.logprobs, batch.ref_logprobs, batch.mask)
        return divergences.kl_straight_through(value, k2)

    @property
    def equation(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The estimator of d."""
        gradient = " (gradient of d²/2)" if self.estimator.endswith("+") else ""
        return f"{KL_EQUATIONS[self.estimator.removesuffix('+')]}{gradient}, d = logprobs − ref_logprobs"


@dataclasses.dataclass(frozen=True)
class EntropyBonus(Component):
    """coef · H is subtracted from the loss, see entropy_bonus."""

    coef: Number
    required_fields = ("entropies",)
    equation = "−{coef}·H"

    def __post_init__(self) -> None:
        check_numbers(NOT_NEGATIVE, **{"entropy.coef": self.coef})


@dataclasses.dataclass(frozen=True)
class ValueLoss(Component):
    """The critic's squared error, see value_loss; with `clip` the worse of V and V held near V_old, see value_clip."""

    clip: Number | None = None

    def __post_init__(self) -> None:
        check_numbers(POSITIVE, clip=self.clip)

    @property
    def required_fields(self) -> tuple[str, ...]:
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

    @property
    def equation(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The squared error, clipped or not."""
        return "(V − R)²" if self.clip is None else "max((V − R)², (clip(V, V_old − {clip}, V_old + {clip}) − R)²)"


@dataclasses.dataclass(frozen=True)
class DynamicSampling(Component):
    """DAPO's: groups without a signal are not trained on, and the denominator does not count them, see group_filter.

    Kept are groups whose rewards are not all equal and whose mean lies strictly between low and high, where given.
    """

    low: Number | None = None
    high: Number | None = None

    def kept(self, rollouts: Rollouts) -> jax.Array:
        """Return `*batch G`: whether the completion's group is trained on."""
        assert rollouts.rewards is not None
        bounds = {name: bound for name, bound in constants_of(self).items() if bound is not None}
        return rewards.group_filter(rollouts.rewards, rollouts.valid, **bounds, group_ids=rollouts.group_ids)

    @property
    def equation(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The groups that are kept."""
        low, high = ("" if self.low is None else "{low} < "), ("" if self.high is None else " < {high}")
        return "groups whose rewards differ" + (f", {low}mean r{high}" if low or high else "")
