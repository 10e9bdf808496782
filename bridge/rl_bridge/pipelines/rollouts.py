"""Which engine draws the completions of a run."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from rl_bridge.data.budget import Budget
from rl_bridge.messages import given
from rl_bridge.models.source import ModelSource
from rl_bridge.rollout import InProcessRollout
from rl_bridge.rollout.inprocess import Precision
from rl_bridge.rollout.vllm import VLLMOptions


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """The engine of the rollouts."""

    backend: Literal["in_process", "vllm", "vllm_server"] = "in_process"
    """in_process: transformers' own model, on any device. vllm: an engine of vLLM in each worker (docs/rollouts.md).
    vllm_server: a server process of vLLM beside each worker, started again if it dies."""
    precision: Precision = "fp32"
    """Of the linear layers of an in_process rollout; vllm has ``--rollout.vllm.precision``."""
    vllm: VLLMOptions = VLLMOptions()
    """Of an engine of vLLM."""
    step_seconds: float | None = None
    """Seconds for the completions of a training step (a round of them, with ``--policy.sampling-rounds``). What is
    unfinished then is aborted and does not count. Time is not reproducible, so neither is such a run."""
    step_tokens: int | None = None
    """Tokens that the policy draws in a training step; each worker has an equal share. What is unfinished then is
    aborted likewise."""
    request_seconds: float | None = None
    """Seconds for one completion, or one conversation from its opening. The completions of a step begin together."""

    def __post_init__(self) -> None:
        """Refuse options that nothing reads, and limits that leave nothing."""
        self.budget()
        if self.backend != "in_process" and self.precision != "fp32":
            raise ValueError(f"an engine of vLLM has --rollout.vllm.precision, got precision {self.precision}")
        if self.backend == "in_process" and self.vllm != VLLMOptions():
            raise ValueError(f"options of vLLM need backend vllm, got backend {self.backend} and {self.vllm}")

    def budget(self) -> dict[str, Any]:
        """The limits of a step, as the methods of an engine have them."""
        limits = {"seconds": self.step_seconds, "request_seconds": self.request_seconds, "tokens": self.step_tokens}
        try:
            Budget(**limits)  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"{error} ({given(self, 'step_seconds', 'request_seconds', 'step_tokens')})") from error
        return {name: value for name, value in limits.items() if value is not None}

    @property
    def exact(self) -> bool:
        """Whether the engine computes as a trainer in float32 does, but for the order of sums."""
        if self.backend == "in_process":
            return self.precision == "fp32"
        precisions = {self.vllm.precision, *self.vllm.rank_precisions}
        return precisions == {"fp32"} and self.vllm.activations == "float32"

    def factory(self, source: ModelSource, tokenizer: PreTrainedTokenizerBase, *, sleep: bool) -> Callable[[], Any]:
        """Makes a worker. ``sleep``: it will have to leave its device while others work there.

        Raises:
            ValueError: there is no vLLM here, or a server would have to leave its device.
        """
        if self.backend == "in_process":
            return partial(InProcessRollout, source, tokenizer, precision=self.precision)
        if importlib.util.find_spec("vllm") is None:
            raise ValueError(
                f"backend {self.backend} needs vLLM in this environment: make install-vllm makes one with it"
            )
        if self.backend == "vllm_server":
            if sleep:
                raise ValueError(
                    "a server of vLLM keeps its device: give the rollouts workers of their own "
                    "(--asynchronous.rollout-workers), or take backend vllm"
                )
            return partial(_served_rollout, source, tokenizer, self.vllm)
        return partial(_vllm_rollout, source, tokenizer, replace(self.vllm, sleep=self.vllm.sleep or sleep))


def _vllm_rollout(source: ModelSource, tokenizer: PreTrainedTokenizerBase, options: VLLMOptions) -> Any:
    from rl_bridge.rollout.vllm.rollout import VLLMRollout

    return VLLMRollout(source, tokenizer, options)


def _served_rollout(source: ModelSource, tokenizer: PreTrainedTokenizerBase, options: VLLMOptions) -> Any:
    from rl_bridge.rollout.served import ServedRollout

    return ServedRollout(source, tokenizer, options)
