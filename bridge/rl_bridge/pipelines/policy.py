"""GRPO post-training from a config: data, model, warm start, reinforcement learning, evaluation, results."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

import rl_fn
from rl_bridge.algorithms.coefficients import Coefficients
from rl_bridge.algorithms.completion_log import CompletionLog
from rl_bridge.algorithms.evaluation import Archive, Evaluator, evaluate
from rl_bridge.algorithms.policy_setup import PolicyConfig, PolicyEngines, SamplingOptions, require_objective
from rl_bridge.algorithms.policy_training import train_policy
from rl_bridge.algorithms.sampling import Complete, Sampler
from rl_bridge.algorithms.supervised_training import WarmStart, train_sft
from rl_bridge.common.files import write_json
from rl_bridge.common.plots import spared
from rl_bridge.common.statistics import confidence_interval
from rl_bridge.data.rows import RowStream, answered_row, policy_row
from rl_bridge.executors import Executor
from rl_bridge.models.encoding import encode_row
from rl_bridge.models.pretrained import pretrained, save_pretrained
from rl_bridge.models.row_checks import check_rows, prompted, supervised
from rl_bridge.models.source import ModelSource, PretrainedSource, PretrainedValueSource, ValueSource
from rl_bridge.modules.policy import require_token_local
from rl_bridge.modules.scoring import ScoringConfig
from rl_bridge.modules.trainable import OptimizerConfig
from rl_bridge.pipelines.objective_options import ALGORITHMS, Algorithm, ControlOptions, controlled, objective_options
from rl_bridge.pipelines.rollout_options import AsynchronousOptions, EnvironmentOptions, RolloutOptions
from rl_bridge.pipelines.training import (
    TrainingOptions,
    common_summary,
    load_model,
    load_rows,
    prepare_processes,
)
from rl_bridge.rewards import Reward, Rewards, load
from rl_bridge.rewards.sources import named
from rl_bridge.run.options import MAY_CHANGE, require_used
from rl_bridge.run.provenance import of_rows
from rl_bridge.run.run import Observer, open_run

# The models beside the policy: where its critic and its teacher come from.


@dataclass(frozen=True, kw_only=True)
class CriticOptions:
    """The model of the values, for an algorithm that has one (ppo, vapo)."""

    model: str | None = None
    """Folder or hub id of a value or reward model. None: the policy's own trunk with a head of zeros."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=3e-4, final=0.2)


def critic_source(
    options: CriticOptions, source: ModelSource, warm: Path | None, tokenizer: PreTrainedTokenizerBase
) -> ModelSource:
    """Where the critic comes from; ``warm`` is the policy after its warm start, where there was one."""
    if options.model is not None:
        return PretrainedValueSource(options.model)
    trunk = source if warm is None else PretrainedSource(str(warm))
    pad = tokenizer.pad_token_id
    return ValueSource(trunk, pad_token=pad if isinstance(pad, int) else None)


def require_critic(options: CriticOptions) -> None:
    """Refuse a folder that is no value model, before a run begins.

    Raises:
        ValueError: no such model, another head, or weights that do not fit.
    """
    if options.model is not None:
        source = PretrainedValueSource(options.model)
        with torch.device("meta"):
            source.check(source.empty())


def teacher_source(name: str, tokenizer: PreTrainedTokenizerBase) -> ModelSource:
    """Where the teacher comes from.

    Raises:
        ValueError: no such model, or its vocabulary is not the policy's: its probabilities would be of other tokens.
    """
    source, its_own = pretrained(name)
    # Tokens that the teacher has besides are never asked about.
    if other := tokenizer.get_vocab().items() - its_own.get_vocab().items():
        example = min(other, key=lambda pair: pair[1])
        raise ValueError(f"the teacher {name!r} has another vocabulary than the policy: it has no token {example}")
    return source


# GRPO post-training from a config: data, model, warm start, reinforcement learning, evaluation, results.


@dataclass(frozen=True, kw_only=True)
class PolicyPipeline(TrainingOptions, EnvironmentOptions):
    """Everything a run depends on. Without ``data`` it is two-digit addition, without ``model`` a tiny new Qwen2."""

    policy: PolicyConfig
    objective: Algorithm = field(default_factory=ALGORITHMS["dapo"])
    kl_control: ControlOptions = ControlOptions()
    """What sets the coefficient of the KL penalty from step to step."""
    entropy_control: ControlOptions = ControlOptions()
    """What sets the coefficient of the entropy bonus from step to step."""
    critic: CriticOptions = CriticOptions()
    teacher: str | None = None
    """Model that on-policy distillation learns from: a folder or hub id with the vocabulary of ``model``."""
    sft: WarmStart = WarmStart()
    name: str = field(default="policy", metadata=MAY_CHANGE)
    reward: tuple[str, ...] = field(default=(), metadata=MAY_CHANGE)
    """``FILE.py:function``, several with names of their own: ``right=a.py:right short=a.py:short``. None compares the
    completion with the row's ``answer`` (``exact``)."""
    rollout: RolloutOptions = RolloutOptions()
    """The engine that draws completions."""
    asynchronous: AsynchronousOptions = AsynchronousOptions()
    """Rollouts that run ahead of training."""
    fused_loss: bool = False
    """The head computes each logit once in an update, not twice: for losses in which no token reads another one."""
    track_kl: bool = True
    """Measure the KL to the policy GRPO started from even if the objective has no KL term; costs a forward pass. It is
    of the completions that an update computes, which without a KL or entropy term are those with an advantage."""
    samples_every: int = field(default=10, metadata=MAY_CHANGE)
    """Steps from one line of completions.jsonl to the next, 0 for none: what ``rl-fn report`` shows of each token."""
    samples_kept: int = field(default=4, metadata=MAY_CHANGE)
    """Completions of each such step that are kept."""

    def __post_init__(self) -> None:
        """Refuse a policy that the completions were not sampled from, and what nothing would read."""
        super().__post_init__()
        EnvironmentOptions.__post_init__(self)
        if self.samples_every < 0 or self.samples_kept < 1:
            raise ValueError(
                f"samples_every must be at least 0 and samples_kept at least 1, got {self.samples_every} and "
                f"{self.samples_kept}"
            )
        scoring = self.scoring()
        if (scoring.softcap is not None or scoring.dtype != "float32") and not self.policy.recompute_old_logprobs:
            # The rollout samples in float32 and knows no cap but the model's own.
            raise ValueError("softcap and dtype bfloat16 need recompute_old_logprobs=True: sampling has neither")
        if not self.rollout.exact and not self.policy.recompute_old_logprobs:
            raise ValueError("a rollout in lower precision needs recompute_old_logprobs=True: π_old is the trainer's")
        if self.asynchronous.on and self.offload == "phases":
            raise ValueError(
                "rollouts that run ahead of training draw beside them: there is no phase in which the trainer's or the "
                "engine's weights could leave the device (offload=phases)"
            )
        if self.asynchronous.on and self.rollout.budget():
            raise ValueError(
                "rollouts that run ahead of training have --asynchronous.request-seconds and no limits of a step, got "
                f"{self.rollout.budget()}"
            )
        if self.asynchronous.on and self.policy.sampling_rounds > 1:
            raise ValueError(
                "rollouts that run ahead of training do not go with --policy.sampling-rounds "
                f"{self.policy.sampling_rounds}: rewards would decide what may be drawn ahead"
            )
        self.asynchronous.admission(self.policy)
        if not self.samples_every:
            require_used(self, ("samples_kept",), "with --samples-every 0")
        objective = self.objective_and_coefficients()[0]
        require_objective(objective, self.policy)
        if objective.value is None:
            names = [option.name for option in fields(self.critic)]
            require_used(self.critic, names, f"with {objective.name}, which has no critic", part="critic")
        if "teacher_logprobs" not in objective.required_rollout_fields:
            require_used(self, ("teacher",), f"with {objective.name}, which learns from no teacher")
        elif self.teacher is None:
            raise ValueError(f"{objective.name} learns from a teacher: give --teacher MODEL")

    def objective_and_coefficients(self) -> tuple[rl_fn.Objective, Coefficients]:
        """The objective with its terms, and what sets their coefficients from step to step."""
        return controlled(self.objective.build(), self.kl_control, self.entropy_control, self.completions)

    def models(self) -> dict[str, str | None]:
        """The critic's and the teacher's besides."""
        return super().models() | {"critic's model": self.critic.model, "teacher": self.teacher}

    def fingerprints(self) -> dict[str, str]:
        """The environment's besides."""
        return super().fingerprints() | self.environment_fingerprint()

    @property
    def completions(self) -> int:
        """Of one step."""
        return self.policy.prompts_per_step * self.policy.responses_per_prompt

    def scoring(self, temperature: float | None = None) -> ScoringConfig:
        """How policy, old policy and reference of this run are scored: at the temperature of sampling."""
        return super().scoring(self.policy.sampling.temperature if temperature is None else temperature)


def run_policy(pipeline: PolicyPipeline, observers: Sequence[Observer] = ()) -> dict[str, Any]:
    """Run the pipeline to its end and return the summary that ``summary.json`` holds."""
    executor = pipeline.start()
    rewards = pipeline.rewards()
    train_rows, held_out = rows_of(pipeline)
    objective = prepare(pipeline, executor)
    source, tokenizer = load_model(pipeline, [*train_rows, *held_out])
    new_tokens = pipeline.policy.sampling.max_new_tokens
    check_rows(source, tokenizer, [*train_rows, *held_out], prompted(tokenizer), new_tokens=new_tokens)
    if pipeline.sft.steps:
        check_rows(source, tokenizer, train_rows, supervised(tokenizer))
    return train_and_evaluate(
        pipeline,
        executor,
        source,
        tokenizer,
        train_rows=train_rows,
        held_out=held_out,
        reward=rewards,
        objective=objective,
        observers=observers,
    )


def prepare(pipeline: PolicyPipeline, executor: Executor) -> rl_fn.Objective:
    """Threads and seeds of the processes, and the objective: what comes before a model is made."""
    prepare_processes(pipeline, executor)
    objective, _ = pipeline.objective_and_coefficients()
    if pipeline.fused_loss:
        require_token_local(objective)
    return objective


def train_and_evaluate(
    pipeline: PolicyPipeline,
    executor: Executor,
    source: ModelSource,
    tokenizer: PreTrainedTokenizerBase,
    *,
    train_rows: Sequence[dict],
    held_out: Sequence[dict],
    reward: Reward | Rewards,
    objective: rl_fn.Objective,
    observers: Sequence[Observer] = (),
) -> dict[str, Any]:
    """Warm start, reinforcement learning and evaluation, in the workers of ``executor``."""
    rewards = reward if isinstance(reward, Rewards) else load(reward)
    rewards.try_on(train_rows, tokenizer)
    environment = pipeline.environments()
    # What the rows and the reward are, wherever their files lie now.
    fingerprints = {"data": of_rows(train_rows, held_out), "reward": rewards.fingerprint} | pipeline.fingerprints()
    drawing = pipeline.asynchronous.rollout_workers
    mesh = pipeline.mesh.of(len(executor.slots) - (drawing or 0))
    engines = pipeline.engines(executor, mesh, source)
    engines.rollout_workers = drawing
    pad, scoring = tokenizer.pad_token_id, pipeline.scoring()
    assert isinstance(pad, int)
    config = pipeline.policy
    objective, coefficients = controlled(objective, pipeline.kl_control, pipeline.entropy_control, pipeline.completions)
    teacher = None if pipeline.teacher is None else teacher_source(pipeline.teacher, tokenizer)
    if objective.value is not None:
        require_critic(pipeline.critic)
    pipeline.rollout.factory(source, tokenizer, sleep=pipeline.offload == "phases")  # refuses what cannot be here
    opened = open_run(pipeline, fingerprints, executor, observers)
    with closing(rewards), engines, opened as run, ExitStack() as running:
        engines.serve(run)
        folder = run.folder
        run.keep_best("held_out")
        rollout = engines.rollout(tokenizer, pipeline.rollout)
        # Supervision has the data's own distribution for a target, which has no temperature.
        supervised = engines.supervised(
            pipeline.sft.optimizer, updates=pipeline.sft.steps, scoring=pipeline.scoring(1.0)
        )
        stream = RowStream(train_rows, seed=pipeline.seed)
        train_sft(run, supervised, stream, lambda row: encode_row(tokenizer, row), pipeline.sft, pad_token_id=pad)
        supervised.sync_weights(rollout)
        complete = pipeline.complete(rollout, environment)
        before = run.cached_result("before", lambda: evaluate_both(complete, held_out, rewards, config, pipeline.seed))
        # The default reward is 1 or 0; the mean of another one is no accuracy.
        what = "reward" if pipeline.reward or pipeline.environment else "accuracy"
        run.print(f"held-out {what} before reinforcement learning: {before['greedy']['reward']:.3f}")
        if not (folder / "samples.json").exists():
            write_samples(folder, before=before)

        updates = config.steps * config.updates_per_step
        of_policy = updates - config.critic_warmup * config.updates_per_step
        policy = engines.policy(
            pipeline.optimizer, objective, updates=of_policy, scoring=scoring, fused_loss=pipeline.fused_loss
        )
        supervised.sync_weights(policy, adapter=pipeline.lora.rank > 0)
        supervised.release()
        reads_reference = "ref_logprobs" in (*objective.required_batch_fields, *objective.required_rollout_fields)
        reference = engines.reference(scoring) if reads_reference or pipeline.track_kl else None
        if reference is not None:
            policy.sync_weights(reference)
        critic = None
        if objective.value is not None:
            warm = folder / "warm_start" if pipeline.sft.steps else None
            if warm is not None and not warm.exists():
                save_pretrained(warm, policy, tokenizer)
            critic = engines.critic(
                critic_source(pipeline.critic, source, warm, tokenizer),
                pipeline.critic.optimizer,
                objective,
                updates=updates,
                scoring=scoring,
            )
        parts = rewards, stream, objective, config, pipeline.seed
        ahead = pipeline.asynchronous.sampler if pipeline.asynchronous.on else None
        talking = pipeline.talking(environment, source, tokenizer, config.sampling)
        within = pipeline.complete(rollout, environment, pipeline.rollout.budget())
        sampler = Sampler(within, *parts) if ahead is None else ahead(rollout, tokenizer, *parts, talking)
        running.enter_context(closing(sampler))
        archive = Archive(rewards.names, folder) if len(rewards.names) > 1 else None
        train_policy(
            run,
            PolicyEngines(
                policy=policy,
                rollout=rollout,
                reference=reference,
                critic=critic,
                teacher=None if teacher is None else engines.teacher(teacher, scoring),
            ),
            sampler,
            objective,
            config,
            evaluator=Evaluator(complete, rewards, held_out, config, archive, seed=pipeline.seed),
            coefficients=coefficients,
            completions=CompletionLog(
                folder,
                lambda tokens: str(tokenizer.decode(tokens)),
                every=pipeline.samples_every,
                kept=pipeline.samples_kept,
            ),
            pad_token_id=pad,
            seed=pipeline.seed,
        )
        if archive is not None:
            with spared("pareto.png"):
                archive.draw()
        policy.sync_weights(rollout)  # a run resumed after its last step has made none
        after = evaluate_both(complete, held_out, rewards, config, pipeline.seed)
        save_pretrained(folder / "model", policy, tokenizer)
        if run.load_best({"policy": policy}) is not None:
            save_pretrained(folder / "best", policy, tokenizer)
        write_samples(folder, before=before, after=after)
        accuracy = before["greedy"]["reward"], after["greedy"]["reward"]
        summary = {
            "result": "held-out {} {:.2f} → {:.2f}".format(what, *accuracy),
            "accuracy_before": before["greedy"]["reward"],
            "accuracy_after": after["greedy"]["reward"],
            "gain": confidence_interval(after["greedy"]["scores"], before["greedy"]["scores"]),
            "sampled_before": before["sampled"]["reward"],
            "sampled_after": after["sampled"]["reward"],
            "sampled_gain": confidence_interval(after["sampled"]["scores"], before["sampled"]["scores"]),
            "held_out": len(held_out),
            "seconds": round(run.seconds, 1),
            "objective": objective.explain(),
            **common_summary(pipeline, source, engines),
        }
        run.finish(summary)
    return summary


def write_samples(folder: Path, **evaluations: dict[str, dict[str, Any]]) -> None:
    """samples.json: some held-out completions of each evaluation, to read."""
    samples = {when: {how: found["samples"] for how, found in both.items()} for when, both in evaluations.items()}
    write_json(folder / "samples.json", samples)


def evaluate_both(
    complete: Complete, rows: Sequence[dict], rewards: Rewards, config: PolicyConfig, seed: int
) -> dict[str, dict[str, Any]]:
    """Completions of held-out prompts, greedy and at the temperature of training."""
    options: dict[str, Any] = {"scalar": config.scalar, "seed": seed}
    temperatures = {"sampled": config.sampling.temperature, "greedy": 0.0}
    found = {
        name: evaluate(complete, rows, rewards, config.sampling, temperature=temperature, **options)
        for name, temperature in temperatures.items()
    }
    return {"greedy": found["greedy"], "sampled": found["sampled"]}


def rows_of(pipeline: PolicyPipeline) -> tuple[list[dict], list[dict]]:
    """Rows to train on and rows held out."""
    sources = pipeline.reward or (() if pipeline.environment else ("exact",))
    compared = "exact" in [source for _, source in map(named, sources)]
    fields = ("prompt", "answer") if compared or pipeline.sft.steps else ("prompt",)
    return load_rows(pipeline, fields, answered_row if compared else policy_row)


# Full configs of known-good runs; start from one with ``dataclasses.replace`` or command-line flags.

EXPORTED = ("model", "best", "warm_start")
"""Folders that a run exports: its own name says more."""


def policy(words: Sequence[str] = ()) -> PolicyPipeline:
    """What ``rl-fn train policy`` begins with: ``pretrained`` where the words of the command name a model, else the
    quickstart.

    >>> policy(["--model", "org/Small-1B", "--data", "problems.jsonl"]).name
    'Small-1B-problems'
    """
    model = _given(words, "--model")
    if model is None:
        return quickstart()
    return pretrained_config(model, _given(words, "--data"), adapters=_given(words, "--lora.rank") not in (None, "0"))


def pretrained_config(model: str, data: str | None = None, *, adapters: bool = False) -> PolicyPipeline:
    """GRPO of a user's model: no supervised steps, completions of up to 512 tokens, a rate that keeps what it knows.

    The learning rate is DAPO's (Yu et al., 2025) and TRL's, 1e-6 after a warm-up; of ``adapters`` ten times that, as
    LoRA's best rates are about ten times those of all weights (Schulman et al., LoRA Without Regret, 2025).
    """
    return PolicyPipeline(
        name=_name_of(model, data),
        model=model,
        data=data,
        sft=WarmStart(rows_per_step=32, optimizer=OptimizerConfig(learning_rate=1e-5, beta2=0.999)),
        policy=PolicyConfig(
            steps=200,
            prompts_per_step=16,
            responses_per_prompt=8,
            evaluate_every=25,
            sampling=SamplingOptions(max_new_tokens=512),
        ),
        optimizer=OptimizerConfig(learning_rate=1e-5 if adapters else 1e-6, decay="constant", beta2=0.999),
        objective=objective_options("dapo"),
    )


def _given(words: Sequence[str], option: str) -> str | None:
    """The value of an option among the words of a command, the last one."""
    found = None
    for place, word in enumerate(words):
        if word.startswith(f"{option}="):
            found = word.partition("=")[2]
        elif word == option and place + 1 < len(words):
            found = words[place + 1]
    return found


def _name_of(model: str, data: str | None) -> str:
    """Of a run, from what it learns with: runs/first/model and problems.jsonl are first-problems."""
    folder = Path(model)
    of_model = folder.parent.name if folder.name in EXPORTED and folder.parent.name else folder.name
    parts = [of_model, "" if data is None else Path(data.partition("@")[0]).stem]
    return "-".join(filter(None, parts)).strip(".")[:100] or "policy"


def quickstart() -> PolicyPipeline:
    """GRPO of a 1 M-parameter Qwen2 on two-digit addition: under five minutes on two CPU cores.

    The warm start ends at its full learning rate, before it has learned the task.
    """
    return PolicyPipeline(
        name="quickstart",
        sft=WarmStart(
            steps=135,
            rows_per_step=256,
            optimizer=OptimizerConfig(learning_rate=2e-3, warmup=50, decay="constant", beta2=0.99),
        ),
        policy=PolicyConfig(
            steps=240,
            prompts_per_step=192,
            updates_per_step=2,
            evaluate_every=20,
            # At the same cost, four completions of 192 prompts learn faster than eight of 96,
            # and eight of 96 faster than sixteen of 48.
            responses_per_prompt=4,
            sampling=SamplingOptions(max_new_tokens=5),
        ),
        # Five times this rate learns more slowly: the noise of a group's advantage undoes what it teaches.
        optimizer=OptimizerConfig(learning_rate=1.5e-4, warmup=10, final=0.2, beta2=0.99),
        objective=objective_options("dapo"),
    )
