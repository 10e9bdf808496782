"""What a run of the policy trainer depends on: steps, prompts, responses, how they are sampled and evaluated."""

from dataclasses import dataclass

from rl_bridge.data.requests import SamplingParams


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How a completion is sampled. How many there are of a prompt, and the seed, are the trainer's."""

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be sampled, naming the option."""
        self.params()

    def params(self, *, n: int = 1, seed: int = 0) -> SamplingParams:
        """What a rollout is asked: ``n`` completions a prompt."""
        return SamplingParams(**vars(self), n=n, seed=seed)

    @property
    def truncated(self) -> list[str]:
        """The options that cut tokens off the distribution."""
        return [name for name in ("top_k", "top_p", "min_p") if getattr(self, name) is not None]


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """One step: ``prompts_per_step`` prompts of ``responses_per_prompt`` completions, ``updates_per_step`` updates."""

    steps: int
    prompts_per_step: int
    responses_per_prompt: int
    sampling: SamplingOptions
    updates_per_step: int = 1
    evaluate_every: int = 25
    recompute_old_logprobs: bool = False
    """False takes π_old from sampling time. The two are equal where the rollout has the trainer's own weights and
    precision and samples the whole distribution."""

    def __post_init__(self) -> None:
        """Refuse what has no group to compare within."""
        counts = (self.steps, self.prompts_per_step, self.updates_per_step, self.evaluate_every)
        if min(counts) < 1 or self.responses_per_prompt < 2:
            raise ValueError(f"counts must be ≥ 1 and a group needs responses_per_prompt ≥ 2, got {self}")
        if self.sampling.temperature == 0:
            raise ValueError("greedy completions of one prompt are all the same: sampling.temperature must be > 0")
        if self.sampling.truncated and not self.recompute_old_logprobs:
            # π is of the whole distribution: against a truncated π_old no ratio would start at 1.
            raise ValueError(f"sampling with {', '.join(self.sampling.truncated)} needs recompute_old_logprobs=True")
