"""GRPO post-training from a config: data, model, warm start, reinforcement learning, evaluation, results."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

import rl_fn
from rl_bridge.atomic import write_json
from rl_bridge.data.stream import RowStream
from rl_bridge.engines import InferenceEngine
from rl_bridge.executors import Executor
from rl_bridge.models.encoding import encode_row
from rl_bridge.models.loading import save_pretrained
from rl_bridge.models.source import ModelSource
from rl_bridge.pipelines.objective import ALGORITHMS, Algorithm, require_rewards_alone
from rl_bridge.pipelines.placement import Engines
from rl_bridge.pipelines.training import (
    TrainingOptions,
    common_summary,
    load_model,
    load_rows,
    prepare_processes,
)
from rl_bridge.rewards import Reward, exact_match, load_reward
from rl_bridge.tracking.fingerprints import of_function, of_rows
from rl_bridge.tracking.intervals import confidence_interval
from rl_bridge.tracking.options import MAY_CHANGE
from rl_bridge.tracking.run import open_run
from rl_bridge.trainers.modules.scoring import ScoringConfig
from rl_bridge.trainers.policy import evaluate, train_policy
from rl_bridge.trainers.policy_config import PolicyConfig
from rl_bridge.trainers.sft import SFTConfig, train_sft


@dataclass(frozen=True, kw_only=True)
class PolicyPipeline(TrainingOptions):
    """Everything a run depends on. Without ``data`` it is two-digit addition, without ``model`` a tiny new Qwen2."""

    policy: PolicyConfig
    objective: Algorithm = field(default_factory=ALGORITHMS["dapo"])
    sft: SFTConfig = SFTConfig()
    name: str = field(default="policy", metadata=MAY_CHANGE)
    reward: str | None = field(default=None, metadata=MAY_CHANGE)
    """``FILE.py:function`` called with (completion, row); None compares with the row's ``answer``."""
    track_kl: bool = True
    """Measure the KL to the policy GRPO started from even if the objective has no KL term; costs a forward pass."""

    def __post_init__(self) -> None:
        """Refuse a policy that the completions were not sampled from."""
        super().__post_init__()
        scoring = self.scoring()
        if (scoring.softcap is not None or scoring.dtype != "float32") and not self.policy.recompute_old_logprobs:
            # The rollout samples in float32 and knows no cap but the model's own.
            raise ValueError("softcap and dtype bfloat16 need recompute_old_logprobs=True: sampling has neither")

    def scoring(self, temperature: float | None = None) -> ScoringConfig:
        """How policy, old policy and reference of this run are scored: at the temperature of sampling."""
        return super().scoring(self.policy.sampling.temperature if temperature is None else temperature)


def run_policy(pipeline: PolicyPipeline) -> dict[str, Any]:
    """Run the pipeline to its end and return the summary that ``summary.json`` holds."""
    executor = pipeline.start()
    reward = exact_match if pipeline.reward is None else load_reward(pipeline.reward)
    train_rows, held_out = rows_of(pipeline)
    objective = prepare(pipeline, executor)
    source, tokenizer = load_model(pipeline, [*train_rows, *held_out])
    return train_and_evaluate(pipeline, executor, source, tokenizer, train_rows, held_out, reward, objective)


def prepare(pipeline: PolicyPipeline, executor: Executor) -> rl_fn.Objective:
    """Threads and seeds of the processes, and the objective: what comes before a model is made."""
    prepare_processes(pipeline, executor)
    objective = pipeline.objective.build()
    require_rewards_alone(objective)
    return objective


def train_and_evaluate(
    pipeline: PolicyPipeline,
    executor: Executor,
    source: ModelSource,
    tokenizer: PreTrainedTokenizerBase,
    train_rows: Sequence[dict],
    held_out: Sequence[dict],
    reward: Reward,
    objective: rl_fn.Objective,
) -> dict[str, Any]:
    """Warm start, reinforcement learning and evaluation, in the workers of ``executor``."""
    folder = pipeline.folder()
    # What the rows and the reward are, wherever their files lie now.
    fingerprints = {"data": of_rows(train_rows, held_out), "reward": of_function(reward)}
    mesh = pipeline.mesh.of(len(executor.slots))
    engines = Engines(executor, mesh, source, pipeline.parallel(), run=folder.name, trained=pipeline.trained(source))
    pad, scoring = tokenizer.pad_token_id, pipeline.scoring()
    assert isinstance(pad, int)
    with engines, open_run(folder, pipeline, fingerprints) as run:
        run.keep_best("held_out")
        rollout = engines.rollout(tokenizer)
        # Supervision has the data's own distribution for a target, which has no temperature.
        supervised = engines.supervised(
            pipeline.sft.optimizer, updates=pipeline.sft.steps, scoring=pipeline.scoring(1.0)
        )
        stream = RowStream(train_rows, seed=pipeline.seed)
        train_sft(run, supervised, stream, lambda row: encode_row(tokenizer, row), pipeline.sft, pad_token_id=pad)
        supervised.sync_weights(rollout)
        before = run.cached_result("before", lambda: evaluate_both(rollout, held_out, reward, pipeline.policy))
        run.print(f"held-out accuracy before GRPO: {before['greedy']['reward']:.3f}")

        updates = pipeline.policy.steps * pipeline.policy.updates_per_step
        policy = engines.policy(pipeline.optimizer, objective, updates=updates, scoring=scoring)
        supervised.sync_weights(policy, adapter=pipeline.lora.rank > 0)
        supervised.release()
        reference = engines.reference(scoring) if objective.kl is not None or pipeline.track_kl else None
        if reference is not None:
            policy.sync_weights(reference)
        train_policy(
            run,
            policy,
            rollout,
            stream,
            reward,
            objective,
            pipeline.policy,
            held_out=held_out,
            reference=reference,
            pad_token_id=pad,
            seed=pipeline.seed,
        )
        policy.sync_weights(rollout)  # a run resumed after its last step has made none
        after = evaluate_both(rollout, held_out, reward, pipeline.policy)
        save_pretrained(folder / "model", policy, tokenizer)
        evaluations = [("before", before), ("after", after)]
        write_json(
            folder / "samples.json",
            {when: {how: result["samples"] for how, result in results.items()} for when, results in evaluations},
        )
        accuracy = before["greedy"]["reward"], after["greedy"]["reward"]
        summary = {
            "result": "held-out accuracy {:.2f} → {:.2f}".format(*accuracy),
            "accuracy_before": before["greedy"]["reward"],
            "accuracy_after": after["greedy"]["reward"],
            "gain": confidence_interval(after["greedy"]["scores"], before["greedy"]["scores"]),
            "sampled_before": before["sampled"]["reward"],
            "sampled_after": after["sampled"]["reward"],
            "sampled_gain": confidence_interval(after["sampled"]["scores"], before["sampled"]["scores"]),
            "held_out": len(held_out),
            "seconds": round(run.seconds, 1),
            "objective": objective.explain(),
            **common_summary(pipeline, source),
        }
        run.finish(summary)
    return summary


def evaluate_both(
    rollout: InferenceEngine, rows: Sequence[dict], reward: Reward, config: PolicyConfig
) -> dict[str, dict[str, Any]]:
    """Completions of held-out prompts, greedy and at the temperature of training."""
    sampled = evaluate(rollout, rows, reward, config.sampling, temperature=config.sampling.temperature)
    return {"greedy": evaluate(rollout, rows, reward, config.sampling), "sampled": sampled}


def rows_of(pipeline: PolicyPipeline) -> tuple[list[dict], list[dict]]:
    """Rows to train on and rows held out."""
    fields = ("prompt", "answer") if pipeline.reward is None or pipeline.sft.steps else ("prompt",)
    return load_rows(pipeline, fields)
