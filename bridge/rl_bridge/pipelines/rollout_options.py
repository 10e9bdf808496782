"""Options of a run's rollouts: which engine samples, environments to talk to, how far they run ahead of training."""

import copy
import hashlib
import importlib.util
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from rl_bridge.algorithms.ahead_sampler import AheadSampler
from rl_bridge.algorithms.completions import Complete, completions
from rl_bridge.algorithms.policy_setup import PolicyConfig
from rl_bridge.common.argument_kinds import check_options
from rl_bridge.common.scrubbing import scrubbed_path, scrubbed_text
from rl_bridge.common.terminal import given
from rl_bridge.common.user_marks import content_of
from rl_bridge.data.messages import Chat, arguments_of
from rl_bridge.data.rows import RowStream
from rl_bridge.data.trajectory import Budget, SamplingParams, Trajectory
from rl_bridge.engines import InferenceEngine
from rl_bridge.environments import EnvironmentFactory, load_environment
from rl_bridge.environments.trial import try_environment
from rl_bridge.models.left_out import LeftOut
from rl_bridge.models.model_source import ModelSource
from rl_bridge.models.own_model import OwnSource
from rl_bridge.models.row_checks import longest_sequence, require_room
from rl_bridge.models.turn_template import TurnTemplate, UnusableTemplate
from rl_bridge.rewards import RewardOptions, Rewards, load
from rl_bridge.rewards.sources import named
from rl_bridge.rollout import InProcessRollout
from rl_bridge.rollout.ahead.environment_turns import Talking
from rl_bridge.rollout.ahead.pumps import Admission, Pace
from rl_bridge.rollout.conversations import Limits
from rl_bridge.rollout.inprocess import Precision
from rl_bridge.rollout.vllm import VLLMOptions
from rl_bridge.run.options import MAY_CHANGE, require_used
from rl_bridge.run.provenance import read_provenance
from rl_fn import Objective


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """The engine of the rollouts."""

    backend: Literal["in_process", "vllm", "vllm_server"] = "in_process"
    """in_process: transformers' own model, on any device. vllm: an engine of vLLM in each worker (docs/rollouts.md).
    vllm_server: a server process of vLLM beside each worker, started again if it dies."""
    precision: Precision = "fp32"
    """Precision of the linear layers of an in_process rollout; vllm has ``--rollout.vllm.precision``."""
    vllm: VLLMOptions = VLLMOptions()
    """Options of an engine of vLLM."""
    step_seconds: float | None = None
    """Seconds for the completions of a training step (a round of them, with ``--policy.sampling-rounds``). Completions
    that are unfinished then are aborted and do not count. Such a run is not reproducible, as time is not."""
    step_tokens: int | None = None
    """Tokens that the policy draws in a training step; each worker has an equal share. Completions that are unfinished
    then are aborted likewise."""
    request_seconds: float | None = None
    """Seconds for one completion, or one conversation from its opening. The completions of a step begin together."""

    def __post_init__(self) -> None:
        """Refuse options that nothing reads, and limits that leave no token."""
        check_options(self)
        self.budget()
        if self.backend != "in_process" and self.precision != "fp32":
            raise ValueError(f"an engine of vLLM has --rollout.vllm.precision, got precision {self.precision}")
        if self.backend == "in_process" and self.vllm != VLLMOptions():
            raise ValueError(f"options of vLLM need backend vllm, got backend {self.backend} and {self.vllm}")

    def budget(self) -> dict[str, Any]:
        """The limits of a step, as the methods of an engine have them."""
        limits = {"seconds": self.step_seconds, "request_seconds": self.request_seconds, "tokens": self.step_tokens}
        try:
            Budget(**limits)  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"{error} ({given(self, 'step_seconds', 'request_seconds', 'step_tokens')})") from error
        return {name: value for name, value in limits.items() if value is not None}

    @property
    def exact(self) -> bool:
        """Whether the engine computes as a trainer in float32 does, but for the order of sums."""
        if self.backend == "in_process":
            return self.precision == "fp32"
        precisions = {self.vllm.precision, *self.vllm.rank_precisions}
        return precisions == {"fp32"} and self.vllm.activations == "float32"

    def draws(self) -> dict[str, Any]:
        """All that decides what the engine draws from the same weights and seeds, beyond the order of sums."""
        of_vllm = (self.vllm.precision, self.vllm.rank_precisions, self.vllm.activations)
        rounded = self.precision if self.backend == "in_process" else of_vllm
        return {"precision": None if self.exact else rounded, "longest": self.vllm.max_model_len}

    def require_own(self, name: str) -> None:
        """Refuse what needs to know the layers of a model, for the class ``name`` of the user's own.

        Raises:
            ValueError: vLLM, or another precision than fp32.
        """
        if self.backend != "in_process":
            raise ValueError(
                f"vLLM has no model {name}, a class of your own: backend in_process draws from it, got {self.backend}"
            )
        if self.precision != "fp32":
            raise ValueError(
                f"{name} is a class of your own: which of its layers is the head, which {self.precision} leaves as it "
                "is, is not known; take precision fp32"
            )

    def factory(self, source: ModelSource, tokenizer: PreTrainedTokenizerBase, *, sleep: bool) -> Callable[[], Any]:
        """Makes a worker. ``sleep``: it will have to leave its device while others work there.

        Raises:
            ValueError: there is no vLLM here, or a server would have to leave its device; or vLLM or int8 for a model
                class of the user's own.
        """
        if isinstance(source, OwnSource):
            self.require_own(source.name)
        if self.backend == "in_process":
            return partial(InProcessRollout, source, tokenizer, precision=self.precision)
        if importlib.util.find_spec("vllm") is None:
            raise ValueError(
                f"backend {self.backend} needs vLLM in this environment: make install-vllm makes one with it"
            )
        if self.backend == "vllm_server":
            if sleep:
                raise ValueError(
                    "a server of vLLM keeps its device: give the rollouts workers of their own "
                    "(--asynchronous.rollout-workers), or take backend vllm"
                )
            return partial(_served_rollout, source, tokenizer, self.vllm)
        return partial(_vllm_rollout, source, tokenizer, replace(self.vllm, sleep=self.vllm.sleep or sleep))


def _vllm_rollout(source: ModelSource, tokenizer: PreTrainedTokenizerBase, options: VLLMOptions) -> Any:
    from rl_bridge.rollout.vllm.vllm_rollout import VLLMRollout

    return VLLMRollout(source, tokenizer, options)


def _served_rollout(source: ModelSource, tokenizer: PreTrainedTokenizerBase, options: VLLMOptions) -> Any:
    from rl_bridge.rollout.served import ServedRollout

    return ServedRollout(source, tokenizer, options)


@dataclass(frozen=True, kw_only=True)
class EnvironmentOptions(RewardOptions):
    """The environment that the policy talks to. Without ``environment`` a completion is one turn."""

    environment: str | None = field(default=None, metadata=MAY_CHANGE)
    """``FILE.py:Name`` of a class with reset and step, or of RL2's ``interact(messages)``; or the address of an OpenEnv
    server. Its rewards are those of the run unless ``reward`` names others (``environment`` among them)."""
    max_turns: int = 4
    """Turns of the policy in one conversation, each of at most ``policy.sampling.max_new_tokens``."""
    max_trajectory_tokens: int | None = None
    """Tokens of a whole conversation, the environment's included. None: the model's positions."""
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

    @property
    def longest_conversation(self) -> float | None:
        """Tokens of a conversation, ∞ without a limit of its own; None: there is one turn."""
        return None if self.environment is None else float(self.max_trajectory_tokens or math.inf)

    def rewards(self) -> Rewards:
        """The named rewards, or the environment's own."""
        if self.environment is None or self.reward:
            return super().rewards()
        return load(("environment",), weights=self.reward_weights)

    def environments(self, source: ModelSource) -> EnvironmentFactory | None:
        """The factory of the environments, which a policy of this source talks to; None: there are none.

        Raises:
            FileNotFoundError: there is no such environment file.
            ValueError: the file has no such environment, or conversations may be longer than the model has positions.
        """
        if self.environment is None:
            return None
        with torch.device("meta"):
            longest = longest_sequence(source.empty())
        self._require_room(longest)
        return load_environment(self.environment)

    def tried(
        self,
        environment: EnvironmentFactory | None,
        rows: Sequence[Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        resumed: Path | None = None,
    ) -> EnvironmentFactory | None:
        """The environment, once it has begun a conversation and answered an empty turn: before a warm start.

        ``resumed``: the folder of the run that goes on. An environment that this run had already is not tried again: a
        trial is slow, and may fail where the run would not.

        Raises:
            ValueError: it fails, or the chat template cannot write the first messages.
        """
        if environment is None or (resumed is not None and self._ran_in(resumed)):
            return environment
        in_thread = not self.environment_processes
        begun = try_environment(environment, rows, limit=self.environment_timeout, in_thread=in_thread)
        if begun is not None:
            row, first, tools = begun
            try:
                TurnTemplate(tokenizer).opening(Chat(first.messages, tools, arguments_of(row)))
            except (UnusableTemplate, LeftOut):
                raise
            except ValueError:
                pass  # of this row alone: its conversations fail, and others begin
        return environment

    def _ran_in(self, folder: Path) -> bool:
        """Whether the run of this folder had the same environment, in processes or in threads as now."""
        try:
            before = read_provenance(folder)[-1]["fingerprints"]
            config = json.loads((folder / "config.json").read_text("utf-8"))
            processes, moved = config["environment_processes"], False
            if "://" in str(self.environment):  # a server at another address may not answer there
                moved = config["environment"] != scrubbed_text(str(self.environment))
            same = self.environment_fingerprint().items() <= before.items() and not moved
        except (OSError, ValueError, LookupError, TypeError, AttributeError):  # an older run's, or damaged
            return False
        return same and bool(processes) == bool(self.environment_processes)

    def require_engine(
        self,
        rollout: InferenceEngine,
        rows: Sequence[Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        sampling: SamplingParams,
    ) -> None:
        """Refuse what is longer than this engine holds, before a warm start that would be in vain.

        Raises:
            ValueError: with both numbers, and of rows without an environment the first few.
        """
        if self.environment is not None:
            self._require_room(rollout.ends()[1])
        elif (longest := rollout.narrower()) is not None:  # else the rows were compared with the model's positions
            require_room(longest, tokenizer, rows, sampling.max_new_tokens)

    def _require_room(self, longest: int | None) -> None:
        Limits(max_turns=self.max_turns, turn_tokens=1, all_tokens=self.max_trajectory_tokens, longest=longest)

    def complete(
        self, rollout: InferenceEngine, environment: EnvironmentFactory | None, budget: Mapping[str, Any] | None = None
    ) -> Complete:
        """The function that makes trajectories of rows. ``budget``: limits of a call, by the engine's names."""
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

    def environment_fingerprint(self) -> dict[str, str]:
        """The fingerprint of the environment's file and its imports, or of a server's path, which a resume compares."""
        if self.environment is None:
            return {}
        file, _, name = self.environment.rpartition(":")
        path = Path(file)
        mark = f"{name} {content_of(path)}" if path.is_file() else scrubbed_path(self.environment)
        return {"environment": hashlib.sha256(mark.encode()).hexdigest()[:16]}


def talking(
    rollout: InferenceEngine,
    environment: EnvironmentFactory,
    tokenizer: PreTrainedTokenizerBase,
    turn_tokens: int,
    *,
    max_turns: int,
    max_tokens: int | None,
    step_timeout: float,
    processes: int,
) -> Talking:
    """How conversations that run ahead of training are held. The limits are those of ``InferenceEngine.converse``."""
    stops, longest = rollout.ends()
    return Talking(
        environment=environment,
        limits=Limits(max_turns=max_turns, turn_tokens=turn_tokens, all_tokens=max_tokens, longest=longest),
        # The trainer's thread uses ``tokenizer``.
        template=TurnTemplate(copy.deepcopy(tokenizer), stops),
        step_timeout=step_timeout,
        processes=processes,
    )


@dataclass(frozen=True, kw_only=True)
class AsynchronousOptions:
    """How far rollouts run ahead of training, and when they take new weights."""

    max_staleness: int = 0
    """Training steps, at most, between the weights that drew a token and the weights that train on the token. 0: a step
    begins with its rollout. 1: one step ahead."""
    partial: bool = False
    """Completions go on across an update, each token with the version that drew it. Else a completion is of one
    version."""
    deterministic: bool = True
    """The same tokens are drawn by the same versions in every run, however long each part takes. Else the rollout takes
    new weights when there are any."""
    tokens_beside: int | None = None
    """Tokens of each completion drawn beside one training step, of deterministic partial rollouts."""
    round_tokens: int = 8
    """Tokens of each completion from one look at the trainer to the next."""
    window: int = 1
    """Prompts among which a step may choose its own, passing over unfinished ones. 1: in the order of the data."""
    request_seconds: float | None = field(default=None, metadata=MAY_CHANGE)
    """Seconds in the engine after which a completion is aborted. An aborted completion does not count."""
    rollout_workers: int | None = field(default=None, metadata=MAY_CHANGE)
    """Workers that draw and do not train, so that both happen at once. None: all workers do both, in turns."""

    def __post_init__(self) -> None:
        """Refuse options that do not go together."""
        check_options(self)
        counts = (self.tokens_beside, self.round_tokens, self.rollout_workers)
        if self.max_staleness < 0 or any(count is not None and count < 1 for count in counts):
            raise ValueError(
                "counts must be ≥ 1 and max_staleness ≥ 0, got "
                f"{given(self, 'max_staleness', 'tokens_beside', 'round_tokens', 'rollout_workers')}"
            )
        if not self.on:
            names = ("partial", "deterministic", "tokens_beside", "window", "request_seconds")
            if any(option.default != getattr(self, option.name) for option in fields(self) if option.name in names):
                raise ValueError(f"without max_staleness nothing runs ahead, got {given(self, *names)}")
        elif self.deterministic and self.window > 1:
            raise ValueError("a window lets prompts pass each other as they come: it needs deterministic=False")
        else:
            self.pace(1)

    @property
    def on(self) -> bool:
        """Whether anything runs ahead."""
        return self.max_staleness > 0

    def pace(self, max_new_tokens: int) -> Pace:
        """When the rollout stops for new weights.

        Raises:
            ValueError: options that do not go together.
        """
        beside = self.tokens_beside
        return Pace(
            partial=self.partial,
            deterministic=self.deterministic,
            rounds=None if beside is None else -(-beside // self.round_tokens),
            steps=self.round_tokens,
            limit=max_new_tokens,
            seconds=self.request_seconds,
        )

    def admission(self, config: PolicyConfig) -> Admission:
        """Which prompts may be in the rollout."""
        return Admission(
            max_staleness=self.max_staleness,
            prompts_per_step=config.prompts_per_step,
            window=self.window,
            steps=config.steps,
        )

    def sampler(
        self,
        rollout: InferenceEngine,
        *,
        tokenizer: PreTrainedTokenizerBase,
        rewards: Rewards,
        stream: RowStream,
        objective: Objective,
        config: PolicyConfig,
        seed: int,
        talking: Talking | None = None,
    ) -> AheadSampler:
        """The sampler of each step's completions, or with ``talking`` of its conversations."""
        return AheadSampler(
            rollout,
            tokenizer=tokenizer,
            rewards=rewards,
            stream=stream,
            objective=objective,
            config=config,
            seed=seed,
            admission=self.admission(config),
            pace=self.pace(config.sampling.max_new_tokens),
            lazy=not (self.partial or self.deterministic),
            talking=talking,
        )
