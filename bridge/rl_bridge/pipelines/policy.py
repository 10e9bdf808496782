"""GRPO post-training from a config: data, model, warm start, reinforcement learning, evaluation, results."""

import platform
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

import rl_fn
from rl_bridge.atomic import write_json
from rl_bridge.data.arithmetic import arithmetic_rows, split_rows
from rl_bridge.data.reading import read_rows
from rl_bridge.data.stream import RowStream
from rl_bridge.engines import InferenceEngine
from rl_bridge.executors import Executor
from rl_bridge.models.encoding import encode_row
from rl_bridge.models.loading import new_for_rows, pretrained, save_pretrained
from rl_bridge.models.source import ModelSource
from rl_bridge.parallel.config import ParallelConfig
from rl_bridge.pipelines.objective import ALGORITHMS, Algorithm, require_rewards_alone
from rl_bridge.pipelines.placement import Engines, PlacementOptions, set_threads
from rl_bridge.rewards import Reward, exact_match, load_reward
from rl_bridge.tracking.fingerprints import of_function, of_rows
from rl_bridge.tracking.intervals import confidence_interval
from rl_bridge.tracking.options import MAY_CHANGE, RunOptions
from rl_bridge.tracking.run import open_run
from rl_bridge.trainers.modules.optimizer import OptimizerConfig
from rl_bridge.trainers.modules.scoring import ScoringConfig
from rl_bridge.trainers.policy import evaluate, train_policy
from rl_bridge.trainers.policy_config import PolicyConfig
from rl_bridge.trainers.sft import SFTConfig, train_sft


@dataclass(frozen=True, kw_only=True)
class PolicyPipeline(RunOptions, PlacementOptions):
    """Everything a run depends on. Without ``data`` it is two-digit addition, without ``model`` a tiny new Qwen2."""

    policy: PolicyConfig
    optimizer: OptimizerConfig
    objective: Algorithm = field(default_factory=ALGORITHMS["dapo"])
    sft: SFTConfig = SFTConfig()
    name: str = field(default="policy", metadata=MAY_CHANGE)
    seed: int = 0
    model: str | None = None
    """Folder or hub id in Hugging Face format."""
    data: str | None = field(default=None, metadata=MAY_CHANGE)
    """JSON, JSONL, CSV, Parquet or Arrow file, or a Hugging Face dataset; rows have ``prompt`` (and ``answer``)."""
    eval_data: str | None = field(default=None, metadata=MAY_CHANGE)
    """Held-out rows; None holds ``held_out`` rows of ``data`` back."""
    held_out: int = 600
    reward: str | None = field(default=None, metadata=MAY_CHANGE)
    """``FILE.py:function`` called with (completion, row); None compares with the row's ``answer``."""
    track_kl: bool = True
    """Measure the KL to the policy GRPO started from even if the objective has no KL term; costs a forward pass."""
    micro_batch_tokens: int = 16384
    """Tokens of one forward pass of the trainer. More cost memory, and fewer cost time."""
    packing: bool = False
    """The trainer's rows lie one behind another instead of each padded: faster where their lengths differ much."""
    softcap: float | None = None
    """A cap of the logits beyond the model's own, for policy and reference alike."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the trainer's matrix products."""
    threads: int | None = field(default=None, metadata=MAY_CHANGE)
    """CPU threads of each worker; None takes torch's default."""

    def __post_init__(self) -> None:
        """Refuse a policy that the completions were not sampled from, and counts below 1."""
        super().__post_init__()
        for option in ("held_out", "threads"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise ValueError(f"{option} must be at least 1, got {value}")
        scoring = self.scoring()
        if (scoring.softcap is not None or scoring.dtype != "float32") and not self.policy.recompute_old_logprobs:
            # The rollout samples in float32 and knows no cap but the model's own.
            raise ValueError("softcap and dtype bfloat16 need recompute_old_logprobs=True: sampling has neither")

    def scoring(self) -> ScoringConfig:
        """How policy, old policy and reference of this run are scored."""
        return ScoringConfig(
            temperature=self.policy.sampling.temperature,
            micro_batch_tokens=self.micro_batch_tokens,
            packing=self.packing,
            softcap=self.softcap,
            dtype=self.dtype,
        )


def run_policy(pipeline: PolicyPipeline) -> dict[str, Any]:
    """Run the pipeline to its end and return the summary that ``summary.json`` holds."""
    executor = pipeline.start()
    reward = exact_match if pipeline.reward is None else load_reward(pipeline.reward)
    train_rows, held_out = rows_of(pipeline)
    objective = prepare(pipeline, executor)
    if pipeline.model is None:
        source, tokenizer = new_for_rows([*train_rows, *held_out], seed=pipeline.seed)
    else:
        source, tokenizer = pretrained(pipeline.model)
    return train_and_evaluate(pipeline, executor, source, tokenizer, train_rows, held_out, reward, objective)


def prepare(pipeline: PolicyPipeline, executor: Executor) -> rl_fn.Objective:
    """Threads and seeds of the processes, and the objective: what comes before a model is made."""
    if pipeline.threads is not None:
        torch.set_num_threads(pipeline.threads)
        threads = {slot.index: (pipeline.threads,) for slot in executor.slots}
        executor.call(set_threads, threads, what="set_threads", timeout=60)
    seed_everything(pipeline.seed)
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
    engines = Engines(executor, mesh, source, ParallelConfig(), run=folder.name)
    pad, scoring = tokenizer.pad_token_id, pipeline.scoring()
    assert isinstance(pad, int)
    with engines, open_run(folder, pipeline, fingerprints) as run:
        run.keep_best("held_out")
        rollout = engines.rollout(tokenizer)
        # Supervision has the data's own distribution for a target, which has no temperature.
        supervised = engines.supervised(
            pipeline.sft.optimizer, updates=pipeline.sft.steps, scoring=replace(scoring, temperature=1.0)
        )
        stream = RowStream(train_rows, seed=pipeline.seed)
        train_sft(run, supervised, stream, lambda row: encode_row(tokenizer, row), pipeline.sft, pad_token_id=pad)
        supervised.sync_weights(rollout)
        before = run.cached_result("before", lambda: evaluate_both(rollout, held_out, reward, pipeline.policy))
        run.print(f"held-out accuracy before GRPO: {before['greedy']['reward']:.3f}")

        updates = pipeline.policy.steps * pipeline.policy.updates_per_step
        policy = engines.policy(pipeline.optimizer, objective, updates=updates, scoring=scoring)
        supervised.sync_weights(policy)
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
            "seed": pipeline.seed,
            "parameters": parameters_of(source),
            "objective": objective.explain(),
            "versions": versions(),
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
    rows = arithmetic_rows(["+"]) if pipeline.data is None else read_rows(pipeline.data, fields=fields)
    if pipeline.eval_data is not None:
        return rows, read_rows(pipeline.eval_data, fields=fields)
    return split_rows(rows, pipeline.held_out, pipeline.seed)


def parameters_of(source: ModelSource) -> int:
    """How many numbers the model has; tied ones count once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in source.empty().parameters())


def seed_everything(seed: int) -> None:
    """Every global generator: what a user's model or reward samples from is reproducible too."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def versions() -> dict[str, str]:
    """What the result was made with."""
    packages = ("rl-fn", "jax", "torch", "transformers", "numpy")
    return {"python": platform.python_version()} | {name: version(name) for name in packages}
