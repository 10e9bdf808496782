"""Options of ``rl-fn train policy``: the algorithm, the models beside the policy, how it begins and is drawn from."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

import rl_fn
from rl_bridge.algorithms.advantages import SEVERAL, require_rescored, with_reward_weights
from rl_bridge.algorithms.policy_setup import PolicyConfig, require_objective
from rl_bridge.common.argument_kinds import check_options
from rl_bridge.common.terminal import given
from rl_bridge.common.user_marks import content_of
from rl_bridge.modules.own_loss import check_loss
from rl_bridge.modules.policy import require_token_local
from rl_bridge.modules.scoring import ScoringConfig
from rl_bridge.modules.trainable import OptimizerConfig
from rl_bridge.pipelines.objective_options import ALGORITHMS, Algorithm, ControlOptions, controlled
from rl_bridge.pipelines.rollout_options import AsynchronousOptions, EnvironmentOptions, RolloutOptions
from rl_bridge.rollout.vllm.request_fields import require_temperature
from rl_bridge.run.options import MAY_CHANGE, require_used
from rl_train.options import RecipeOptions


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """Supervised steps before reinforcement learning. 0: a model that follows instructions already needs none."""

    steps: int = 0
    """Supervised updates before reinforcement learning."""
    rows_per_step: int = 256
    """Rows of a supervised update."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-3, warmup=50)

    def __post_init__(self) -> None:
        """Refuse counts that cannot be."""
        check_options(self)
        if self.steps < 0 or self.rows_per_step < 1:
            raise ValueError(f"need steps ≥ 0 and rows_per_step ≥ 1, got {given(self, 'steps', 'rows_per_step')}")


@dataclass(frozen=True, kw_only=True)
class CriticOptions:
    """The model of the values, for an algorithm that has one (ppo, vapo)."""

    model: str | None = None
    """Folder or hub id of a value or reward model. None: the policy's own trunk with a head of zeros."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=3e-4, final=0.2)

    def __post_init__(self) -> None:
        """Refuse a model that is no text."""
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class PolicyPipeline(RecipeOptions, EnvironmentOptions):
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
        if not self.scoring().exact and not self.policy.recompute_old_logprobs:
            # The rollout samples in float32 and knows no cap but the model's own.
            raise ValueError("softcap and dtype bfloat16 need recompute_old_logprobs=True: sampling has neither")
        if not self.rollout.exact and not self.policy.recompute_old_logprobs:
            raise ValueError("a rollout in lower precision needs recompute_old_logprobs=True: π_old is the trainer's")
        if self.rollout.backend != "in_process":
            require_temperature(self.policy.sampling)
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
        objective = self.objective_and_control()[0]
        require_objective(objective, self.policy)
        if not self.policy.recompute_old_logprobs:
            require_rescored(objective, way_on="--policy.recompute-old-logprobs (recompute_old_logprobs=True)")
        if not reads_reference(objective) and not self.track_kl:
            reason = f"with {objective.name}, which reads no reference, and --no-track-kl"
            require_used(self.policy, ("reference_every", "reference_share"), reason, part="policy")
        if self.reward_weights and self.policy.scalar.weights is not None:
            require_used(self, ("reward_weights",), "beside --policy.scalar.weights")
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

    def objective_and_control(self) -> tuple[rl_fn.Objective, dict[str, rl_fn.Controller]]:
        """The objective with its terms, and the controllers of their coefficients, by term."""
        scalar, penalised = self.policy.scalar, self.policy.overlong_buffer is not None
        weights = None if scalar.method == "tchebycheff" else scalar.weights or self.reward_weights
        built = self.objective.build(controlled=self.kl_control.kind is not None)
        objective = with_reward_weights(built, weights, penalised=penalised)
        return controlled(objective, self.kl_control, self.entropy_control, self.completions)

    def require_one_a_reward(self, names: Sequence[str]) -> None:
        """Refuse weights and an ideal point that have more or fewer numbers than there are rewards.

        ``names``: of the rewards, which a function that returns a dictionary shows when it is tried.
        """
        advantage: Any = self.objective_and_control()[0].advantage
        each = advantage.weights if advantage.rewards_shape == SEVERAL and hasattr(advantage, "weights") else None
        scalar, penalty = self.policy.scalar, self.policy.overlong_buffer is not None
        options = {
            "--policy.scalar.weights": (scalar.weights, len(names)),
            "--policy.scalar.ideal": (scalar.ideal, len(names)),
            "--objective.weights": (each, len(names) + penalty),
        }
        for option, (numbers, count) in options.items():
            if numbers is not None and len(numbers) != count:
                beside = ", and the overlong penalty is one more" if count > len(names) else ""
                raise ValueError(
                    f"{option} has {len(numbers)} numbers, {', '.join(map(str, numbers))}, and the rewards are "
                    f"{', '.join(names)}{beside}: give one number a reward"
                )

    def unread(self) -> dict[str, str]:
        """Options that nothing reads beside the others, those of a warm start without steps among them."""
        unread = super().unread() | self.unread_of("critic.optimizer", self.critic.optimizer)
        objective = self.objective_and_control()[0]
        if reads_reference(objective):
            unread["track_kl"] = f"with {objective.name}, which reads the reference"
        if not self.policy.pass_at and "correct" not in required_fields(objective):
            reason = f"without --policy.pass-at, with {objective.name}, which does not read what is correct"
            unread["policy.correct_reward"] = reason
        if not self.asynchronous.on:
            unread["asynchronous.round_tokens"] = "without --asynchronous.max-staleness"
        if self.sft.steps:
            return unread | self.unread_of("sft.optimizer", self.sft.optimizer)
        return unread | dict.fromkeys(("sft.rows_per_step", "sft.optimizer"), "without --sft.steps")

    def checked_objective(self) -> tuple[rl_fn.Objective, dict[str, rl_fn.Controller]]:
        """The same, once a loss of the user's own has been tried.

        Raises:
            ValueError: a loss that no batch goes through, or one that reads other tokens with ``fused_loss``.
        """
        objective, control = self.objective_and_control()
        check_loss(objective.loss)
        if self.fused_loss:
            require_token_local(objective)
        return objective, control

    def models(self) -> dict[str, str | None]:
        """Role → folder or hub id, with the critic's and the teacher's."""
        return super().models() | {"critic's model": self.critic.model, "teacher": self.teacher}

    def fingerprints(self, tokenizer: PreTrainedTokenizerBase | None = None) -> dict[str, str]:
        """Fingerprints that a resumed run compares, with the environment's and the loss's."""
        loss = self.objective.loss
        own = {} if loss is None else {"loss": content_of(Path(loss.rpartition(":")[0]))}
        return super().fingerprints(tokenizer) | self.environment_fingerprint() | own

    def measure(self) -> dict[str, Any]:
        """How held-out rows are measured, beside the fingerprints."""
        sampling = replace(self.policy.sampling, n=1, seed=self.seed)
        own = {"sampling": sampling, "scalar": self.policy.scalar, "weights": self.reward_weights}
        return own | {"turns": (self.max_turns, self.max_trajectory_tokens), "engine": self.rollout.draws()}

    @property
    def completions(self) -> int:
        """Completions of one step."""
        return self.policy.prompts_per_step * self.policy.sampling.n

    def rows_of_steps(self) -> dict[str, int]:
        """Option → rows that one step takes."""
        warm = {"--sft.rows-per-step": self.sft.rows_per_step} if self.sft.steps else {}
        return warm | {"--policy.prompts-per-step": self.policy.prompts_per_step}

    def scoring(self, temperature: float | None = None) -> ScoringConfig:
        """How policy, old policy and reference of this run are scored: at the temperature of sampling."""
        return super().scoring(self.policy.sampling.temperature if temperature is None else temperature)

    @property
    def scale(self) -> str:
        """The name of a mean reward: accuracy for the default reward, which is 1 or 0."""
        return "reward" if self.reward or self.environment else "accuracy"

    @property
    def needs_reference(self) -> bool:
        """Whether anything reads the reference's probabilities."""
        return self.track_kl or reads_reference(self.objective_and_control()[0])

    @property
    def reference_follows(self) -> bool:
        """Whether the reference has other weights than the model that the run begins with: a checkpoint holds them."""
        return self.sft.steps > 0 or self.policy.reference_every is not None

    @property
    def policy_updates(self) -> int:
        """Updates of the policy: those of the first steps may be the critic's alone."""
        return (self.policy.steps - self.policy.critic_warmup) * self.policy.updates_per_step

    @property
    def critic_updates(self) -> int:
        """Updates of the critic."""
        return self.policy.steps * self.policy.updates_per_step

    def remark_on_warmups(self) -> None:
        """Say which learning rates never become what the options name."""
        self.remark_on_warmup(self.policy_updates)
        if self.sft.steps:
            self.remark_on_warmup(self.sft.steps, "sft.optimizer", self.sft.optimizer)
        if self.objective_and_control()[0].value is not None:
            self.remark_on_warmup(self.critic_updates, "critic.optimizer", self.critic.optimizer)

    @property
    def workers_apart(self) -> int:
        """Workers of the rollout alone, in which the trained models have no part."""
        return self.asynchronous.rollout_workers or 0

    def of_policy(self) -> dict[str, Any]:
        """Arguments of the policy alone."""
        return {"fused_loss": self.fused_loss, "least_effective_share": self.policy.least_effective_share}

    def of_run(self) -> dict[str, Any]:
        """Arguments of the run."""
        return {"threads": self.threads, "samples_every": self.samples_every, "samples_kept": self.samples_kept}

    def of_rewards(self) -> dict[str, Any]:
        """How rewards become one number: arguments of ``Groups.score`` and of ``Ahead``."""
        return {"scalar": self.policy.scalar, "overlong_buffer": self.policy.overlong_buffer}

    def of_conversations(self) -> dict[str, Any]:
        """Limits of a conversation: arguments of ``Rollout.converse`` and of ``Ahead``."""
        limits = {"max_turns": self.max_turns, "max_tokens": self.max_trajectory_tokens}
        return {**limits, "step_timeout": self.environment_timeout, "processes": self.environment_processes}

    def of_ahead(self) -> dict[str, Any]:
        """How far rollouts run ahead of training: arguments of ``Ahead``."""
        own = {name: value for name, value in asdict(self.asynchronous).items() if name != "rollout_workers"}
        counts = {"prompts": self.policy.prompts_per_step, "steps": self.policy.steps}
        return own | counts | self.of_rewards() | self.of_conversations()


def reads_reference(objective: rl_fn.Objective) -> bool:
    """Whether a term of the objective is of the reference's probabilities."""
    return "ref_logprobs" in required_fields(objective)


def required_fields(objective: rl_fn.Objective) -> tuple[str, ...]:
    """Fields that the loss and the advantages read."""
    return (*objective.required_batch_fields, *objective.required_rollout_fields)
