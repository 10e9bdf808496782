"""Evaluation on held-out rows: mean reward, its interval, pass@k, completions to read, the Pareto front of rewards."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

import rl_fn
from rl_bridge.algorithms.completions import Complete, failures, has_ended, reward_matrix, scored
from rl_bridge.algorithms.policy_setup import PolicyConfig, ScalarOptions
from rl_bridge.common.files import replacing, write_json
from rl_bridge.common.plots import Figure, spared
from rl_bridge.common.statistics import confidence_interval
from rl_bridge.common.terminal import tell
from rl_bridge.data.trajectory import SamplingParams, Trajectory
from rl_bridge.functional import from_jax
from rl_bridge.rewards import RewardError, Rewards

# The Pareto front of several rewards over a run: which steps no other step beats in all of them.

CAPACITY = 64


class Archive:
    """Held-out means of two or more rewards at each evaluation; ``pareto.json`` and ``pareto.png`` in ``folder``."""

    def __init__(self, names: Sequence[str], folder: Path, mark: str = "") -> None:
        """``mark``: the fingerprint of the evaluation, of which all points are."""
        self.names, self.folder, self._mark = tuple(names), folder, mark
        self._archive = rl_fn.pareto_archive(CAPACITY, len(self.names), maximize=True)
        self._state = self._archive.init()
        self._points: list[dict[str, Any]] = []

    def insert(self, rewards: Mapping[str, float], step: int) -> None:
        """Take in the rewards after ``step`` steps, and write pareto.json anew."""
        self._add({"step": step, **rewards})
        write_json(
            self.folder / "pareto.json", {"names": self.names, "front": self.front(), "evaluations": self._points}
        )

    def front(self) -> list[dict[str, Any]]:
        """The steps that no other beats, with their rewards."""
        occupied = np.asarray(self._state.used)
        points, steps = (np.asarray(part)[occupied].tolist() for part in (self._state.points, self._state.tags))
        rewards = (dict(zip(self.names, point, strict=True)) for point in points)
        return [{"step": step, **point} for step, point in zip(steps, rewards, strict=True)]

    def checkpoint_state(self) -> dict[str, Any]:
        """The points that were inserted; the front is a function of them."""
        return {"names": list(self.names), "mark": self._mark, "seen": json.loads(json.dumps(self._points))}

    def load_checkpoint_state(self, state: dict[str, Any]) -> None:
        """Take back what ``checkpoint_state`` gave; other rewards, or another evaluation, raise ValueError."""
        if tuple(state["names"]) != self.names:
            raise ValueError(f"the checkpoint has the rewards {state['names']}, this run has {list(self.names)}")
        if state.get("mark", self._mark) != self._mark:
            raise ValueError("the checkpoint's rewards were measured otherwise than those of this run")
        self._state, self._points = self._archive.init(), []
        for point in state["seen"]:
            self._add(point)

    def _add(self, point: dict[str, Any]) -> None:
        values = jnp.asarray([point[name] for name in self.names], jnp.float32)
        self._state = self._archive.insert(self._state, values, point["step"])
        self._points.append(point)

    def draw(self) -> None:
        """pareto.png, the first two rewards against each other: every evaluation, and the front in bold."""
        x, y = self.names[:2]
        figure = Figure(figsize=(6, 5), layout="constrained")
        axis = figure.subplots()
        evaluations = [p[x] for p in self._points], [p[y] for p in self._points]
        axis.plot(*evaluations, "o", color="C0", alpha=0.35, label="evaluations")
        front = sorted(self.front(), key=lambda point: point[x])
        axis.plot([p[x] for p in front], [p[y] for p in front], "o-", color="C1", label="no other is better in all")
        for point in front:
            axis.annotate(str(point["step"]), (point[x], point[y]), (3, 3), textcoords="offset points", fontsize=7)
        axis.set(xlabel=x, ylabel=y, title=f"{self.folder.name}: held-out rewards")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
        with replacing(self.folder / "pareto.png") as temporary:
            figure.savefig(temporary, format="png", dpi=110)


# The evaluation: mean reward with its interval, pass@k, and a few completions to read.

_pass_at_k = from_jax(rl_fn.pass_at_k)
RESAMPLES = 2000


def evaluate(
    complete: Complete,
    rows: Sequence[dict],
    rewards: Rewards,
    sampling: SamplingParams,
    *,
    temperature: float = 0.0,
    scalar: ScalarOptions | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """One completion of each of ``rows``, greedy by default: the mean reward, each score, and the first few to read.

    ``n`` and ``seed`` of ``sampling`` are not read: those of an evaluation are 1 and the run's.

    A score is None where no reward applies, or where the completion failed: neither is in a mean. The shares that
    failed are ``errors`` and ``aborted``, where there are any.

    ``seed``: the run's. It is the same in all evaluations of a run, so that before and after draw by the same numbers.

    Raises:
        RewardError: every completion failed, or a reward applies to none.
    """
    trajectories = scored(complete, rewards, rows, replace(sampling, temperature=temperature, n=1, seed=seed))
    require_ended(trajectories)
    matrix = _of_ended(trajectories, rewards, 1)
    scores = (scalar or ScalarOptions()).combine(matrix, rewards.weights)[:, 0].tolist()
    applies = ~matrix.isnan()
    for name, some in zip(rewards.names, applies.any(2).any(0).tolist(), strict=True):
        if not some:
            count = sum(map(has_ended, trajectories))
            raise RewardError(f"reward {name} returned None for all {count} held-out completions")
    means = matrix.nanmean((0, 2)) if not bool(applies.all()) else matrix.mean((0, 2))
    present = [score for score in scores if not math.isnan(score)]
    return {
        "reward": sum(present) / len(present),
        "rewards": dict(zip(rewards.names, means.tolist(), strict=True)),
        "scores": [None if math.isnan(score) else score for score in scores],
        "samples": [_row_of(trajectory) for trajectory in trajectories[:16]],
        **failures(trajectories),
    }


def require_ended(trajectories: Sequence[Trajectory]) -> None:
    """Refuse an evaluation in which nothing came to its end.

    Raises:
        RewardError: with the number of completions and the way on.
    """
    if not any(map(has_ended, trajectories)):
        reasons = [trajectory.finish_reason for trajectory in trajectories]
        raise RewardError(
            f"nothing to measure is left of {len(reasons)} held-out completions: an environment failed in "
            f"{reasons.count('error')}, which warnings name, and {reasons.count('abort')} were given up at a limit of "
            "the rollout's time or tokens"
        )


def _of_ended(trajectories: Sequence[Trajectory], rewards: Rewards, responses: int) -> torch.Tensor:
    """``reward_matrix`` with NaN, no reward, for what failed."""
    failed = torch.tensor([not has_ended(trajectory) for trajectory in trajectories]).view(-1, 1, responses)
    return reward_matrix(trajectories, rewards.names, responses).masked_fill(failed, torch.nan)


def write_samples(folder: Path, **evaluations: dict[str, dict[str, Any]] | None) -> None:
    """samples.json: some held-out completions of each evaluation that there is, to read."""
    samples = {
        when: {how: metrics["samples"] for how, metrics in both.items()}
        for when, both in evaluations.items()
        if both is not None
    }
    write_json(folder / "samples.json", samples)


def evaluate_both(
    complete: Complete, rows: Sequence[dict], rewards: Rewards, config: PolicyConfig, seed: int
) -> dict[str, dict[str, Any]]:
    """Completions of held-out prompts, greedy and at the temperature of training."""
    options: dict[str, Any] = {"scalar": config.scalar, "seed": seed}
    temperatures = {"sampled": config.sampling.temperature, "greedy": 0.0}
    metrics = {
        name: evaluate(complete, rows, rewards, config.sampling, temperature=temperature, **options)
        for name, temperature in temperatures.items()
    }
    for name, results in metrics.items():
        if failed := results.get("errors", 0.0) + results.get("aborted", 0.0):
            tell(f"{failed:.1%} of the held-out completions ({name}) failed, and are in no mean")
    return {"greedy": metrics["greedy"], "sampled": metrics["sampled"]}


def pass_rates(
    complete: Complete, rows: Sequence[dict], rewards: Rewards, config: PolicyConfig, *, seed: int = 0
) -> dict[str, dict[str, float]]:
    """pass@k of each k of ``config.pass_at``, with its interval over the rows: {"pass@4": {"mean", "low", "high", …}}.

    A completion passes with a reward of at least ``config.correct_reward``. ``config.pass_samples`` completions of each
    row are drawn as for training, by the run's ``seed``.
    """
    samples = config.pass_samples or max(config.pass_at)
    trajectories = scored(complete, rewards, rows, replace(config.sampling, n=samples, seed=seed))
    earned = config.scalar.combine(_of_ended(trajectories, rewards, samples), rewards.weights)
    return pass_rates_of(earned, config.pass_at, config.correct_reward)


def pass_rates_of(earned: torch.Tensor, pass_at: Sequence[int], correct_reward: float) -> dict[str, dict[str, float]]:
    """pass@k of rewards [P, n], as ``pass_rates``."""
    correct = (earned >= correct_reward).sum(1, dtype=torch.int32)
    total = (~earned.isnan()).sum(1, dtype=torch.int32)
    rates = {}
    for k in pass_at:
        enough = total >= k  # of a row with fewer completions that count nothing is known
        if not bool(enough.any()):
            raise RewardError(
                f"pass@{k} needs {k} completions of a row to which a reward applies, and no row has as many that ended"
            )
        rates[f"pass@{k}"] = interval(_pass_at_k(correct[enough], total[enough], k).tolist())
    return rates


def interval(scores: Sequence[float | None]) -> dict[str, float]:
    """The mean of ``scores`` and its bootstrap interval over the rows that have one."""
    present = [score for score in scores if score is not None]
    return confidence_interval(present, [0.0] * len(present), resamples=RESAMPLES)


def gain(after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, float]:
    """The mean difference of two evaluations, and its interval over the rows that have a score in both."""
    pairs = [pair for pair in zip(after["scores"], before["scores"], strict=True) if None not in pair]
    return confidence_interval([one for one, _ in pairs], [one for _, one in pairs])


def with_ends(intervals: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Means and ends of intervals as metrics.

    >>> with_ends({"held_out": {"mean": 0.5, "low": 0.4, "high": 0.6}})
    {'held_out': 0.5, 'held_out_low': 0.4, 'held_out_high': 0.6}
    """
    means = {name: values["mean"] for name, values in intervals.items()}
    return means | {f"{name}_{end}": values[end] for name, values in intervals.items() for end in ("low", "high")}


class Evaluator:
    """Evaluates every so many steps and after the last one; several rewards go into the archive in ``folder``.

    It is a part of a run's state, for the archive.
    """

    kind = "held_out"

    def __init__(
        self,
        complete: Complete,
        rewards: Rewards,
        rows: Sequence[dict],
        config: PolicyConfig,
        folder: Path,
        *,
        seed: int = 0,
        mark: str = "",
    ) -> None:
        self._complete, self._rewards, self._rows, self._seed = complete, rewards, rows, seed
        self._config = config
        self.archive = Archive(rewards.names, folder, mark) if len(rewards.names) > 1 else None

    def both(self) -> dict[str, dict[str, Any]]:
        """The present weights, greedy and at the temperature of training."""
        return evaluate_both(self._complete, self._rows, self._rewards, self._config, self._seed)

    def draw(self) -> None:
        """pareto.png, where there are several rewards."""
        if self.archive is not None:
            with spared("pareto.png"):
                self.archive.draw()

    def parts(self) -> dict[str, Any]:
        """The archive, where there is one."""
        return {} if self.archive is None else {"archive": self.archive}

    def settings(self) -> dict[str, Any]:
        """Nothing that is not the run's own."""
        return {}

    def fingerprints(self) -> dict[str, str]:
        """Nothing that is not the run's own."""
        return {}

    def due(self, step: int) -> bool:
        """Whether the step is followed by an evaluation."""
        return (step + 1) % self._config.evaluate_every == 0 or step + 1 == self._config.steps

    def metrics(self, step: int) -> dict[str, float]:
        """Held-out metrics of the present weights, for the record of a step."""
        config = self._config
        results = evaluate(
            self._complete, self._rows, self._rewards, config.sampling, scalar=config.scalar, seed=self._seed
        )
        named = {"held_out": interval(results["scores"])}
        if config.pass_at:
            named |= pass_rates(self._complete, self._rows, self._rewards, config, seed=self._seed)
        failed = {f"held_out_{name}": results[name] for name in ("errors", "aborted") if name in results}
        metrics = with_ends(named) | {"held_out": results["reward"]} | failed
        if self.archive is not None:
            metrics |= {f"held_out/{name}": value for name, value in results["rewards"].items()}
            self.archive.insert(results["rewards"], step + 1)
        return metrics


def _row_of(trajectory: Trajectory) -> Mapping[str, Any]:
    row = trajectory.row
    completion = {"prompt": row["prompt"], "completion": trajectory.completion, "answer": row.get("answer")}
    if not has_ended(trajectory):
        return completion | dict.fromkeys(trajectory.rewards) | {"failed": trajectory.finish_reason}
    return completion | {name: None if math.isnan(value) else value for name, value in trajectory.rewards.items()}
