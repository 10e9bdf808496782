"""A step's completions, drawn and scored in the step itself: what rollouts that run ahead are compared with."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from rl_bridge.algorithms.completions import Complete, Sampled, baseline_of, rewarded
from rl_bridge.algorithms.policy_setup import PolicyConfig, PolicyEngines
from rl_bridge.data.rows import RowStream
from rl_bridge.data.trajectory import SamplingParams, Trajectory
from rl_bridge.rewards import Rewards, with_rows
from rl_fn import Objective


class PlainSampler:
    """Has the methods of ``AheadSampler`` that a step calls, with nothing under way between two steps."""

    def __init__(
        self,
        complete: Complete,
        rewards: Rewards,
        stream: RowStream,
        objective: Objective,
        config: PolicyConfig,
        seed: int,
    ) -> None:
        self.complete, self.rewards, self.stream, self.config, self.seed = complete, rewards, stream, config, seed
        self._greedy = "greedy_rewards" in objective.required_rollout_fields
        limit = config.sampling.max_new_tokens
        self._making: dict[str, Any] = {"scalar": config.scalar, "overlong_buffer": config.overlong_buffer}
        self._making |= {"max_new_tokens": limit}

    def begin_step(self, engines: PolicyEngines) -> None:
        """The rollout gets the policy's weights."""
        engines.policy.sync_weights(engines.rollout)

    def sample(self, step: int) -> Sampled:
        """``prompts_per_step`` groups of the next rows, with rewards."""
        sampling = replace(self.config.sampling, seed=self.seed * 1_000_003 + step)
        rows = self.stream.take(self.config.prompts_per_step)
        trajectories = self._scored(rows, sampling)
        return rewarded(trajectories, self.rewards, sampling.n, greedy=self._baseline(rows), **self._making)

    def _baseline(self, rows: Sequence[dict[str, Any]]) -> torch.Tensor | None:
        if not self._greedy:
            return None
        greedy = self._scored(rows, replace(self.config.sampling, n=1).greedily())
        return baseline_of(greedy, self.rewards, **self._making)

    def _scored(self, rows: Sequence[dict[str, Any]], sampling: SamplingParams) -> list[Trajectory]:
        return self.rewards.score(with_rows(self.complete(rows, sampling), rows))
