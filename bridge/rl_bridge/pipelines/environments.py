"""Options of a run whose policy talks to environments."""

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rl_bridge.data.requests import SamplingParams
from rl_bridge.data.trajectory import Trajectory
from rl_bridge.engines import InferenceEngine
from rl_bridge.environments import EnvironmentFactory, load_environment
from rl_bridge.models.source import ModelSource
from rl_bridge.models.turns import TurnTemplate
from rl_bridge.rewards import RewardOptions, Rewards, load
from rl_bridge.rewards.sources import named
from rl_bridge.rollout.asynchronous.talks import Talking
from rl_bridge.rollout.conversation import Limits
from rl_bridge.rollout.inprocess import stop_tokens
from rl_bridge.tracking.options import MAY_CHANGE, require_used
from rl_bridge.trainers.policy_config import SamplingOptions
from rl_bridge.trainers.policy_inputs.sampling import Complete, completions
from rl_bridge.user_files import content_of


@dataclass(frozen=True, kw_only=True)
class EnvironmentOptions(RewardOptions):
    """Where the answers to the policy's turns come from. Without ``environment`` a completion is one turn."""

    environment: str | None = field(default=None, metadata=MAY_CHANGE)
    """``FILE.py:Name`` of a class with reset and step, or of RL2's ``interact(messages)``; or the address of an OpenEnv
    server. Its rewards are those of the run unless ``reward`` names others (``environment`` among them)."""
    max_turns: int = 4
    """Turns of the policy in one conversation, each of at most ``policy.sampling.max_new_tokens``."""
    max_trajectory_tokens: int | None = None
    """Tokens of a whole conversation, the environment's included. None: no limit but the turns'."""
    environment_timeout: float = field(default=60.0, metadata=MAY_CHANGE)
    """Seconds for one answer of the environment; a conversation that waits longer ends."""
    environment_processes: int = field(default=0, metadata=MAY_CHANGE)
    """Environments that live at the same time in each worker, each in a process of its own, which is ended when an
    answer takes longer than ``environment_timeout``. 0: threads, which nothing can end while Python code loops."""

    def __post_init__(self) -> None:
        """Refuse limits that leave no turn, and what nothing would read."""
        super().__post_init__()
        if self.max_turns < 1 or not self.environment_timeout > 0 or self.environment_processes < 0:
            raise ValueError(
                "need max_turns ≥ 1, environment_timeout > 0 and environment_processes ≥ 0, got "
                f"{self.max_turns}, {self.environment_timeout} and {self.environment_processes}"
            )
        if self.max_trajectory_tokens is not None and self.max_trajectory_tokens < 1:
            raise ValueError(f"max_trajectory_tokens must be at least 1, got {self.max_trajectory_tokens}")
        if self.environment is None:
            names = ("max_turns", "max_trajectory_tokens", "environment_timeout", "environment_processes")
            require_used(self, names, "without --environment")
            if any(rest == "environment" for _, rest in map(named, self.reward)):
                raise ValueError("the reward environment is what --environment gives, and there is none")

    def rewards(self) -> Rewards:
        """The named rewards, or the environment's own."""
        if self.environment is None or self.reward:
            return super().rewards()
        return load(("environment",), weights=self.reward_weights)

    def environments(self) -> EnvironmentFactory | None:
        """What makes them.

        Raises:
            FileNotFoundError: there is no such environment file.
            ValueError: the file has no such environment.
        """
        return None if self.environment is None else load_environment(self.environment)

    def complete(
        self, rollout: InferenceEngine, environment: EnvironmentFactory | None, budget: Mapping[str, Any] | None = None
    ) -> Complete:
        """How the trajectories of rows are made. ``budget``: limits of a call, as the engine's methods have them."""
        if environment is None:
            return completions(rollout, **(budget or {}))
        limits: dict[str, Any] = {
            "max_tokens": self.max_trajectory_tokens,
            "step_timeout": self.environment_timeout,
            "processes": self.environment_processes,
            **(budget or {}),
        }

        def converse(rows: Sequence[dict[str, Any]], sampling: SamplingParams) -> list[Trajectory]:
            return rollout.converse(rows, sampling, environment, self.max_turns, **limits)

        return converse

    def talking(
        self,
        environment: EnvironmentFactory | None,
        source: ModelSource,
        tokenizer: PreTrainedTokenizerBase,
        sampling: SamplingOptions,
    ) -> Talking | None:
        """How conversations that run ahead of training are held; None: there are none."""
        if environment is None:
            return None
        with torch.device("meta"):
            stops = stop_tokens(source.empty(), tokenizer)
        return Talking(
            environment=environment,
            limits=Limits(
                max_turns=self.max_turns, turn_tokens=sampling.max_new_tokens, all_tokens=self.max_trajectory_tokens
            ),
            # The trainer's thread uses the other one.
            template=TurnTemplate(copy.deepcopy(tokenizer), stops),
            step_timeout=self.environment_timeout,
            processes=self.environment_processes,
        )

    def environment_fingerprint(self) -> dict[str, str]:
        """Of the environment's file and what it imports, which a resumed run compares."""
        if self.environment is None:
            return {}
        file, _, name = self.environment.rpartition(":")
        path = Path(file)
        content = content_of(path) if path.is_file() else self.environment
        return {"environment": hashlib.sha256(f"{name} {content}".encode()).hexdigest()[:16]}
