"""``InferenceEngine``: prompts in; token ids, and the log-probabilities they were sampled with, out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, ClassVar, Self

from rl_bridge.data.trajectory import Budget, Prompt, RowRequest, SamplingParams, Trajectory, requests_of
from rl_bridge.engines.dispatch import NeedParallel
from rl_bridge.engines.engine import Engine, Revived, What
from rl_bridge.engines.worker import TENSOR_PARALLEL_SIZE
from rl_bridge.environments.environment import EnvironmentFactory
from rl_bridge.parallel.mesh import Mesh


class InferenceEngine(Revived, Engine):
    """A rollout worker (``rl_bridge.rollout``), called in one way wherever it is."""

    movable: ClassVar[tuple[What, ...]] = ("weights", "kv_cache")
    wraps: ClassVar[frozenset[str]] = frozenset({"generate", "stream", "converse", "weights_version"})
    _streams: ClassVar[Iterator[int]] = count()

    def build(self, *, mesh: Mesh | None = None, tensor_parallel_size: int = 1, **wishes: Any) -> Self:
        """Build as ``Engine.build`` does. Each worker holds a whole model.

        ``tensor_parallel_size``: processes that each worker's vLLM, or its server, is cut over.

        Raises:
            ValueError: also a mesh that would cut the model or its tokens, or workers whose backend is not cut so.
        """
        layout = Mesh() if mesh is None else mesh
        if layout.tensor > 1 or layout.sequence > 1:
            raise ValueError(
                f"{self.name}: {layout} would make {layout.tensor * layout.sequence} copies that generate for the same "
                "prompts: a rollout worker holds its model whole. More workers are Mesh(replicate=N). A model that "
                "needs several GPUs to generate is cut by its engine: build(tensor_parallel_size=...) with VLLMRollout "
                "or ServedRollout, or a server with its own tensor parallelism, asked by SGLangRollout or, without "
                "weight updates, OpenAIEndpoint"
            )
        factory = self._factory
        if tensor_parallel_size != 1:
            self._factory = partial(_over_ranks, factory, tensor_parallel_size)
        try:
            return super().build(mesh=mesh, **wishes)
        finally:
            self._factory = factory

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        seconds: float | None = None,
        request_seconds: float | None = None,
        tokens: int | None = None,
    ) -> list[Trajectory]:
        """``sampling.n`` trajectories a prompt, prompt by prompt. Token ids are never decoded and encoded again.

        What is not finished at a limit ends with the finish reason "abort" and the tokens that it has.

        Args:
            prompts: text, chat messages or token ids.
            sampling: of each completion, with its own budget of tokens.
            seconds: of the whole call.
            request_seconds: of one completion; all begin with the call.
            tokens: of all completions together. Each worker has an equal share.

        Raises:
            ValueError: a limit that is not positive.
        """
        limit = self._budget(seconds=seconds, request_seconds=request_seconds, tokens=tokens)
        groups = self.asked_again("generate", NeedParallel(requests_of(prompts, sampling.seed)), sampling, **limit)
        return [trajectory for group in groups for trajectory in group]

    def _budget(self, **limits: float | None) -> dict[str, Any]:
        """The argument ``budget`` of a worker's method, if there is a limit."""
        budget = Budget(**limits)  # type: ignore[arg-type]
        return {"budget": budget.share(self.workers)} if budget else {}

    def stream(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        seconds: float | None = None,
        request_seconds: float | None = None,
        tokens: int | None = None,
    ) -> Iterator[Trajectory]:
        """The trajectories of ``generate`` as they finish; ``group`` is the place of the prompt.

        Several streams may be read in turns. One that is left before its end is given up when it is closed or deleted,
        and its rows leave the engine. Time passes between two trajectories that are read too.
        """
        name = next(self._streams)
        remaining = len(prompts) * sampling.n
        limit = self._budget(seconds=seconds, request_seconds=request_seconds, tokens=tokens)
        self.call("open_stream", NeedParallel(requests_of(prompts, sampling.seed)), sampling, name, **limit)
        try:
            while remaining:
                finished = [trajectory for batch in self.call("next_completions", name) for trajectory in batch]
                remaining -= len(finished)
                yield from finished
        finally:
            self.call("close_stream", name)

    def converse(
        self,
        rows: Sequence[Mapping[str, Any]],
        sampling: SamplingParams,
        environment: EnvironmentFactory,
        max_turns: int,
        *,
        max_tokens: int | None = None,
        step_timeout: float = 60.0,
        at_once: int = 64,
        processes: int = 0,
        seconds: float | None = None,
        request_seconds: float | None = None,
        tokens: int | None = None,
    ) -> list[Trajectory]:
        """``sampling.n`` conversations a row with environments of their own, row by row, as the worker's method has it.

        What is not finished at a limit ends by "abort", as for ``generate``: ``seconds`` of the whole call,
        ``request_seconds`` of one conversation from its opening, ``tokens`` that the policy draws in the call.
        Where any environment gave a reward, ``rewards["environment"]`` is there in all, 0 where it was given none.
        """
        requests = [RowRequest(row, (sampling.seed, place), place) for place, row in enumerate(rows)]
        limits = {"max_tokens": max_tokens, "step_timeout": step_timeout, "at_once": at_once, "processes": processes}
        limits |= self._budget(seconds=seconds, request_seconds=request_seconds, tokens=tokens)
        groups = self.asked_again("converse", NeedParallel(requests), sampling, environment, max_turns, **limits)
        trajectories = [trajectory for group in groups for trajectory in group]
        if any(trajectory.turn_rewards for trajectory in trajectories):
            trajectories = [t if t.rewards else t.labelled(rewards={"environment": 0.0}) for t in trajectories]
        return trajectories

    @property
    def weights_version(self) -> int:
        """The version of the weights that the next completions will be sampled from."""
        return self.call("weights_version")


def _over_ranks(factory: Callable[[], Any], size: int) -> Any:
    """In a worker's process: what the factory makes, with its backend cut over ``size`` ranks."""
    if size < 1:
        raise ValueError(f"tensor_parallel_size must be positive, got {size}")
    token = TENSOR_PARALLEL_SIZE.set(size)
    try:
        worker = factory()
    finally:
        TENSOR_PARALLEL_SIZE.reset(token)
    if (actual := getattr(worker, "tensor_parallel_size", 1)) != size:
        if hasattr(worker, "close"):
            worker.close()
        raise ValueError(
            f"build(tensor_parallel_size={size}) made a {type(worker).__name__} of {actual}: VLLMRollout and "
            "ServedRollout have engines that are cut so"
        )
    return worker
