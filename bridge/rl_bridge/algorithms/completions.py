"""Completions of one step's prompts, scored; more prompts where dynamic sampling leaves too few."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch

import rl_fn
from rl_bridge.algorithms.policy_setup import ScalarOptions
from rl_bridge.data.messages import Chat
from rl_bridge.data.trajectory import SamplingParams, Trajectory
from rl_bridge.engines import InferenceEngine
from rl_bridge.functional import from_jax
from rl_bridge.rewards import RewardError, Rewards, with_rows

# Named rewards of completions, group by group, and the penalty of long ones.

_overlong_penalty = from_jax(rl_fn.overlong_penalty)


def reward_matrix(trajectories: Sequence[Trajectory], names: Sequence[str], responses: int) -> torch.Tensor:
    """[P, R, n] in float64: rewards of P groups of n trajectories, group by group; NaN where one does not apply."""
    rows = [[trajectory.rewards[name] for name in names] for trajectory in trajectories]
    flat = torch.tensor(rows, dtype=torch.float64)
    return flat.view(-1, responses, len(names)).transpose(1, 2)


def overlong(trajectories: Sequence[Trajectory], responses: int, *, max_length: int, buffer: int) -> torch.Tensor:
    """[P, n] in [−1, 0], in float64: DAPO's penalty of completions longer than ``max_length − buffer`` tokens.

    ``max_length`` is of one turn: of a conversation its longest turn counts, and no text between turns. The penalty is
    a number of ``buffer``-ths, which float32 would round.
    """
    lengths = torch.tensor([longest_turn(trajectory.loss_mask) for trajectory in trajectories], dtype=torch.int32)
    penalty = _overlong_penalty(lengths.view(-1, responses), max_length=max_length, buffer=buffer)
    whole = float(buffer).is_integer() and buffer > 0
    return (penalty.double() * buffer).round() / buffer if whole else penalty.double()


def longest_turn(loss_mask: Sequence[bool]) -> int:
    """Tokens of the longest turn: of those that the policy drew without a break.

    >>> longest_turn([False, True, True, False, True])
    2
    """
    return max((len(list(run)) for is_turn, run in groupby(loss_mask) if is_turn), default=0)


# Completions of rows.

FAILED = ("abort", "error")
"""Reasons of an end that says nothing of the policy."""
Complete = Callable[[Sequence[dict], SamplingParams], list[Trajectory]]
"""Rows of the data and how to sample → ``n`` trajectories a row, row by row; ``group`` is the row's place."""


def completions(rollout: InferenceEngine, **budget: Any) -> Complete:
    """One turn a row, after its ``prompt`` with its tools. ``budget``: limits of a call, as ``generate`` has them."""
    return lambda rows, sampling: rollout.generate([Chat.of(row).shortest for row in rows], sampling, **budget)


def scored(complete: Complete, rewards: Rewards, rows: Sequence[dict], sampling: SamplingParams) -> list[Trajectory]:
    """``n`` trajectories a row with their row and rewards."""
    return rewards.score(with_rows(complete(rows, sampling), rows))


def has_ended(trajectory: Trajectory) -> bool:
    """Whether the policy ended it or a limit of tokens or turns did: else it says nothing of the policy."""
    return trajectory.finish_reason not in FAILED


def failures(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The shares that an environment or engine failed (``errors``, of conversations) and that were given up.

    >>> from rl_bridge.data.trajectory import single_turn
    >>> failures([single_turn([1], [2], finish_reason=reason) for reason in ("stop", "abort")])
    {'aborted': 0.5}
    """
    reasons = [trajectory.finish_reason for trajectory in trajectories]
    conversations = any(trajectory.turns != 1 for trajectory in trajectories)
    shares = {
        name: reasons.count(reason) / max(1, len(reasons))
        for name, reason in (("errors", "error"), ("aborted", "abort"))
    }
    return {name: share for name, share in shares.items() if share or (name == "errors" and conversations)}


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """P groups of n trajectories, group by group."""

    trajectories: list[Trajectory]
    names: tuple[str, ...]
    matrix: torch.Tensor
    """[P, R, n]: every reward, the overlong penalty the last where there is one."""
    earned: torch.Tensor
    """[P, n]: the rewards in one number, before the overlong penalty."""
    rewards: torch.Tensor
    """[P, n]: what the policy is trained on."""
    greedy_rewards: torch.Tensor | None
    """[P]: of a greedy completion of each prompt, where the objective reads them."""
    applies: torch.Tensor
    """[P, R, n]: False where a reward returned None; ``matrix`` has 0 there, and so has ``rewards`` without any."""
    sampled_groups: int
    """Groups that were sampled for these, those that were left out among them."""
    turn_weight: float | None = 0.0
    """w: a turn's reward of the environment is w of it in ``rewards``; None where their sum is no part of it."""
    ahead: Mapping[str, float] = field(default_factory=dict)
    """Metrics of rollouts that run ahead of training."""
    chosen: torch.Tensor | None = None
    """[P, n]: False where a completion was left out on purpose; None where none was."""
    weights: tuple[float, ...] | None = ()
    """w of ``rewards``, the sum of w r, the overlong penalty aside. Empty: all 1; None: ``rewards`` is no such sum."""

    @property
    def valid(self) -> torch.Tensor:
        """[P, n]: False where the environment failed, the caller gave up, no reward applies or a choice left it out."""
        valid = self.ended & self.rewarded
        return valid if self.chosen is None else valid & self.chosen

    @property
    def ended(self) -> torch.Tensor:
        """[P, n]: False where the environment failed or the caller gave up."""
        return torch.tensor(list(map(has_ended, self.trajectories)), dtype=torch.bool).view(self.rewards.shape)

    @property
    def rewarded(self) -> torch.Tensor:
        """[P, n]: whether a reward applies, the overlong penalty aside."""
        return self.applies.any(1)

    def metrics(self) -> dict[str, float]:
        """Means of the rewards, tokens, the share cut at a limit; of conversations turns; and the shares that failed.

        What failed is in these shares alone.
        """
        ended, several = self.ended, len(self.names) > 1
        counted = ended if self.chosen is None else ended & self.chosen
        metrics = {"reward": _mean(self.rewards, self.valid)}
        applies = dict(zip(self.names, self.applies.unbind(1), strict=False))  # of the overlong penalty there is none
        if several:
            for i, name in enumerate(self.names):
                metrics[f"reward/{name}"] = _mean(self.matrix[:, i], applies.get(name, counted) & counted)
        if bool((~self.applies & ended[:, None]).any()):
            metrics["unrewarded"] = _mean(~self.rewarded, ended)
            metrics |= {f"unrewarded/{name}": _mean(~own, ended) for name, own in applies.items() if several}
        whole, failed = list(filter(has_ended, self.trajectories)), failures(self.trajectories)
        count = max(1, len(whole))
        if "errors" in failed:
            metrics["turns"] = sum(t.turns for t in whole) / count
        metrics |= failed
        metrics |= {} if self.chosen is None else {"left_out": _mean(~self.chosen, ended)}
        metrics["truncated"] = sum(t.finish_reason == "length" for t in whole) / count
        metrics["tokens"] = sum(float(sum(t.loss_mask)) for t in whole) / count
        return {**metrics, **self.ahead}

    def rows(self, groups: torch.Tensor) -> "Sampled":
        """The chosen groups, numbered anew."""
        n = self.rewards.shape[1]
        trajectories = [self.trajectories[g * n + i] for g in groups.tolist() for i in range(n)]
        return replace(
            self,
            trajectories=[t.labelled(group=i // n) for i, t in enumerate(trajectories)],
            matrix=self.matrix[groups],
            earned=self.earned[groups],
            rewards=self.rewards[groups],
            applies=self.applies[groups],
            chosen=None if self.chosen is None else self.chosen[groups],
            greedy_rewards=None if self.greedy_rewards is None else self.greedy_rewards[groups],
        )


def rewarded(
    trajectories: list[Trajectory],
    rewards: Rewards,
    n: int,
    *,
    max_new_tokens: int,
    scalar: ScalarOptions | None = None,
    overlong_buffer: int | None = None,
    greedy: torch.Tensor | None = None,
) -> Sampled:
    """Groups of ``n`` trajectories that have the rewards, and all that is computed from them.

    ``max_new_tokens`` is the limit that ``overlong_buffer`` lies before. ``greedy`` [P]: rewards of greedy completions.

    Raises:
        ValueError: ``n`` trajectories that stand for one prompt, and are not all of one ``group``.
    """
    require_groups(trajectories, n)
    names, scalar = rewards.names, ScalarOptions() if scalar is None else scalar
    matrix = reward_matrix(trajectories, names, n)
    earned, applies = scalar.combine(matrix, rewards.weights), ~matrix.isnan()
    total = earned = earned.masked_fill(~applies.any(1), 0.0)
    rounded = matrix.masked_fill(~applies, 0.0).float()
    if overlong_buffer is not None:
        penalty = overlong(trajectories, n, max_length=max_new_tokens, buffer=overlong_buffer)
        total = scalar.combine(matrix, rewards.weights, penalty)
        total = torch.where(applies.any(1), total, penalty.float())
        names, rounded = (*names, "overlong"), torch.cat([rounded, penalty.float()[:, None]], 1)
    return Sampled(
        trajectories=trajectories,
        names=names,
        matrix=rounded,
        earned=earned,
        rewards=total,
        applies=applies,
        greedy_rewards=greedy,
        sampled_groups=len(total),
        turn_weight=_turn_weight(rewards, scalar),
        weights=None if scalar.method == "tchebycheff" else tuple(scalar.weights or rewards.weights),
    )


def require_groups(trajectories: Sequence[Trajectory], n: int) -> None:
    """Refuse trajectories that are not group by group, ``n`` of each: rewards of several prompts would be compared.

    Raises:
        ValueError: with the first of these.
    """
    runs = [(number, len(list(run))) for number, run in groupby(trajectory.group for trajectory in trajectories)]
    for number, count in runs:
        if count != n:
            raise ValueError(
                f"a group has n={n} completions of one prompt, and group {number} has {count}: these are compared "
                "group by group, each trajectory with the number of its prompt (Trajectory.group)"
            )


def _turn_weight(rewards: Rewards, scalar: ScalarOptions) -> float | None:
    """The weight of the environment's reward in the sum of the rewards: 0 without one, None where there is no sum."""
    if rewards.environment is None:
        return 0.0
    weights = scalar.weights or rewards.weights
    return None if scalar.method == "tchebycheff" else float(weights[rewards.names.index(rewards.environment)])


def baseline_of(
    trajectories: Sequence[Trajectory],
    rewards: Rewards,
    *,
    scalar: ScalarOptions,
    overlong_buffer: int | None,
    max_new_tokens: int,
) -> torch.Tensor:
    """ReMax's baseline [P]: what P greedy trajectories with rewards earned.

    Raises:
        RewardError: no reward applies to one of these.
    """
    penalty = None
    if overlong_buffer is not None:
        penalty = overlong(trajectories, 1, max_length=max_new_tokens, buffer=overlong_buffer)
    earned = scalar.combine(reward_matrix(trajectories, rewards.names, 1), rewards.weights, penalty)
    if bool(earned.isnan().any()):
        where = trajectories[int(earned[:, 0].isnan().nonzero()[0, 0])].row.get("_where", "a row")
        raise RewardError(f"no reward applies to the greedy completion of {where}, which is the group's baseline")
    return earned[:, 0]


def _mean(values: torch.Tensor, where: torch.Tensor) -> float:
    """The mean of the values that are chosen; 0 of none."""
    return float(values[where].float().mean()) if bool(where.any()) else 0.0


def joined(parts: Sequence[Sampled]) -> Sampled:
    """All groups of the parts."""
    greedy = [part.greedy_rewards for part in parts if part.greedy_rewards is not None]
    some = any(part.chosen is not None for part in parts)
    chosen = [torch.ones_like(part.ended) if part.chosen is None else part.chosen for part in parts]
    whole = replace(
        parts[0],
        trajectories=[trajectory for part in parts for trajectory in part.trajectories],
        matrix=torch.cat([part.matrix for part in parts]),
        earned=torch.cat([part.earned for part in parts]),
        rewards=torch.cat([part.rewards for part in parts]),
        applies=torch.cat([part.applies for part in parts]),
        greedy_rewards=torch.cat(greedy) if greedy else None,
        chosen=torch.cat(chosen) if some else None,
    )
    return whole.rows(torch.arange(len(whole.rewards)))


def without_signal(sampled: Sampled) -> str:
    """A line about the rewards of a step that gives no update."""
    valid, infinite = sampled.valid, float("inf")
    values = sampled.rewards[valid].unique().tolist()
    ends = [sampled.rewards.masked_fill(~valid, end) for end in (-infinite, infinite)]
    numbers = ", ".join(f"{value:g}" for value in values[:4]) + (", …" if len(values) > 4 else "")
    if not bool(sampled.ended.any()):
        reason = "all of these failed or were given up"
    elif not values:
        has_rewards = bool((sampled.ended & sampled.rewarded).any())
        reason = "select left out all that have a reward" if has_rewards else "no reward applies to any of these"
    elif len(values) == 1:
        reason = f"every reward is {numbers}"
    elif bool((ends[0].amax(1) <= ends[1].amin(1)).all()):
        reason = f"the rewards of each group are equal ({numbers})"
    else:
        reason = f"every advantage is 0 or left out; the rewards are {numbers}"
    return f"no update, {sampled.sampled_groups} groups of {sampled.rewards.shape[1]} completions: {reason}"
