"""Inputs of an objective in a step: ``Rollouts`` for its advantages, fields of the batch for its loss."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from rl_bridge.algorithms.completions import Sampled
from rl_bridge.data.token_batch import TokenBatch
from rl_bridge.data.trajectory import Trajectory
from rl_bridge.functional import from_jax
from rl_bridge.modules.policy import with_coefficients
from rl_fn import Batch, Objective, Rollouts
from rl_fn.objectives.components import DecoupledPPO, PerToken
from rl_fn.objectives.components.corrections import Drift, FunctionCorrection
from rl_fn.objectives.dialects.dialect_losses import ImportanceBand

OF_OLD = (FunctionCorrection, ImportanceBand, DecoupledPPO)
"""Parts of an objective that read π_old/μ; a ``Drift`` among them reads π/μ."""

# Steps of episodes (GiGPO): each turn's tokens, reward and the state that the turn began in.


class Steps(NamedTuple):
    """P groups of n episodes of up to S turns; behind an episode's last turn no token counts."""

    rewards: torch.Tensor
    """[P, n, S]: of each turn; what the whole episode earned is on its last."""
    mask: torch.Tensor
    """[P, n, S, L]: the tokens of each turn."""
    state_ids: torch.Tensor
    """[P, n, S] int32: equal where two turns began in the same state."""
    turns: torch.Tensor
    """[N, L] int64: the turn that a token belongs to, from 1; 0 before the first."""


def steps_of(
    trajectories: Sequence[Trajectory], mask: torch.Tensor, rewards: torch.Tensor, turn_weight: float | None = 0.0
) -> Steps:
    """The turns of trajectories: what the policy drew without a break.

    A turn began in the state that the environment named (``state_ids`` of a trajectory), or else in the tokens before
    it. ``mask`` is [N, L], ``rewards`` [P, n] of whole episodes. A turn has ``turn_weight`` of the environment's reward
    (``turn_rewards``), and the last turn the rest of the episode's: the steps add up to ``rewards``.

    Raises:
        ValueError: ``turn_weight`` None, and the environment rewards turns: no part of the reward is a turn's.
    """
    if turn_weight is None and any(any(trajectory.turn_rewards) for trajectory in trajectories):
        raise ValueError(
            "tchebycheff makes no sum of the rewards, so that no part of it is a turn's: advantages of steps take "
            "weighted_sum where the environment's reward is one of several"
        )
    policy_mask = mask.int()
    begins = torch.diff(policy_mask, dim=1, prepend=torch.zeros_like(policy_mask[:, :1])) == 1
    turns = begins.cumsum(1)
    count = turns.amax(1)
    last = max(1, int(count.max()))
    of_turn = torch.stack([mask & (turns == turn + 1) for turn in range(last)], 1)
    per_turn, states = torch.zeros(len(mask), last), torch.zeros(len(mask), last, dtype=torch.int32)
    numbers, weight = dict[tuple, int](), turn_weight or 0.0
    for row, trajectory in enumerate(trajectories):
        for turn, start in enumerate(begins[row].nonzero()[:, 0].tolist()):
            state = trajectory.state_ids[turn] if trajectory.state_ids else -1
            key = ("named", trajectory.group, state) if state >= 0 else trajectory.tokens[:start]
            states[row, turn] = numbers.setdefault(key, len(numbers))
            per_turn[row, turn] = weight * trajectory.turn_rewards[turn] if trajectory.turn_rewards else 0.0
        # The environment's reward of the episode is the sum of its turns'.
        counted = weight * sum(trajectory.turn_rewards)
        per_turn[row, max(0, int(count[row]) - 1)] += rewards.flatten()[row] - counted
    shape = (*rewards.shape, last)
    return Steps(per_turn.view(shape), of_turn.view(*shape, mask.shape[1]), states.view(shape), turns)


# The inputs, by the fields that an objective names.

SCORED_BY = {
    "ref_logprobs": "reference.score(batch)",
    "values": "critic.score(batch)",
    "greedy_rewards": "groups.score(reward, greedy=rollout.generate(prompts, greedy))",
    "teacher_logprobs": "teacher.score(batch)",
}
"""Inputs of an objective beyond the completions and their rewards, and what gives them."""
CONTROLLED = ("kl", "reward_kl", "entropy")
"""Parts of an objective whose coefficient a controller may set, by the metric of the same name."""


def require_scored(objective: Objective, needed: Sequence[str], present: Mapping[str, Any]) -> None:
    """Refuse inputs that are needed and that no model has given yet.

    Raises:
        ValueError: with the call that gives them.
    """
    for name, source in SCORED_BY.items():
        if name in needed and present.get(name) is None:
            raise ValueError(f"{objective.name} reads {name}, which {source} gives")


def require_whole(objective: Objective, partly: Set[str]) -> None:
    """Refuse log-probabilities that models gave of the rows in an earlier loss alone (``partly``).

    Raises:
        ValueError: with the order of the calls.
    """
    read = {"old_logprobs", *objective.required_rollout_fields, *objective.required_batch_fields}
    if parts := sorted(read & partly):
        raise ValueError(
            f"{objective.name} reads {', '.join(parts)}, which a model gave behind earlier advantages, of the rows "
            "in the loss alone: begin with groups.batch(), and let the models score it before its advantages"
        )


def require_rescored(objective: Objective, *, way_on: str) -> None:
    """Refuse weights and masks of π_old/μ for a batch whose π_old is what the rollout sampled from, which is μ.

    ``way_on``: what gives π_old of the trainer.

    Raises:
        ValueError: with the part of the objective, and the way on.
    """
    for part in parts_of(objective):
        if isinstance(part, OF_OLD) and not isinstance(part, Drift):
            raise ValueError(
                f"{objective.name} has {part}, which reads π_old/μ, and π_old is what the rollout sampled from: that "
                f"would be 1 on every token, and correct nothing. {way_on} gives π_old of the trainer"
            )


def require_unpenalised(objective: Objective, *, penalised: bool) -> None:
    """Refuse an overlong penalty (``penalised``) where the advantage divides by a mean reward, which must be ≥ 0.

    Raises:
        ValueError: with the option, and the way on.
    """
    if penalised and objective.advantage.nonnegative_rewards:
        raise ValueError(
            f"{objective.name} divides by the mean reward of a group, and the overlong penalty can make it negative, "
            "which would reward the long completions: leave out overlong_buffer (--policy.overlong-buffer), or take an "
            "objective that compares rewards of any sign (recipes.dapo(), objective:dapo)"
        )


def require_nonnegative(objective: Objective, sampled: Sampled) -> None:
    """Refuse a negative reward that counts, where the advantage divides by a mean that must not be negative.

    Raises:
        ValueError: with the first row of these and its rewards, and the way on.
    """
    negative = (sampled.rewards < 0) & sampled.valid
    if not objective.advantage.nonnegative_rewards or not bool(negative.any()):
        return
    group, place = negative.nonzero()[0].tolist()
    row = sampled.trajectories[group * negative.shape[1] + place].row.get("_where", f"prompt {group}")
    parts = zip(sampled.names, sampled.matrix[group, :, place].tolist(), strict=True)
    raise ValueError(
        f"{objective.name} divides by the mean reward of a group, and a completion of {row} has the reward "
        f"{float(sampled.rewards[group, place]):g} ({', '.join(f'{name} {value:g}' for name, value in parts)}): give "
        "rewards ≥ 0, such as 1 and 0 in place of 1 and -1, or take an objective that compares rewards of any sign "
        "(recipes.rloo(), objective:rloo)"
    )


SEVERAL = "*batch R G"
"""Shape of the rewards of an objective that reads each of several by itself."""


def with_reward_weights(objective: Objective, weights: Sequence[float] | None, *, penalised: bool) -> Objective:
    """The objective with the ``weights`` that the rewards come with, where it reads each reward by itself (GDPO).

    The weights count behind the normalisation, which would undo them before it. Empty ``weights`` are all 1, None is no
    sum of the rewards. ``penalised``: an overlong penalty is the last of the rewards, and weighs 1.

    >>> from rl_fn import recipes
    >>> with_reward_weights(recipes.gdpo(), (1.0, 0.1), penalised=True).advantage.weights
    (1.0, 0.1, 1.0)

    Raises:
        ValueError: the objective has other weights, takes none, or adds rewards that something else makes one of; it
            takes no penalty; or all that it reads has weight 0.
    """
    require_unpenalised(objective, penalised=penalised)
    advantage: Any = objective.advantage
    if weights is None and advantage.nonnegative_rewards:
        raise ValueError(
            f"{objective.name} divides by the mean reward of a group, and tchebycheff makes rewards ≤ 0: take "
            "weighted_sum, --policy.scalar.method weighted_sum"
        )
    own = advantage.weights if advantage.rewards_shape == SEVERAL and hasattr(advantage, "weights") else None
    counted = own or (*(weights or ()), *((1.0,) if penalised else ()))
    if advantage.rewards_shape != "none" and objective.reward_kl is None and counted and not any(counted):
        raise ValueError(
            f"every reward has weight 0, and {objective.name} has nothing to train on: got weights {tuple(counted)}; a "
            "reward that is to be measured alone stands beside one that counts"
        )
    if advantage.rewards_shape != SEVERAL:
        return objective
    if weights is None:
        raise ValueError(
            f"{objective.name} compares each reward by itself, and tchebycheff makes one number of all: take "
            "weighted_sum, --policy.scalar.method weighted_sum"
        )
    if all(weight == 1 for weight in weights):
        return objective
    if not hasattr(advantage, "weights"):
        raise ValueError(
            f"{objective.name} reads each reward by itself, and its advantage has no weights: the rewards' "
            f"{tuple(weights)} would have no effect. Leave them out (weights=…, --reward-weights)"
        )
    if advantage.weights is None:
        own = (*weights, *((1.0,) if penalised else ()))
        return objective.replace(advantage=replace(advantage, weights=tuple(map(float, own))))
    if tuple(advantage.weights[: len(weights)]) != tuple(weights):
        raise ValueError(
            f"{objective.name} has the weights {tuple(advantage.weights)}, and the rewards have {tuple(weights)}: give "
            "them once, with the objective (recipes.gdpo(weights=…), --objective.weights) or with the rewards "
            "(score(…, weights=…), --reward-weights)"
        )
    return objective


class Advantages:
    """Turns rewards of groups into advantages of tokens, by an objective."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._needed, shape = objective.required_rollout_fields, objective.advantage.rewards_shape
        self._several, self._steps = shape == SEVERAL, shape == "*batch G S"
        fields = [(*part.required_fields, *getattr(part, "reads", ())) for part in parts_of(objective)]
        self._draws = any("noise" in names for names in fields)
        self._advantages = from_jax(lambda rollouts, terms: with_coefficients(objective, terms).advantages(rollouts))
        self._selection = from_jax(objective.selection)
        penalty: Any = objective.reward_kl
        self._penalty = None if penalty is None else from_jax(penalty.estimate)

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of all that the advantages and the loss read."""
        return (*self._needed, *self._objective.required_batch_fields)

    def marked(self, batch: TokenBatch, sampled: Sampled, *, correct_reward: float, seed: int) -> TokenBatch:
        """The batch with what is correct and the noise, where the objective reads them."""
        if "correct" in self.fields:
            earned = sampled.earned.flatten() >= correct_reward
            batch = batch._replace(correct=batch.mask & earned[:, None])
        if self._draws:
            # One number a token of the whole batch: micro-batches and workers do not change them.
            generator = torch.Generator().manual_seed(seed)
            batch = batch._replace(noise=torch.rand(batch.mask.shape, generator=generator))
        return batch

    def advantages(
        self, batch: TokenBatch, sampled: Sampled, coefficients: Mapping[str, float]
    ) -> tuple[TokenBatch, torch.Tensor, torch.Tensor]:
        """The batch with advantages and returns; rows to compute [N]; tokens [N, L] that count in the denominator.

        A trajectory whose environment failed has advantage 0 and is in no denominator, whatever it earned; the others
        of its group are compared without it.

        Raises:
            ValueError: rewards that the advantage has no meaning for, negative ones or None among several.
        """
        require_nonnegative(self._objective, sampled)
        groups = sampled.rewards.shape

        def grouped(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else values.view(*groups, *values.shape[1:])

        fields: dict[str, Any] = {"rewards": sampled.rewards, "mask": grouped(batch.mask)}
        valid = self._valid(sampled)
        if not bool(valid.all()):
            fields["valid"] = valid
        if self._several:
            if bool((sampled.rewarded & ~sampled.applies.all(1)).any()):
                raise ValueError(
                    f"{self._objective.name} compares each reward within a group, and one returned None for a "
                    "completion that another one applies to: give a number there"
                )
            fields["rewards"] = sampled.matrix
        elif self._steps:
            steps = steps_of(sampled.trajectories, batch.mask, sampled.rewards, sampled.turn_weight)
            fields |= {"rewards": steps.rewards, "mask": steps.mask, "state_ids": steps.state_ids}
            batch = batch._replace(segment_ids=steps.turns)
        others = {"values": batch.old_values, "greedy_rewards": sampled.greedy_rewards}
        for name in self._needed:
            if name not in fields:
                value = others[name] if name in others else getattr(batch, name)
                fields[name] = value if name == "greedy_rewards" else grouped(value)
        rollouts = Rollouts(**fields)
        terms = {name: torch.tensor(value) for name, value in coefficients.items() if name == "reward_kl"}
        if self._objective.advantage.takes_valid or "valid" not in fields:
            advantages, returns = self._advantages(rollouts, terms)
        else:
            advantages, returns = self._of_whole_groups(rollouts, terms)
        computed, counted = self._selection(rollouts, advantages)
        if self._steps:  # of the episode's tokens each belongs to one turn
            advantages, computed, counted = advantages.sum(-2), computed.any(-1), counted.any(-2)
        returns = None if returns is None else returns.flatten(0, 1)
        batch = batch._replace(advantages=advantages.flatten(0, 1), returns=returns)
        return batch, computed.flatten(), counted.flatten(0, 1)

    def _of_whole_groups(self, rollouts: Rollouts, terms: Mapping[str, Any]) -> list[Any]:
        """Advantages and returns of groups in which all count, as if there were no others, whose own are 0."""
        valid: Any = rollouts.valid
        whole = valid.all(-1)
        places = whole.nonzero()[:, 0] if bool(whole.any()) else torch.arange(len(whole))
        fields = {name: value for name, value in rollouts._asdict().items() if name != "valid" and value is not None}
        results: list[Any] = []
        for part in self._advantages(Rollouts(**{name: value[places] for name, value in fields.items()}), terms):
            if part is not None:
                result = part.new_zeros(len(whole), *part.shape[1:]).index_copy(0, places, part)
                part = result.masked_fill(~whole.view(-1, *(1,) * (result.dim() - 1)), 0.0)
            results.append(part)
        return results

    def _valid(self, sampled: Sampled) -> torch.Tensor:
        """[P, n]: what counts. An advantage that does not take ``valid`` compares with all completions of a group.

        A group of it with a failure counts nowhere: a failure is nobody's choice, and ends no run that has gone on for
        days.

        Raises:
            ValueError: something was left out on purpose.
        """
        valid, advantage = sampled.valid, self._objective.advantage
        if advantage.takes_valid:
            return valid
        if bool((sampled.ended & ~valid).any()):
            raise ValueError(
                f"the advantage {advantage.explain()} does not take valid, and would compare with completions that "
                "select or None as a reward left out: a function (rewards, valid) of [P, n] both gets valid, which is "
                "False there, or None where all count; an Advantage of your own says takes_valid = True"
            )
        return valid & valid.all(-1, keepdim=True)

    def metrics(self, batch: TokenBatch, sampled: Sampled) -> dict[str, float]:
        """The KL that is taken off the rewards, a token of what counts, before its coefficient."""
        mask = batch.mask & sampled.valid.flatten()[:, None]
        if self._penalty is None or not bool(mask.any()):
            return {}
        nothing = torch.zeros(batch.mask.shape)
        inputs: Any = Batch(batch.old_logprobs, nothing, nothing, batch.mask, ref_logprobs=batch.ref_logprobs)  # type: ignore[arg-type]
        return {"reward_kl": float(self._penalty(inputs)[mask].mean())}


def parts_of(objective: Objective) -> list[PerToken]:
    """The loss and the correction of an objective, and what they are made of."""
    parts, pending = [], [objective.loss, objective.correction]
    while pending:
        part: Any = pending.pop()
        if part is not None:
            parts.append(part)
            pending += [*getattr(part, "parts", ()), getattr(part, "correction", None)]
    return parts
