"""The engines that a policy is trained with: itself, its rollout, and the models that its objective asks for."""

from dataclasses import dataclass

from rl_bridge.engines import InferenceEngine, TrainEngine
from rl_bridge.trainers.policy_config import PolicyConfig, SamplingOptions
from rl_bridge.weights.proving import wants_proof
from rl_fn import Objective
from rl_fn.objectives.components import (
    GAE,
    CustomAdvantage,
    DistillationAdvantage,
    RawReward,
    ReinforcePPAdvantage,
    ReMaxAdvantage,
)

ALONE = (CustomAdvantage, DistillationAdvantage, GAE, RawReward, ReinforcePPAdvantage, ReMaxAdvantage)
"""Advantages that a single completion of a prompt has."""


@dataclass(frozen=True, kw_only=True)
class PolicyEngines:
    """``reference`` and ``teacher`` score tokens, ``critic`` gives values; what the objective does not read is None."""

    policy: TrainEngine
    rollout: InferenceEngine
    reference: TrainEngine | None = None
    critic: TrainEngine | None = None
    teacher: TrainEngine | None = None

    def state(self) -> dict[str, TrainEngine]:
        """What a checkpoint saves. The teacher's weights never change and have a source of their own."""
        engines = {"policy": self.policy, "reference": self.reference, "critic": self.critic}
        return {name: engine for name, engine in engines.items() if engine is not None}


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
        now = self._policy.replaced_engines
        self._before, self._now = now, now - self._before
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


def require_fit(engines: PolicyEngines, objective: Objective, config: PolicyConfig) -> None:
    """Refuse an objective with engines it does not go with.

    Raises:
        ValueError: an engine that is missing, other scoring than the policy's, statistics of the whole batch that is
            split over workers; see ``require_objective`` too.
    """
    require_same_scoring(engines.policy, engines.reference, config.sampling)
    require_objective(objective, config)
    name, parts = objective.name, engines.policy.mesh.data_parts
    if objective.over_batch and parts > 1:
        raise ValueError(
            f"{name} reads statistics of the whole batch, which is split over {parts} "
            f"workers ({engines.policy.mesh}): train it with replicate=1 and shard=1"
        )
    read = (*objective.required_rollout_fields, *objective.required_batch_fields)
    for field, engine in (("values", "critic"), ("teacher_logprobs", "teacher"), ("ref_logprobs", "reference")):
        if field in read and getattr(engines, engine) is None:
            raise ValueError(f"{name} reads {field}: it needs a {engine}")


def require_objective(objective: Objective, config: PolicyConfig) -> None:
    """Refuse a config that an objective cannot be trained with.

    Raises:
        ValueError: a group of one completion, refilling without dynamic sampling, a warm-up without a critic, a mean
            over prompts.
    """
    name, rounds = objective.name, config.sampling_rounds
    if config.responses_per_prompt < 2 and not isinstance(objective.advantage, ALONE):
        raise ValueError(f"{name} compares completions of one prompt: a group needs responses_per_prompt ≥ 2")
    if rounds > 1 and objective.dynamic_sampling is None:
        raise ValueError(f"sampling_rounds={rounds} refills what dynamic sampling leaves out: {name} has none")
    if config.critic_warmup and objective.value is None:
        raise ValueError(f"critic_warmup={config.critic_warmup}: {name} has no critic")
    if objective.aggregation.mode == "prompt-mean":
        raise ValueError(f"{name}: a micro-batch holds rows of several prompts, so prompt-mean cannot be trained with")


def require_same_scoring(policy: TrainEngine, reference: TrainEngine | None, sampling: SamplingOptions) -> None:
    """Refuse a policy or a reference that computes another distribution than the completions are sampled from."""
    scoring = policy.scoring_config()
    if scoring.temperature != sampling.temperature:
        raise ValueError(
            f"completions are sampled at temperature {sampling.temperature}, the policy is scored at "
            f"{scoring.temperature}: no ratio would start at 1"
        )
    if reference is not None and reference.scoring_config() != scoring:
        raise ValueError(
            f"the policy is scored with {scoring}, the reference with {reference.scoring_config()}: "
            "the KL of a model to its own copy would not be 0"
        )
