"""Options of rollouts that run ahead of training, and the sampler that they make."""

from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from rl_bridge.data.stream import RowStream
from rl_bridge.engines import InferenceEngine
from rl_bridge.messages import given
from rl_bridge.rewards import Rewards
from rl_bridge.rollout.asynchronous.admission import Admission
from rl_bridge.rollout.asynchronous.rollout_pump import Pace
from rl_bridge.rollout.asynchronous.talks import Talking
from rl_bridge.tracking.options import MAY_CHANGE
from rl_bridge.trainers.policy_config import PolicyConfig
from rl_bridge.trainers.policy_inputs.ahead import AheadSampler
from rl_fn import Objective


@dataclass(frozen=True, kw_only=True)
class AsynchronousOptions:
    """How far rollouts run ahead of training, and when they take new weights."""

    max_staleness: int = 0
    """Training steps between the weights that drew a token and those that train on it, at most. 0: a step begins with
    its rollout. 1: one step ahead."""
    partial: bool = False
    """Completions go on across an update, each token with the version that drew it. Else each is of one version."""
    deterministic: bool = True
    """The same tokens are drawn by the same versions in every run, whatever takes how long. Else the rollout takes new
    weights when there are any."""
    tokens_beside: int | None = None
    """Tokens of each completion drawn beside one training step, of deterministic partial rollouts."""
    round_tokens: int = 8
    """Tokens of each completion from one look at the trainer to the next."""
    window: int = 1
    """A step may pass over unfinished prompts, and take its own from so many. 1: in the order of the data."""
    request_seconds: float | None = field(default=None, metadata=MAY_CHANGE)
    """Seconds in the engine after which a completion is aborted. It does not count then."""
    rollout_workers: int | None = field(default=None, metadata=MAY_CHANGE)
    """Workers that draw and do not train, so that both happen at once. None: all workers do both, in turns."""

    def __post_init__(self) -> None:
        """Refuse what does not go together."""
        counts = (self.tokens_beside, self.round_tokens, self.rollout_workers)
        if self.max_staleness < 0 or any(count is not None and count < 1 for count in counts):
            raise ValueError(
                "counts must be ≥ 1 and max_staleness ≥ 0, got "
                f"{given(self, 'max_staleness', 'tokens_beside', 'round_tokens', 'rollout_workers')}"
            )
        if not self.on:
            others = [name for name in ("partial", "tokens_beside", "request_seconds") if getattr(self, name)]
            if others or not self.deterministic or self.window > 1:
                raise ValueError(
                    "without max_staleness nothing runs ahead, got "
                    f"{given(self, 'partial', 'tokens_beside', 'request_seconds', 'deterministic', 'window')}"
                )
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
        tokenizer: PreTrainedTokenizerBase,
        rewards: Rewards,
        stream: RowStream,
        objective: Objective,
        config: PolicyConfig,
        seed: int,
        talking: Talking | None = None,
    ) -> AheadSampler:
        """What makes the completions of each step, or with ``talking`` the conversations."""
        admission, pace = self.admission(config), self.pace(config.sampling.max_new_tokens)
        lazy = not (self.partial or self.deterministic)
        parts = rollout, tokenizer, rewards, stream, objective, config, seed
        return AheadSampler(*parts, admission=admission, pace=pace, lazy=lazy, talking=talking)
