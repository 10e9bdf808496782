"""Evaluation on held-out rows: mean reward with its interval, pass@k, and a few completions to read."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

import rl_fn
from rl_bridge.data.trajectory import Trajectory
from rl_bridge.functional import from_jax
from rl_bridge.rewards import Rewards
from rl_bridge.tracking.intervals import confidence_interval
from rl_bridge.trainers.policy_config import PolicyConfig, SamplingOptions
from rl_bridge.trainers.policy_inputs.archive import Archive
from rl_bridge.trainers.policy_inputs.rewards import reward_matrix
from rl_bridge.trainers.policy_inputs.sampling import Complete, scored
from rl_bridge.trainers.policy_inputs.scalar import ScalarOptions

_pass_at_k = from_jax(rl_fn.pass_at_k)
RESAMPLES = 2000


def evaluate(
    complete: Complete,
    rows: Sequence[dict],
    rewards: Rewards,
    sampling: SamplingOptions,
    *,
    temperature: float = 0.0,
    scalar: ScalarOptions | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """One completion of each of ``rows``, greedy by default: the mean reward, each score, and the first few to read.

    ``seed``: the run's. It is the same in all evaluations of a run, so that before and after draw by the same numbers.
    """
    trajectories = scored(complete, rewards, rows, replace(sampling, temperature=temperature).params(seed=seed))
    matrix = reward_matrix(trajectories, rewards.names, 1)
    scores = (scalar or ScalarOptions()).combine(matrix, rewards.weights)[:, 0].tolist()
    named = dict(zip(rewards.names, matrix.mean((0, 2)).tolist(), strict=True))
    return {
        "reward": sum(scores) / len(scores),
        "rewards": named,
        "scores": scores,
        "samples": [_shown(trajectory) for trajectory in trajectories[:16]],
    }


def pass_rates(
    complete: Complete, rows: Sequence[dict], rewards: Rewards, config: PolicyConfig, *, seed: int = 0
) -> dict[str, dict[str, float]]:
    """pass@k of each k of ``config.pass_at``, with its interval over the rows: {"pass@4": {"mean", "low", "high", …}}.

    A completion passes with a reward of at least ``config.correct_reward``. ``config.pass_samples`` completions of each
    row are drawn as for training, by the run's ``seed``.
    """
    samples = config.pass_samples or max(config.pass_at)
    trajectories = scored(complete, rewards, rows, config.sampling.params(n=samples, seed=seed))
    earned = config.scalar.combine(reward_matrix(trajectories, rewards.names, samples), rewards.weights)
    correct = (earned >= config.correct_reward).sum(1, dtype=torch.int32)
    total = torch.full_like(correct, samples)
    return {f"pass@{k}": interval(_pass_at_k(correct, total, k).tolist()) for k in config.pass_at}


def interval(scores: Sequence[float]) -> dict[str, float]:
    """The mean of ``scores`` and its bootstrap interval over the rows."""
    return confidence_interval(scores, [0.0] * len(scores), resamples=RESAMPLES)


class Evaluator:
    """Evaluates every so many steps and after the last one; several rewards go into the archive."""

    def __init__(
        self,
        complete: Complete,
        rewards: Rewards,
        rows: Sequence[dict],
        config: PolicyConfig,
        archive: Archive | None,
        *,
        seed: int = 0,
    ) -> None:
        self._complete, self._rewards, self._rows, self._seed = complete, rewards, rows, seed
        self._config, self.archive = config, archive

    def due(self, step: int) -> bool:
        """Whether the step is followed by an evaluation."""
        return (step + 1) % self._config.evaluate_every == 0 or step + 1 == self._config.steps

    def metrics(self, step: int) -> dict[str, float]:
        """What the record of a step shows of the present weights."""
        config = self._config
        found = evaluate(
            self._complete, self._rows, self._rewards, config.sampling, scalar=config.scalar, seed=self._seed
        )
        named = {"held_out": interval(found["scores"])}
        if config.pass_at:
            named |= pass_rates(self._complete, self._rows, self._rewards, config, seed=self._seed)
        metrics = {name: values["mean"] for name, values in named.items()} | {"held_out": found["reward"]}
        metrics |= {f"{name}_{end}": values[end] for name, values in named.items() for end in ("low", "high")}
        if self.archive is not None:
            metrics |= {f"held_out/{name}": value for name, value in found["rewards"].items()}
            self.archive.insert(found["rewards"], step + 1)
        return metrics


def _shown(trajectory: Trajectory) -> Mapping[str, Any]:
    row = trajectory.row
    completion = {"prompt": row["prompt"], "completion": trajectory.completion, "answer": row.get("answer")}
    return completion | dict(trajectory.rewards)
