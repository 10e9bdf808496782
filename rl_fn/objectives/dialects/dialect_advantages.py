"""Advantages as other libraries compute them: their order of baseline, clip, KL and whitening, their group of one."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from rl_fn._numerics import Array, as_float, as_mask, deviations, divide, require, sqrt, variance
from rl_fn.advantages import baselines
from rl_fn.advantages import group as group_advantages
from rl_fn.advantages.returns import Advantages, discounted_returns, gae, whiten
from rl_fn.aggregation import masked_var
from rl_fn.objectives.batch import Rollouts, on_every_token, on_last_token
from rl_fn.objectives.components import GAE, Advantage

VERL = (
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
)
OPENRLHF_GROUPED = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")
OPENRLHF = ("reinforce", "flash_reinforce", *OPENRLHF_GROUPED)
NEMO_RL = ("grpo", "reinforce_plus_plus")


class DialectAdvantage(Advantage):
    """An estimator of one reward per completion and a penalty β · kl per token, in groups that are all there."""

    takes_penalty = True

    def per_token_advantages(self, rollouts: Rollouts) -> jax.Array:
        """Return the advantage per token, zero where masked."""
        assert rollouts.rewards is not None
        mask = as_mask(rollouts.mask)
        none = jnp.zeros(mask.shape, jnp.float32)
        rewards, cost = as_float(rollouts.rewards, none if rollouts.penalties is None else rollouts.penalties)
        return self.estimate(rewards, cost, mask)

    def estimate(self, r: jax.Array, cost: jax.Array, counted: jax.Array) -> jax.Array:
        """Return the advantage per token from rewards, penalties and the mask."""
        raise NotImplementedError


def normalise(x: jax.Array, mask: jax.Array, *, divide_by_std: bool = True) -> jax.Array:
    """(x − mean)/√max(var, 1e-8) over all counted tokens, var of the population (÷ n); zero where masked."""
    _, deviation, count = deviations(x, mask)
    if not divide_by_std:
        return deviation
    return deviation / jnp.sqrt(jnp.maximum(variance(deviation, count, None, 0), 1e-8))


@dataclasses.dataclass(frozen=True)
class VerlAdvantage(DialectAdvantage):
    """verl's estimators of outcome rewards. A group of one keeps its reward, except with rloo_vectorized."""

    estimator: str
    scale: bool = True
    gamma: float = 1.0

    def estimate(self, r: jax.Array, cost: jax.Array, counted: jax.Array) -> jax.Array:
        """Return the advantage per token, zero where masked."""
        if self.estimator == "reinforce_plus_plus":
            returns = discounted_returns(on_last_token(r, counted) - cost, counted, gamma=self.gamma)
            return whiten(returns, counted)
        r = r - jnp.sum(cost, axis=-1)
        tokens = on_every_token(self._per_completion(r, counted), counted)
        return whiten(tokens, counted) if self.estimator == "reinforce_plus_plus_baseline" else tokens

    def _per_completion(self, r: jax.Array, counted: jax.Array) -> jax.Array:
        name, alone = self.estimator, r.shape[-1] == 1
        if name == "gpg":
            share = divide(jnp.asarray(r.size, r.dtype), jnp.maximum(jnp.sum(r != 0, dtype=r.dtype), 1.0))
            return share * r if alone else baselines.gpg_advantages(r, alpha="none") * share
        if name == "grpo_passk":
            require(not alone, f"verl's {name} needs groups of at least 2, got rewards of shape {r.shape}")
            return self._best_only(r)
        if name == "rloo_vectorized":
            return jnp.zeros_like(r) if alone else group_advantages.rloo_advantages(r)
        if alone:
            return r / (1.0 + 1e-6) if name.startswith("grpo") and self.scale else r
        if name == "rloo":
            return group_advantages.rloo_advantages(r)
        if name == "opo":
            return baselines.opo_advantages(r, jnp.sum(counted, axis=-1, dtype=r.dtype))
        scale = "group" if self.scale and name != "reinforce_plus_plus_baseline" else "none"
        return group_advantages.grpo_advantages(r, scale=scale, eps=1e-6)

    def _best_only(self, r: jax.Array) -> jax.Array:
        first, second = (jax.lax.top_k(r, 2)[0][..., i : i + 1] for i in (0, 1))
        gap = first - second
        if self.scale:
            _, deviation, count = deviations(r, jnp.ones(r.shape, bool), axis=-1)
            gap = gap / (sqrt(variance(deviation, count, -1)) + 1e-6)
        best = jax.nn.one_hot(jnp.argmax(r, axis=-1), r.shape[-1], dtype=r.dtype)
        return best * gap

    def explain(self) -> str:
        """Return the estimator's name in verl."""
        scale = " without the std" if self.estimator.startswith("grpo") and not self.scale else ""
        return f"verl's {self.estimator}{scale}"


@dataclasses.dataclass(frozen=True)
class OpenRLHFAdvantage(DialectAdvantage):
    """OpenRLHF's estimators without a critic: baseline, clip, then a KL whose later tokens count against earlier ones.

    Returns decay over every position, masked ones included. There is no whitening for rloo, group_norm and dr_grpo.
    """

    estimator: str
    gamma: float = 1.0
    divide_by_std: bool = True
    clip_range: tuple[float, float] = (-10.0, 10.0)

    def estimate(self, r: jax.Array, cost: jax.Array, counted: jax.Array) -> jax.Array:
        """Return the advantage per token, zero where masked."""
        grouped = self.estimator in OPENRLHF_GROUPED
        require(not grouped or r.shape[-1] > 1, f"OpenRLHF's {self.estimator} needs n_samples_per_prompt > 1")
        if self.estimator == "rloo":
            r = group_advantages.rloo_advantages(r)
        elif self.estimator == "flash_reinforce":
            r = deviations(r, jnp.ones(r.shape, bool))[1]
        elif grouped:
            scale = "group" if self.estimator == "group_norm" else "none"
            r = group_advantages.grpo_advantages(r, scale=scale, eps=1e-9)
        token = on_last_token(jnp.clip(r, *self.clip_range), counted) - cost
        everywhere = jnp.ones(counted.shape, bool)
        gamma = self.gamma if self.estimator == "reinforce" else 1.0
        returns = discounted_returns(token, everywhere, gamma=gamma)
        if self.estimator in ("reinforce", "reinforce_baseline"):
            return normalise(returns, counted, divide_by_std=self.divide_by_std)
        return jnp.where(counted, returns, 0.0)

    def explain(self) -> str:
        """Return the estimator's name in OpenRLHF."""
        return f"OpenRLHF's {self.estimator}, rewards clipped into {self.clip_range}"


@dataclasses.dataclass(frozen=True)
class BiasedGAE(GAE):
    """GAE normalised by the standard deviation of the population; `carry` as rl_fn, else masked tokens count as zeros.

    Without `carry` the recursion passes through masked positions, so that a hole in the mask changes what is before it.
    """

    carry: bool = True
    divide_by_std: bool = True

    def estimate(self, rewards: Array, values: Array, mask: Array, segment_ids: Array | None) -> Advantages:
        """Return advantages and returns per token, zero where masked."""
        counted = as_mask(mask)
        r, v = (jnp.where(counted, x, 0.0) for x in as_float(rewards, values))
        through = counted if self.carry else jnp.ones(counted.shape, bool)
        out = gae(r, v, through, gamma=self.gamma, lam=self.lam, segment_ids=segment_ids)
        returns = jnp.where(counted, out.returns, 0.0)
        if not self.whiten:
            return Advantages(jnp.where(counted, out.advantages, 0.0), returns)
        return Advantages(normalise(out.advantages, counted, divide_by_std=self.divide_by_std), returns)


@dataclasses.dataclass(frozen=True)
class NeMoRLAdvantage(DialectAdvantage):
    """NeMo-RL's group baseline (with or without the completion itself) and its REINFORCE++."""

    estimator: str = "grpo"
    scale: bool = True
    leave_one_out: bool = True
    minus_baseline: bool = True

    def estimate(self, r: jax.Array, cost: jax.Array, counted: jax.Array) -> jax.Array:
        """Return the advantage per token, zero where masked."""
        if self.estimator == "reinforce_plus_plus":
            r = group_advantages.grpo_advantages(r, scale="none") if self.minus_baseline else r
            return normalise(on_every_token(r, counted) - cost, counted)
        if r.shape[-1] == 1:
            return jnp.zeros(counted.shape, r.dtype)
        centred = group_advantages.grpo_advantages(r, scale="none")
        group = r.shape[-1]
        others = jnp.broadcast_to(centred[..., None, :], (*r.shape, group))
        members = jnp.broadcast_to(~jnp.eye(group, dtype=bool) if self.leave_one_out else True, others.shape)
        spread = sqrt(masked_var(others, members, axis=-1))
        advantage = group_advantages.rloo_advantages(r) if self.leave_one_out else centred
        if self.scale:
            advantage = jnp.where(spread > 0, advantage / (spread + 1e-6), advantage)
        return on_every_token(advantage, counted)

    def explain(self) -> str:
        """Return the estimator's name in NeMo-RL."""
        kind = "leave-one-out" if self.leave_one_out and self.estimator == "grpo" else "group"
        return f"NeMo-RL's {self.estimator}, {kind} baseline"


@dataclasses.dataclass(frozen=True)
class TunixGroup(DialectAdvantage):
    """Group baselines of tunix: "grpo", "rloo", "drgrpo"; a group of one has no advantage (tunix refuses it)."""

    estimator: str = "grpo"

    per_token = False

    def estimate(self, r: jax.Array, cost: jax.Array, counted: jax.Array) -> jax.Array:
        """Return the advantage per token from rewards, penalties and the mask."""
        r = r - jnp.sum(cost, axis=-1)
        require(r.shape[-1] > 1, f"tunix needs num_generations > 1, got rewards of shape {r.shape}")
        if self.estimator == "rloo":
            return on_every_token(group_advantages.rloo_advantages(r), counted)
        scale = "group" if self.estimator == "grpo" else "none"
        return on_every_token(group_advantages.grpo_advantages(r, scale=scale, eps=1e-6), counted)

    def explain(self) -> str:
        """Return the estimator's name in tunix."""
        return f"tunix's {self.estimator}"


def bounds(threshold: float | tuple[float, ...] | list[float]) -> tuple[float, float]:
    """Return (low, high) of a threshold that may be the upper bound alone."""
    pair = [float(threshold)] if isinstance(threshold, float | int) else [float(x) for x in threshold]
    require(len(pair) in (1, 2) and all(not math.isnan(x) for x in pair), f"need HIGH or LOW, HIGH, got {threshold}")
    return (0.0, pair[0]) if len(pair) == 1 else (pair[0], pair[1])
