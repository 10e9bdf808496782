"""Advantage estimators as components: called with Rollouts, they return advantages per token, for a critic returns."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from rl_fn._numerics import AT_LEAST_ONE, NOT_NEGATIVE, Array, Number, as_float, require
from rl_fn.advantages import baselines, group, passk, whitened
from rl_fn.advantages.returns import Advantages
from rl_fn.objectives.batch import Rollouts, counted, on_every_token, rewards_of
from rl_fn.objectives.components.component import (
    Component,
    check_function,
    check_numbers,
    check_once,
    constants_of,
    shown,
)


class Advantage(Component):
    """An estimator called with Rollouts; advantages are per token, zero where masked and where not valid.

    required_fields: what it reads of Rollouts beyond the mask. rewards_shape: of the rewards.
    per_token: advantages may differ inside a completion. critic: it reads values and gives a critic its returns.
    token_rewards: it takes Rollouts.token_rewards in place of rewards.
    takes_penalty: Rollouts.penalties are taken off what it reads. accepts_packed: it takes Rollouts.segment_ids.
    nonnegative_rewards: its formula turns advantages round where a group's mean reward is negative.
    takes_valid: what Rollouts.valid leaves out has advantage 0 and changes nothing for the others.
    takes_group_ids: it takes Rollouts.group_ids, or compares nothing within groups.
    """

    slots = ("advantage",)
    required_fields: tuple[str, ...] = ("rewards",)
    rewards_shape: str = "*batch G"
    per_token: bool = True
    critic: bool = False
    token_rewards: bool = False
    takes_penalty: bool = False
    nonnegative_rewards: bool = False
    accepts_packed: bool = False
    takes_valid: bool = False
    takes_group_ids: bool = False

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
    takes_valid = True
    takes_group_ids = True

    def __post_init__(self) -> None:
        # The function's own checks of its hyper-parameters, when the component is made and not at the first rollout.
        if constants := constants_of(self):
            row = jax.ShapeDtypeStruct((1, 8), jnp.float32)
            check_once(self, lambda: jax.eval_shape(lambda r: type(self).function(r, **constants), row))

    def per_completion(self, rollouts: Rollouts) -> jax.Array:
        """Return the advantage per completion."""
        of = {"valid": rollouts.valid, "group_ids": rollouts.group_ids}
        return type(self).function(rewards_of(rollouts), **of, **constants_of(self))

    def per_token_advantages(self, rollouts: Rollouts) -> jax.Array:
        """Return the completion's advantage on each of its tokens."""
        return on_every_token(self.per_completion(rollouts), counted(rollouts))


@dataclasses.dataclass(frozen=True)
class CustomAdvantage(PerCompletion):
    """Any function of rewards `*batch G` that returns one number per completion.

    A function with a parameter named valid gets Rollouts.valid by this name: `*batch G`, or None where all are.
    """

    of_rewards: Callable[..., jax.Array]
    takes_group_ids = False

    def __post_init__(self) -> None:
        """Nothing more is known of the function before it is called."""
        check_function("of_rewards", self.of_rewards, "a function of rewards", Advantage.slots)

    @property
    def takes_valid(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the function has a parameter of this name."""
        try:
            parameter = inspect.signature(self.of_rewards).parameters.get("valid")
        except (TypeError, ValueError):  # builtins without a signature
            return False
        return parameter is not None and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)

    def per_completion(self, rollouts: Rollouts) -> jax.Array:
        """Return the advantage per completion."""
        of = {"valid": rollouts.valid} if self.takes_valid else {}
        return self.of_rewards(rewards_of(rollouts), **of)

    def explain(self) -> str:
        """Return the function's name."""
        return getattr(self.of_rewards, "__name__", repr(self.of_rewards))


@dataclasses.dataclass(frozen=True)
class GRPOAdvantage(PerCompletion):
    """(r − mean)/(std + eps) in each group, see grpo_advantages; Dr. GRPO's with scale "none"."""

    scale: str = "group"
    eps: Number = 1e-6
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

    baseline: Number = 0.0
    equation = "r − {baseline}"

    @staticmethod
    def function(rewards: Array, *, baseline: Number, **unread: Any) -> jax.Array:
        """Return r − b."""
        return as_float(rewards)[0] - baseline


@dataclasses.dataclass(frozen=True)
class GPGAdvantage(PerCompletion):
    """Centred rewards scaled up for the completions without a gradient, see gpg_advantages."""

    norm: Number = 1.0
    alpha: str = "informative"
    function = staticmethod(baselines.gpg_advantages)

    @property
    def equation(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """With α where there is one."""
        plain = "(r − mean)/{norm}"
        return plain if self.alpha == "none" else f"α {plain}, α = completions / {{alpha}} completions of the batch"


@dataclasses.dataclass(frozen=True)
class MaxRLAdvantage(PerCompletion):
    """(r − mean)/mean of rewards ≥ 0, see maxrl_advantages."""

    takes_penalty = False
    nonnegative_rewards = True
    function = staticmethod(baselines.maxrl_advantages)
    equation = "(r − mean)/mean, 0 where the mean is 0"


@dataclasses.dataclass(frozen=True)
class PassKAdvantage(PerCompletion):
    """The reward of the best of k completions, over all sets of k, see passk_analytic_advantages."""

    k: int = 4
    function = staticmethod(passk.passk_analytic_advantages)
    equation = "(mean R of the sets of {k} with the completion − mean R)/(std of R), R = the set's best r"

    def __post_init__(self) -> None:
        # More than a group's size is refused at the call.
        check_numbers(AT_LEAST_ONE, k=self.k)


@dataclasses.dataclass(frozen=True)
class GRPOPassKAdvantage(PerCompletion):
    """Only the best completion learns, by its lead over the second best, see passk_advantages."""

    scale: bool = True
    eps: Number = 1e-6
    function = staticmethod(passk.passk_advantages)

    @property
    def equation(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Divided by the std or not."""
        return f"{'(r₁ − r₂)/(std + {eps})' if self.scale else 'r₁ − r₂'} for the group's best, else 0"


@dataclasses.dataclass(frozen=True)
class OPOAdvantage(PerCompletion):
    """The mean reward weighted by length is the baseline, see opo_advantages."""

    equation = "r − Σ l r / Σ l, l = tokens of the completion"

    def per_completion(self, rollouts: Rollouts) -> jax.Array:
        """Return the advantage per completion."""
        lengths = jnp.sum(counted(rollouts), axis=-1, dtype=jnp.int32)
        return baselines.opo_advantages(rewards_of(rollouts), lengths, rollouts.valid, group_ids=rollouts.group_ids)


@dataclasses.dataclass(frozen=True)
class ReMaxAdvantage(PerCompletion):
    """The reward of the greedy completion is the baseline, see remax_advantages."""

    required_fields = ("rewards", "greedy_rewards")
    equation = "r − r(greedy)"

    def per_completion(self, rollouts: Rollouts) -> jax.Array:
        """Return the advantage per completion."""
        assert rollouts.greedy_rewards is not None
        return baselines.remax_advantages(rewards_of(rollouts), rollouts.greedy_rewards, rollouts.valid)


@dataclasses.dataclass(frozen=True)
class GDPOAdvantage(PerCompletion):
    """Each of R rewards normalised in its group, their weighted sum over the batch, see gdpo_advantages."""

    weights: tuple[Number, ...] | None = None
    eps: Number = 1e-6
    rewards_shape = "*batch R G"
    takes_penalty = False

    def __post_init__(self) -> None:
        check_numbers(NOT_NEGATIVE, eps=self.eps)

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
