"""GRPO post-training from a config: data, model, warm start, reinforcement learning, evaluation, results."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PreTrainedTokenizerBase

import rl_fn
from rl_bridge.algorithms.completion_log import CompletionLog
from rl_bridge.algorithms.completions import Complete, Sampler
from rl_bridge.algorithms.evaluation import Archive, Evaluator, evaluate_both, gain, write_samples
from rl_bridge.algorithms.policy_setup import Coefficients, PolicyConfig, PolicyEngines, require_objective
from rl_bridge.algorithms.policy_training import train_policy
from rl_bridge.algorithms.supervised_training import WarmStart, train_sft
from rl_bridge.common.plots import spared
from rl_bridge.common.user_files import content_of
from rl_bridge.data.census import Census
from rl_bridge.data.rows import RowStream, answered_row, policy_row, supervised_row
from rl_bridge.engines import InferenceEngine, TrainEngine
from rl_bridge.environments import EnvironmentFactory
from rl_bridge.executors import Executor
from rl_bridge.models.encoding import encode_row
from rl_bridge.models.model_source import ModelSource, PretrainedSource, PretrainedValueSource, ValueSource
from rl_bridge.models.pretrained import pretrained, require_vocabulary, save_pretrained
from rl_bridge.models.row_checks import (
    check_rows,
    imitated_rows,
    prompted,
    remark_on_conversations,
    remark_on_prompts,
    require_as_long,
    supervised,
)
from rl_bridge.models.turn_ends import remark_on_ends
from rl_bridge.modules.own_loss import check_loss
from rl_bridge.modules.policy import require_token_local
from rl_bridge.modules.scoring import ScoringConfig
from rl_bridge.modules.trainable import OptimizerConfig
from rl_bridge.pipelines.objective_options import ALGORITHMS, Algorithm, ControlOptions, controlled
from rl_bridge.pipelines.placement import Engines
from rl_bridge.pipelines.rollout_options import AsynchronousOptions, EnvironmentOptions, RolloutOptions
from rl_bridge.pipelines.training import TrainingOptions, load_model, load_rows, prepare_processes, summary_of
from rl_bridge.rewards import Reward, Rewards, load
from rl_bridge.rewards.sources import named
from rl_bridge.run.options import MAY_CHANGE, require_used
from rl_bridge.run.provenance import of_rows
from rl_bridge.run.run import Observer, Run, open_run


@dataclass(frozen=True, kw_only=True)
class CriticOptions:
    """The model of the values, for an algorithm that has one (ppo, vapo)."""

    model: str | None = None
    """Folder or hub id of a value or reward model. None: the policy's own trunk with a head of zeros."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=3e-4, final=0.2)


def critic_source(
    options: CriticOptions, source: ModelSource, warm: Path | None, tokenizer: PreTrainedTokenizerBase
) -> ModelSource:
    """The source of the critic; ``warm`` is the policy's folder after its warm start, where there was one."""
    if options.model is not None:
        return PretrainedValueSource(options.model)
    trunk = source if warm is None else PretrainedSource(str(warm))
    pad = tokenizer.pad_token_id
    return ValueSource(trunk, pad_token=pad if isinstance(pad, int) else None)


def required_critic(options: CriticOptions) -> ModelSource | None:
    """The source of a critic of its own, loaded before a run begins; None: the critic has the policy's trunk.

    Raises:
        ValueError: no such model, another head, or weights that do not fit.
    """
    if options.model is None:
        return None
    source = PretrainedValueSource(options.model)
    with torch.device("meta"):
        source.check(source.empty())
    return source


def teacher_source(name: str, tokenizer: PreTrainedTokenizerBase) -> ModelSource:
    """The source of the teacher.

    Raises:
        ValueError: no such model, or its vocabulary is not the policy's: its probabilities would be of other tokens.
    """
    source, teacher_tokenizer = pretrained(name)
    require_vocabulary(teacher_tokenizer, tokenizer)
    return source


@dataclass(frozen=True, kw_only=True)
class PolicyPipeline(TrainingOptions, EnvironmentOptions):
    """GRPO post-training. Without ``data`` it is two-digit addition, without ``model`` a tiny new Qwen2."""

    trainer: ClassVar[str] = "policy"
    policy: PolicyConfig
    objective: Algorithm = field(default_factory=ALGORITHMS["dapo"])
    kl_control: ControlOptions = ControlOptions()
    """Controller of the KL penalty's coefficient, from step to step."""
    entropy_control: ControlOptions = ControlOptions()
    """Controller of the entropy bonus's coefficient, from step to step."""
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
    """Measure the KL to the reference even if the objective has no KL term; costs a forward pass. The KL is of the
    completions in an update: without a KL or entropy term, completions with an advantage."""
    samples_every: int = field(default=10, metadata=MAY_CHANGE)
    """Steps from one line of completions.jsonl, which ``rl-fn report`` shows, to the next. 0: no line."""
    samples_kept: int = field(default=4, metadata=MAY_CHANGE)
    """Completions of each such step that are kept."""

    def __post_init__(self) -> None:
        """Refuse a policy that the completions were not sampled from, and what nothing would read."""
        super().__post_init__()
        EnvironmentOptions.__post_init__(self)
        if self.samples_every < 0 or self.samples_kept < 1:
            raise ValueError(f"need samples_every ≥ 0, samples_kept ≥ 1, got {self.samples_every, self.samples_kept}")
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
        if self.model is not None and self.of_class:
            self.rollout.require_own(self.model)
        objective = self.objective_and_coefficients()[0]
        require_objective(objective, self.policy)
        if not reads_reference(objective) and not self.track_kl:
            reason = f"with {objective.name}, which reads no reference, and --no-track-kl"
            require_used(self.policy, ("reference_every", "reference_share"), reason, part="policy")
        if objective.value is None:
            names = [option.name for option in fields(self.critic)]
            require_used(self.critic, names, f"with {objective.name}, which has no critic", part="critic")
        elif self.of_class and self.critic.model is None:
            raise ValueError(
                f"{objective.name} has a critic, whose trunk would be that of {self.model}, a class of your own, of "
                "which the logits alone are known: give --critic.model FOLDER"
            )
        if "teacher_logprobs" not in objective.required_rollout_fields:
            require_used(self, ("teacher",), f"with {objective.name}, which learns from no teacher")
        elif self.teacher is None:
            raise ValueError(f"{objective.name} learns from a teacher: give --teacher MODEL")

    def objective_and_coefficients(self) -> tuple[rl_fn.Objective, Coefficients]:
        """The objective with its terms, and the controllers of their coefficients."""
        return controlled(self.objective.build(), self.kl_control, self.entropy_control, self.completions)

    def models(self) -> dict[str, str | None]:
        """Role → folder or hub id, with the critic's and the teacher's."""
        return super().models() | {"critic's model": self.critic.model, "teacher": self.teacher}

    def fingerprints(self, tokenizer: PreTrainedTokenizerBase | None = None) -> dict[str, str]:
        """Fingerprints that a resumed run compares, with the environment's and the loss's."""
        loss = self.objective.loss
        own = {} if loss is None else {"loss": content_of(Path(loss.rpartition(":")[0]))}
        return super().fingerprints(tokenizer) | self.environment_fingerprint() | own

    @property
    def completions(self) -> int:
        """Completions of one step."""
        return self.policy.prompts_per_step * self.policy.responses_per_prompt

    def rows_of_steps(self) -> dict[str, int]:
        """Option → rows that one step takes."""
        warm = {"--sft.rows-per-step": self.sft.rows_per_step} if self.sft.steps else {}
        return warm | {"--policy.prompts-per-step": self.policy.prompts_per_step}

    def scoring(self, temperature: float | None = None) -> ScoringConfig:
        """How policy, old policy and reference of this run are scored: at the temperature of sampling."""
        return super().scoring(self.policy.sampling.temperature if temperature is None else temperature)


def reads_reference(objective: rl_fn.Objective) -> bool:
    """Whether a term of the objective is of the reference's probabilities."""
    return "ref_logprobs" in (*objective.required_batch_fields, *objective.required_rollout_fields)


def run_policy(pipeline: PolicyPipeline, observers: Sequence[Observer] = ()) -> dict[str, Any]:
    """Run the pipeline to its end and return the summary that ``summary.json`` holds."""
    executor = pipeline.start()
    rewards = pipeline.rewards()
    census = Census()
    train_rows, held_out = rows_of(pipeline, census)
    objective = prepare(pipeline, executor)
    source, tokenizer = load_model(pipeline, [*train_rows, *held_out])
    remark_on_ends(source, tokenizer)
    new_tokens = pipeline.policy.sampling.max_new_tokens
    check_rows(source, tokenizer, [*train_rows, *held_out], prompted(tokenizer), new_tokens=new_tokens)
    if pipeline.sft.steps:
        # A warm start reads the prompts, and responses too.
        imitated = imitated_rows(train_rows)
        check_rows(source, tokenizer, imitated, supervised(tokenizer))
        remark_on_conversations(tokenizer, imitated)
    else:
        remark_on_prompts(tokenizer, [*train_rows, *held_out])
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
        census=census,
    )


def prepare(pipeline: PolicyPipeline, executor: Executor) -> rl_fn.Objective:
    """Set threads and seeds of the processes, and return the objective. Comes before a model is made."""
    prepare_processes(pipeline, executor)
    objective, _ = pipeline.objective_and_coefficients()
    check_loss(objective.loss)
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
    census: Census | None = None,
) -> dict[str, Any]:
    """Warm start, reinforcement learning and evaluation, in the workers of ``executor``.

    ``census``: of the sources that the rows are of; None where all rows are in hand.
    """
    census = Census.of_rows(train_rows, held_out) if census is None else census
    census.settle(trained=len(train_rows), held_out=len(held_out), step=pipeline.rows_of_steps())
    rewards = reward if isinstance(reward, Rewards) else load(reward)
    rewards.try_on(train_rows, tokenizer, beside=pipeline.asynchronous.on)
    environment = pipeline.tried(pipeline.environments(source), train_rows, tokenizer)
    marks = {"data": of_rows(train_rows, held_out), "reward": rewards.fingerprint} | pipeline.fingerprints(tokenizer)
    rollout_workers = pipeline.asynchronous.rollout_workers
    engines = pipeline.engines(executor, pipeline.mesh.of(len(executor.slots) - (rollout_workers or 0)), source)
    engines.rollout_workers = rollout_workers
    engines.rehearse_export(tokenizer, pipeline.export_dtype)
    objective, coefficients = controlled(objective, pipeline.kl_control, pipeline.entropy_control, pipeline.completions)
    teacher = None if pipeline.teacher is None else teacher_source(pipeline.teacher, tokenizer)
    critic = None if objective.value is None else required_critic(pipeline.critic)
    for role, beside in (("critic", critic), ("teacher", teacher)):
        if beside is not None:
            new_tokens, limit = pipeline.policy.sampling.max_new_tokens, pipeline.longest_conversation
            require_as_long(beside, source, tokenizer, [*train_rows, *held_out], new_tokens, limit, role=role)
    # Refuses a backend that cannot be here, before a run begins.
    pipeline.rollout.factory(source, tokenizer, sleep=pipeline.offload == "phases")
    with closing(rewards), engines, open_run(pipeline, marks, executor, observers) as run:
        engines.serve(run)
        run.keep_best("held_out")
        stages = PolicyStages(
            pipeline=pipeline,
            run=run,
            engines=engines,
            rollout=engines.rollout(tokenizer, pipeline.rollout),
            source=source,
            tokenizer=tokenizer,
            stream=RowStream(train_rows, seed=pipeline.seed),
            held_out=held_out,
            rewards=rewards,
            environment=environment,
            objective=objective,
            census=census,
        )
        pipeline.require_engine(stages.rollout, [*train_rows, *held_out], tokenizer, pipeline.policy.sampling)
        supervised = stages.warm_start()
        before = stages.evaluated_before()
        models = stages.models(supervised, teacher)
        with closing(stages.sampler()) as sampler:
            stages.learn(models, sampler, coefficients)
            after = stages.evaluated_after(models.policy)
            stages.export(models.policy)
            write_samples(run.folder, before=before, after=after)
            summary = stages.summary(before, after)
            run.finish(summary)
    return summary


@dataclass(frozen=True, kw_only=True)
class PolicyStages:
    """The stages of a run that trains a policy, in the order of the methods, and the parts that the stages share."""

    pipeline: PolicyPipeline
    run: Run
    engines: Engines
    rollout: InferenceEngine
    source: ModelSource
    tokenizer: PreTrainedTokenizerBase
    stream: RowStream
    held_out: Sequence[dict]
    rewards: Rewards
    environment: EnvironmentFactory | None
    objective: rl_fn.Objective
    census: Census

    def warm_start(self) -> TrainEngine:
        """The supervised steps: their engine, whose weights the rollout has too."""
        pipeline, options = self.pipeline, self.pipeline.sft
        # The target of supervision is the data's own distribution, which has no temperature.
        supervised = self.engines.supervised(options.optimizer, updates=options.steps, scoring=pipeline.scoring(1.0))
        train_sft(
            self.run,
            supervised,
            self.stream,
            lambda row: encode_row(self.tokenizer, supervised_row(row)),
            options,
            pad_token_id=self._pad_token,
        )
        supervised.sync_weights(self.rollout)
        return supervised

    def evaluated_before(self) -> dict[str, dict[str, Any]]:
        """The evaluation of the policy that reinforcement learning begins with, made once in a run's life."""
        before = self.run.cached_result("before", self._evaluate_both)
        self.run.print(f"held-out {self._scale} before reinforcement learning: {before['greedy']['reward']:.3f}")
        if not (self.run.folder / "samples.json").exists():
            write_samples(self.run.folder, before=before)
        return before

    def models(self, supervised: TrainEngine, teacher: ModelSource | None) -> PolicyEngines:
        """The models of reinforcement learning: the policy with the supervised weights, and those beside it.

        ``supervised`` is released.
        """
        pipeline, config, objective, scoring = self.pipeline, self.pipeline.policy, self.objective, self._scoring
        updates = config.steps * config.updates_per_step
        of_policy = updates - config.critic_warmup * config.updates_per_step
        policy = self.engines.policy(
            pipeline.optimizer, objective, updates=of_policy, scoring=scoring, fused_loss=pipeline.fused_loss
        )
        supervised.sync_weights(policy, adapter=pipeline.lora.rank > 0)
        supervised.release()
        has_reference = reads_reference(objective) or pipeline.track_kl
        reference = self.engines.reference(scoring) if has_reference else None
        if reference is not None:
            policy.sync_weights(reference)
        return PolicyEngines(
            policy=policy,
            rollout=self.rollout,
            reference=reference,
            critic=None if objective.value is None else self._critic(policy, updates),
            teacher=None if teacher is None else self.engines.teacher(teacher, scoring),
        )

    def sampler(self) -> Sampler:
        """The sampler of each step's completions, or the one that runs ahead of training."""
        pipeline, rollout = self.pipeline, self.rollout
        parts: dict[str, Any] = {
            "rewards": self.rewards,
            "stream": self.stream,
            "objective": self.objective,
            "config": pipeline.policy,
            "seed": pipeline.seed,
        }
        if not pipeline.asynchronous.on:
            return Sampler(pipeline.complete(rollout, self.environment, pipeline.rollout.budget()), **parts)
        talking = pipeline.talking(rollout, self.environment, self.tokenizer, pipeline.policy.sampling)
        return pipeline.asynchronous.sampler(rollout, tokenizer=self.tokenizer, talking=talking, **parts)

    def learn(self, models: PolicyEngines, sampler: Sampler, coefficients: Coefficients) -> None:
        """Reinforcement learning, with the Pareto front of several rewards drawn at its end."""
        pipeline, config, folder = self.pipeline, self.pipeline.policy, self.run.folder
        archive = Archive(self.rewards.names, folder) if len(self.rewards.names) > 1 else None
        train_policy(
            self.run,
            models,
            sampler,
            self.objective,
            config,
            evaluator=Evaluator(self._complete, self.rewards, self.held_out, config, archive, seed=pipeline.seed),
            coefficients=coefficients,
            completions=CompletionLog(
                folder,
                lambda tokens: str(self.tokenizer.decode(tokens)),
                every=pipeline.samples_every,
                kept=pipeline.samples_kept,
            ),
            pad_token_id=self._pad_token,
            seed=pipeline.seed,
        )
        if archive is not None:
            with spared("pareto.png"):
                archive.draw()

    def evaluated_after(self, policy: TrainEngine) -> dict[str, dict[str, Any]]:
        """The evaluation of the trained policy."""
        policy.sync_weights(self.rollout)  # A run that is resumed after its last step has synchronised no weights.
        return self._evaluate_both()

    def export(self, policy: TrainEngine) -> None:
        """The folder ``model`` has the last policy, and ``best`` the one that was best on held-out rows."""
        save_pretrained(self.run.folder / "model", policy, self.tokenizer, self.engines.types)
        if self.run.load_best({"policy": policy}) is not None:
            save_pretrained(self.run.folder / "best", policy, self.tokenizer, self.engines.types)

    def summary(self, before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """The content of ``summary.json``: both evaluations, compared."""
        return {
            "result": f"held-out {self._scale} {before['greedy']['reward']:.2f} → {after['greedy']['reward']:.2f}",
            "accuracy_before": before["greedy"]["reward"],
            "accuracy_after": after["greedy"]["reward"],
            "gain": gain(after["greedy"], before["greedy"]),
            "sampled_before": before["sampled"]["reward"],
            "sampled_after": after["sampled"]["reward"],
            "sampled_gain": gain(after["sampled"], before["sampled"]),
            "seconds": round(self.run.seconds, 1),
            "objective": self.objective.explain(),
            **self.census.summary(),
            **summary_of(self.pipeline, self.source, self.engines.notes),
        }

    def _critic(self, policy: TrainEngine, updates: int) -> TrainEngine:
        """The engine of the values; its trunk is the policy's after the warm start, where there was one."""
        pipeline = self.pipeline
        warm = self.run.folder / "warm_start" if pipeline.sft.steps else None
        if warm is not None and not warm.exists():
            save_pretrained(warm, policy, self.tokenizer)
        return self.engines.critic(
            critic_source(pipeline.critic, self.source, warm, self.tokenizer),
            pipeline.critic.optimizer,
            self.objective,
            updates=updates,
            scoring=self._scoring,
        )

    def _evaluate_both(self) -> dict[str, dict[str, Any]]:
        return evaluate_both(self._complete, self.held_out, self.rewards, self.pipeline.policy, self.pipeline.seed)

    @property
    def _complete(self) -> Complete:
        return self.pipeline.complete(self.rollout, self.environment)

    @property
    def _pad_token(self) -> int:
        pad = self.tokenizer.pad_token_id
        assert isinstance(pad, int)
        return pad

    @property
    def _scale(self) -> str:
        """The name of a mean reward: accuracy for the default reward, which is 1 or 0."""
        return "reward" if self.pipeline.reward or self.pipeline.environment else "accuracy"

    @property
    def _scoring(self) -> ScoringConfig:
        return self.pipeline.scoring()


def rows_of(pipeline: PolicyPipeline, census: Census | None = None) -> tuple[list[dict], list[dict]]:
    """Rows to train on and rows held out; ``census`` gets their numbers."""
    sources = pipeline.reward or (() if pipeline.environment else ("exact",))
    compared = "exact" in [source for _, source in map(named, sources)]
    fields = ("prompt", "answer") if compared or pipeline.sft.steps else ("prompt",)
    return load_rows(pipeline, fields, answered_row if compared else policy_row, census)
