"""``InferenceEngine``: prompts in; token ids, and the log-probabilities they were sampled with, out."""

from collections.abc import Sequence
from typing import ClassVar

from rl_bridge.data.requests import Prompt, SamplingParams, requests_of
from rl_bridge.data.trajectory import Trajectory
from rl_bridge.engines.base import Engine, What
from rl_bridge.engines.splitting import NeedParallel


class InferenceEngine(Engine):
    """A rollout worker (``rl_bridge.rollout``), called in one way wherever it is."""

    movable: ClassVar[tuple[What, ...]] = ("weights", "kv_cache")

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Trajectory]:
        """``sampling.n`` trajectories a prompt, prompt by prompt. Token ids are never decoded and encoded again."""
        groups = self.call("generate", NeedParallel(requests_of(prompts, sampling.seed)), sampling)
        return [trajectory for group in groups for trajectory in group]

    @property
    def weights_version(self) -> int:
        """The version of the weights that the next completions will be sampled from."""
        return self.call("weights_version")
