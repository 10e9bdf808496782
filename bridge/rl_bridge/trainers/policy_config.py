"""What a run of the policy trainer depends on: steps, prompts, responses, how they are sampled and evaluated."""

from dataclasses import dataclass

from rl_bridge.data.requests import SamplingParams
from rl_bridge.messages import given
from rl_bridge.tracking.options import require_used
from rl_bridge.trainers.policy_inputs.scalar import ScalarOptions


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How a completion is sampled. How many there are of a prompt, and the seed, are the trainer's."""

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    stop: tuple[str, ...] = ()
    """Texts that end a completion, besides the model's own stop tokens; all tokens that were drawn are kept."""

    def __post_init__(self) -> None:
        """Refuse what cannot be sampled, naming the option."""
        self.params()

    def params(self, *, n: int = 1, seed: int = 0) -> SamplingParams:
        """What a rollout is asked: ``n`` completions a prompt."""
        return SamplingParams(**vars(self), n=n, seed=seed)


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """One step: ``prompts_per_step`` prompts of ``responses_per_prompt`` completions, ``updates_per_step`` updates."""

    steps: int
    prompts_per_step: int
    responses_per_prompt: int
    sampling: SamplingOptions
    updates_per_step: int = 1
    evaluate_every: int = 25
    sampling_rounds: int = 1
    """Dynamic sampling draws up to so many rounds of prompts until ``prompts_per_step`` groups have a signal. 1 trains
    on those of the first."""
    scalar: ScalarOptions = ScalarOptions()
    overlong_buffer: int | None = None
    """DAPO's penalty of long completions: it grows to 1 over the last so many of ``max_new_tokens``; of a conversation
    the longest turn counts."""
    correct_reward: float = 1.0
    """The reward from which on a completion is correct: for pass@k, and for losses that read what is (VAPO)."""
    critic_warmup: int = 0
    """First steps in which the critic alone is updated."""
    pass_at: tuple[int, ...] = ()
    """k of the pass@k that an evaluation measures, on completions sampled as for training."""
    pass_samples: int | None = None
    """Completions of each held-out row for pass@k. None: the largest k."""
    recompute_old_logprobs: bool = False
    """False takes π_old from sampling time. The two are equal where the rollout has the trainer's own weights and
    precision: the trainer scores over the tokens that a truncated sampler allowed."""
    least_effective_share: float = 0.5
    """With recompute_old_logprobs: warn once, and record ``mismatch/alarm``, where the tokens of a step count for less
    than this share of them as a sample of the trainer's policy."""

    def __post_init__(self) -> None:
        """Refuse what cannot be counted, sampled or estimated."""
        counted = ("steps", "prompts_per_step", "responses_per_prompt", "updates_per_step", "evaluate_every")
        if min(*(getattr(self, name) for name in counted), self.sampling_rounds, *self.pass_at) < 1:
            raise ValueError(f"counts must be ≥ 1, got {given(self, *counted, 'sampling_rounds', 'pass_at')}")
        if self.critic_warmup < 0:
            raise ValueError(f"critic_warmup must be ≥ 0, got {self.critic_warmup}")
        if self.critic_warmup >= self.steps:
            raise ValueError(
                f"critic_warmup={self.critic_warmup} of {self.steps} steps: the policy would never be updated"
            )
        if not self.pass_at:
            require_used(self, ("pass_samples",), "without --policy.pass-at", part="policy")
        if not self.recompute_old_logprobs:
            require_used(self, ("least_effective_share",), "without --policy.recompute-old-logprobs", part="policy")
        if self.pass_samples is not None and self.pass_samples < max(self.pass_at, default=1):
            raise ValueError(f"pass_samples={self.pass_samples} is too few for pass_at={self.pass_at}")
        if not 0 <= self.least_effective_share <= 1:
            raise ValueError(f"least_effective_share must be from 0 to 1, got {self.least_effective_share}")
        limit = self.sampling.max_new_tokens
        if self.overlong_buffer is not None and not 0 <= self.overlong_buffer <= limit:
            raise ValueError(f"overlong_buffer must be from 0 to max_new_tokens {limit}, got {self.overlong_buffer}")
        if self.sampling.temperature == 0:
            raise ValueError("greedy completions of one prompt are all the same: sampling.temperature must be > 0")
