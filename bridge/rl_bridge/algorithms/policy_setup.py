"""Parts of a policy's training: steps, prompts, sampling, engines, and coefficients that change between steps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

import rl_fn
from rl_bridge.common.argument_kinds import check_options
from rl_bridge.common.terminal import given
from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.engines import InferenceEngine, Mesh, TrainEngine
from rl_bridge.engines.train import wants_proof
from rl_bridge.functional import from_jax
from rl_bridge.modules.policy import require_micro_batches, require_whole_batch
from rl_bridge.run.options import STEPS, require_used
from rl_fn import Objective
from rl_fn.objectives.components import (
    GAE,
    CustomAdvantage,
    DistillationAdvantage,
    PassKAdvantage,
    RawReward,
    ReinforcePPAdvantage,
    ReMaxAdvantage,
)

# Coefficients that change between steps: a controller for each, its state part of a checkpoint.


class ConstraintState(NamedTuple):
    """State of ``constraint``: the coefficient in force, and the multiplier."""

    coef: jax.Array
    multipliers: rl_fn.LagrangianState


def constraint(
    limit: float,
    direction: str,
    *,
    lr: float,
    penalty: float = 0.0,
    start: float = 0.0,
    high: float = float("inf"),
) -> rl_fn.Controller:
    """A constraint ``direction limit`` of what is measured, as the controller of its term's coefficient.

    The coefficient is |∂ℒ/∂g| at the last measured g: the multiplier, and the slope of the quadratic penalty where the
    constraint is violated. The other arguments are those of ``rl_fn.lagrangian``.

    >>> floor = constraint(2.0, ">=", lr=0.5)
    >>> float(floor.update(floor.init(), 1.0).coef)
    0.5
    """
    constrained = rl_fn.lagrangian([limit], directions=[direction], lr=lr, penalty=penalty, start=start, high=high)

    def coef(state: rl_fn.LagrangianState, measured: jax.Array) -> jax.Array:
        zero = jnp.zeros(())
        return jnp.abs(jax.grad(lambda g: constrained.loss(state, zero, g))(measured))[0]

    def init() -> ConstraintState:
        state = constrained.init()
        return ConstraintState(state.multipliers[0], state)

    def update(state: ConstraintState, measured: Any) -> ConstraintState:
        measurement = jnp.asarray(measured, jnp.float32)[None]
        moved = constrained.update(state.multipliers, measurement)
        return ConstraintState(jnp.where(jnp.isnan(measurement[0]), state.coef, coef(moved, measurement)), moved)

    return rl_fn.Controller(init, update)


@dataclass(frozen=True)
class Controlled:
    """A term whose coefficient a controller sets, by the metric that it measures."""

    controller: rl_fn.Controller
    metric: str


class Coefficients:
    """The coefficients in force. ``update`` once for each step in which the policy moved.

    A step without a finite measurement leaves a coefficient that follows one as it is; a schedule counts the step.
    """

    def __init__(self, terms: Mapping[str, Controlled] | None = None) -> None:
        """``terms``: slot of the objective → its controller. Without any nothing changes."""
        self._terms = dict(terms or {})
        self._states = {name: term.controller.init() for name, term in self._terms.items()}

    def __bool__(self) -> bool:
        return bool(self._terms)

    def values(self) -> dict[str, float]:
        """The coefficient of each term."""
        return {name: float(state.coef) for name, state in self._states.items()}

    def metrics(self) -> dict[str, float]:
        """The coefficients as a record names them."""
        return {f"{name}_coef": value for name, value in self.values().items()}

    def update(self, metrics: Mapping[str, float]) -> None:
        """Give each controller what was measured in this step: of a last update that was skipped it may be NaN."""
        for name, term in self._terms.items():
            value = metrics.get(term.metric, math.nan)
            measured = value if math.isfinite(value) else math.nan
            self._states[name] = term.controller.update(self._states[name], measured)

    def checkpoint_state(self) -> dict[str, Any]:
        """The numbers of every state."""
        return {name: [np.asarray(x).tolist() for x in jax.tree.leaves(s)] for name, s in self._states.items()}

    def load_checkpoint_state(self, state: dict[str, Any]) -> None:
        """Take back what ``checkpoint_state`` gave.

        Raises:
            ValueError: the checkpoint has other terms, or another controller's numbers.
        """
        if state.keys() != self._states.keys():
            raise ValueError(f"the checkpoint controls {sorted(state)}, this run controls {sorted(self._states)}")
        for name, numbers in state.items():
            leaves, tree = jax.tree.flatten(self._states[name])
            if len(leaves) != len(numbers):
                raise ValueError(f"the checkpoint's controller of {name} has {len(numbers)} numbers, not {len(leaves)}")
            pairs = zip(numbers, leaves, strict=True)
            self._states[name] = jax.tree.unflatten(tree, [jnp.asarray(x, leaf.dtype) for x, leaf in pairs])


# One number of several rewards: what a policy is trained on.

_tchebycheff = from_jax(rl_fn.tchebycheff)


@dataclass(frozen=True, kw_only=True)
class ScalarOptions:
    """How several rewards become one."""

    method: Literal["weighted_sum", "tchebycheff"] = "weighted_sum"
    """weighted_sum: Σ w r. tchebycheff: −(max w (z − r) + ρ Σ (z − r)), which reaches the concave parts of a front."""
    weights: tuple[float, ...] | None = None
    """w, one a reward in their order. None: those that the rewards come with."""
    ideal: tuple[float, ...] | None = None
    """z of tchebycheff: at least as good as each reward can be."""
    rho: float = 0.01
    """ρ of tchebycheff."""

    def __post_init__(self) -> None:
        """Refuse an ideal point without its method, the method without its point, and a negative ρ."""
        check_options(self)
        for name in ("weights", "ideal"):
            if (numbers := getattr(self, name)) is not None:
                object.__setattr__(self, name, tuple(float(number) for number in numbers))
        if not 0 <= self.rho < float("inf"):
            raise ValueError(f"rho must be finite and not negative, got {self.rho}")
        if (self.ideal is not None) != (self.method == "tchebycheff"):
            raise ValueError(
                f"ideal goes with method tchebycheff, and tchebycheff with ideal; got {given(self, 'method', 'ideal')}"
            )
        if self.method != "tchebycheff":
            require_used(self, ("rho",), "without --policy.scalar.method tchebycheff", part="policy.scalar")

    def combine(
        self, rewards: torch.Tensor, weights: Sequence[float], penalty: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[P, R, n] → [P, n] in float32, larger is better. ``weights`` are those that the rewards come with.

        NaN is no reward: the others make the number, which is NaN without any. ``penalty`` [P, n] is added. A sum is
        taken in float64 and rounded once: in float32 0.1 + 0.6 is more than 0.7 + 0, and a group that earned 0.7
        throughout would have a signal.

        Raises:
            ValueError: not a weight (a number of the ideal point) for each reward, or tchebycheff without one of these.
        """
        factors, count = self.weights or tuple(weights), rewards.shape[1]
        for name, values in (("weights", factors), ("ideal", self.ideal)):
            if values is not None and len(values) != count:
                raise ValueError(f"{name} has {len(values)} numbers for {count} rewards: {values}")
        absent = rewards.isnan()
        none, objectives = absent.all(1), rewards.masked_fill(absent, 0.0).movedim(1, -1)
        if self.ideal is None:
            total = objectives.double() @ torch.tensor(factors, dtype=torch.float64)
        elif bool((absent.any(1) & ~none).any()):
            raise ValueError(
                "tchebycheff looks at all rewards of a completion, and one returned None: give a number there, or take "
                "weighted_sum"
            )
        else:
            w, ideal = torch.tensor(factors), torch.tensor(self.ideal)
            total = -_tchebycheff(objectives.float(), w, ideal, maximize=True, rho=self.rho)
        if penalty is not None:
            total = total.double() + penalty
        return total.float().masked_fill(none, torch.nan)


# Options of a run: steps, prompts, completions, how they are sampled and evaluated.


def seed_of(seed: int, step: int) -> int:
    """The seed of a step's random numbers in a run with this ``seed``.

    >>> seed_of(2, 1)
    2000007
    """
    return seed * 1_000_003 + step


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """One step: ``prompts_per_step`` prompts of ``sampling.n`` completions, ``updates_per_step`` updates."""

    steps: int
    """Steps of reinforcement learning: completions are drawn, scored and trained on once in each."""
    prompts_per_step: int
    """Prompts that a step draws completions of."""
    sampling: SamplingParams
    """How completions are drawn. The seed of a step is the run's."""
    updates_per_step: int = 1
    """Parts of a step's completions, each with an update of its own: at most as many as completions."""
    evaluate_every: int = 25
    """Steps from one evaluation on the held-out rows to the next."""
    sampling_rounds: int = 1
    """Dynamic sampling draws up to so many rounds of prompts until ``prompts_per_step`` groups have a signal. 1 trains
    on those of the first."""
    reference_every: int | None = None
    """Steps after which the reference takes the policy's weights, again and again. None: it stays as it began."""
    reference_share: float = 1.0
    """Share of the policy's weights that the reference then takes, the rest are its own: a moving average below 1."""
    scalar: ScalarOptions = ScalarOptions()
    overlong_buffer: int | None = None
    """DAPO's penalty of long completions: it grows to 1 over the last so many of ``max_new_tokens``; of a conversation
    the longest turn counts."""
    correct_reward: float = 1.0
    """The reward from which on a completion is correct: for pass@k, and for losses that read what is (VAPO)."""
    critic_warmup: int = 0
    """First steps in which the critic alone is updated."""
    pass_at: tuple[int, ...] = ()
    """k of the pass@k that an evaluation measures, on completions sampled as for training."""
    pass_samples: int | None = None
    """Completions of each held-out row for pass@k. None: the largest k."""
    recompute_old_logprobs: bool = False
    """False takes π_old from sampling time. The two are equal where the rollout has the trainer's own weights and
    precision: the trainer scores over the tokens that a truncated sampler allowed."""
    least_effective_share: float = 0.5
    """With recompute_old_logprobs: warn once, and record ``mismatch/alarm``, where the tokens of a step count for less
    than this share of them as a sample of the trainer's policy."""

    def __post_init__(self) -> None:
        """Refuse what cannot be counted, sampled or estimated."""
        check_options(self)
        counted = ("steps", "prompts_per_step", "updates_per_step", "evaluate_every")
        if min(*(getattr(self, name) for name in counted), self.sampling_rounds, *self.pass_at) < 1:
            raise ValueError(f"counts must be ≥ 1, got {given(self, *counted, 'sampling_rounds', 'pass_at')}")
        if self.steps > STEPS:
            raise ValueError(f"steps={self.steps}: a run of so many never ends; give {STEPS:.0e} at most")
        if self.reference_every is not None and self.reference_every < 1:
            raise ValueError(f"reference_every counts steps and is at least 1, or None, got {self.reference_every}")
        if not 0 < self.reference_share <= 1:
            raise ValueError(f"reference_share must be in (0, 1], got {self.reference_share}")
        if self.reference_every is None:
            require_used(self, ("reference_share",), "without --policy.reference-every", part="policy")
        completions = self.prompts_per_step * self.sampling.n
        if self.updates_per_step > completions:
            raise ValueError(
                f"updates_per_step={self.updates_per_step} are parts of a step's completions, and there are "
                f"{self.prompts_per_step} · {self.sampling.n} = {completions}: at most one update a completion"
            )
        if self.critic_warmup < 0:
            raise ValueError(f"critic_warmup must be ≥ 0, got {self.critic_warmup}")
        if self.critic_warmup >= self.steps:
            raise ValueError(
                f"critic_warmup={self.critic_warmup} of {self.steps} steps: the policy would never be updated"
            )
        if not self.pass_at:
            require_used(self, ("pass_samples",), "without --policy.pass-at", part="policy")
        if not self.recompute_old_logprobs:
            require_used(self, ("least_effective_share",), "without --policy.recompute-old-logprobs", part="policy")
        if self.pass_samples is not None and self.pass_samples < max(self.pass_at, default=1):
            raise ValueError(f"pass_samples={self.pass_samples} is too few for pass_at={self.pass_at}")
        if not 0 <= self.least_effective_share <= 1:
            raise ValueError(f"least_effective_share must be from 0 to 1, got {self.least_effective_share}")
        limit = self.sampling.max_new_tokens
        if self.overlong_buffer is not None and not 0 <= self.overlong_buffer <= limit:
            raise ValueError(f"overlong_buffer must be from 0 to max_new_tokens {limit}, got {self.overlong_buffer}")
        if self.sampling.temperature == 0:
            raise ValueError("greedy completions of one prompt are all the same: sampling.temperature must be > 0")
        if self.sampling.seed != SamplingParams.seed:
            raise ValueError(f"the seed of a step is the run's --seed, and sampling has none, got {self.sampling.seed}")


# The engines that a policy is trained with: itself, its rollout, and the models that its objective asks for.

ALONE = (CustomAdvantage, DistillationAdvantage, GAE, RawReward, ReinforcePPAdvantage, ReMaxAdvantage)
"""Advantages that a single completion of a prompt has."""


@dataclass(frozen=True, kw_only=True)
class PolicyEngines:
    """A policy and the rollout that draws with its weights."""

    policy: TrainEngine
    rollout: InferenceEngine


class Replaced:
    """How many engines behind the rollout a step's syncs had to replace, and how many tensors they did not compare."""

    def __init__(self, engines: PolicyEngines) -> None:
        """Count from now on."""
        self._policy, self._proved = engines.policy, wants_proof(engines.rollout)
        self._before, self._now = self._policy.replaced_engines, 0

    def metrics(self) -> dict[str, float]:
        """``weights/engine_replaced`` since the last call, and ``weights/not_compared`` of the last sync.

        Nothing for a rollout whose weights need no proof.
        """
        total = self._policy.replaced_engines
        self._before, self._now = total, total - self._before
        if not self._proved:
            return {}
        last = self._policy.last_sync
        unseen = 0 if last is None else last.not_compared
        return {"weights/engine_replaced": float(self._now), "weights/not_compared": float(unseen)}

    def warning(self, step: int) -> str | None:
        """A line for the user, if any were."""
        if not self._now or self._policy.last_sync is None:
            return None
        why = "; ".join(self._policy.last_sync.replaced)
        return f"step {step}: {self._now} engines of the rollout were replaced, and have the new weights, proved. {why}"


def require_objective(objective: Objective, config: PolicyConfig) -> None:
    """Refuse a config that an objective cannot be trained with.

    Raises:
        ValueError: a group of one completion or of one set of them, refilling without dynamic sampling, a warm-up
            without a critic, a mean over prompts.
    """
    name, rounds = objective.name, config.sampling_rounds
    require_group(objective, config.sampling.n, "--policy.sampling.n")
    if rounds > 1 and objective.dynamic_sampling is None:
        raise ValueError(f"sampling_rounds={rounds} refills what dynamic sampling leaves out: {name} has none")
    if config.critic_warmup and objective.value is None:
        raise ValueError(f"critic_warmup={config.critic_warmup}: {name} has no critic")
    require_micro_batches(objective)


def require_group(objective: Objective, n: int, option: str) -> None:
    """Refuse groups without two completions, or two sets of them, where these are compared. ``option``: ``n``'s name.

    Raises:
        ValueError: the objective compares the completions of a prompt, and there is one; or sets of k, and k ≥ n.
    """
    if n < 2 and not isinstance(objective.advantage, ALONE):
        raise ValueError(f"{objective.name} compares completions of one prompt: a group needs {option} ≥ 2")
    if isinstance(objective.advantage, PassKAdvantage) and objective.advantage.k >= n:
        k = objective.advantage.k
        raise ValueError(
            f"{objective.name} compares sets of k={k} completions, and {option}={n} has "
            f"{'one set' if k == n else 'none'}, without an advantage: take {option} > {k} or a smaller k"
        )


def require_parts(objective: Objective, mesh: Mesh) -> None:
    """Refuse statistics of the whole batch that is split over workers, as the policy's module does, and earlier.

    Raises:
        ValueError: the objective reads such statistics, and each worker has a part of the rows.
    """
    require_whole_batch(objective, mesh.data_parts, mesh)
