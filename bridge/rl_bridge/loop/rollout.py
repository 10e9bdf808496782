"""``Rollout``: the engine that draws a loop's completions, one turn or a conversation with an environment."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from rl_bridge.algorithms.completions import completions
from rl_bridge.common.argument_kinds import check_call, require_default, require_kind
from rl_bridge.common.terminal import tell
from rl_bridge.data.messages import tools_of
from rl_bridge.data.rows import missing
from rl_bridge.data.trajectory import SamplingParams, Trajectory
from rl_bridge.engines import Mesh
from rl_bridge.engines.engine import Turns
from rl_bridge.environments import EnvironmentFactory, load_environment
from rl_bridge.environments.functions import FunctionTools, Parse, function_tools
from rl_bridge.executors.session import current_executor
from rl_bridge.loop.changes import draw
from rl_bridge.loop.data import Model, any_row, in_hand, name_unread
from rl_bridge.loop.groups import Groups
from rl_bridge.memory.garbage_collection import phase_ended
from rl_bridge.parallel.config import ParallelConfig
from rl_bridge.pipelines.placement import Engines
from rl_bridge.pipelines.rollout_options import RolloutOptions
from rl_bridge.rewards import with_rows


class Rollout:
    """A copy of the model in every process, which draws completions. ``policy.sync_weights(rollout)`` renews it.

    ``options`` choose the backend: transformers' own model here, or vLLM
    (``RolloutOptions(backend="vllm", vllm=VLLMOptions(…))``), and limits of a call. ``workers``: so many processes
    have a copy and no other does; ``Policy(…, apart_from=[rollout])`` then keeps away from them. ``turns``: those of
    the loop's models (``Turns``), with which the rollout shares devices. In a ``with`` statement its memory is given
    back at the end of the block.

    >>> rollout = Rollout(load_model("org/Small-1B"))  # doctest: +SKIP
    >>> sampling = SamplingParams(n=2, max_new_tokens=16, seed=7)  # doctest: +SKIP
    >>> groups = rollout.generate([{"prompt": "1+1="}], sampling)  # doctest: +SKIP
    >>> [t.messages[-1]["content"] for t in groups.trajectories]  # doctest: +SKIP
    ['2', '3']

    Raises:
        ValueError: there is no vLLM here, or there are fewer workers.
    """

    def __init__(
        self,
        model: Model,
        options: RolloutOptions | None = None,
        *,
        workers: int | None = None,
        turns: Turns | None = None,
    ) -> None:
        require_kind("model", model, Model, "one of load_model(…)")
        options = RolloutOptions() if options is None else options
        check_call(Rollout.__init__, locals())
        executor = current_executor()
        self.model, self.exact, self._budget = model, options.exact, options.budget()
        mesh, self.turns = Mesh(replicate=len(executor.slots)), turns
        engines = Engines(executor, mesh, model.source, ParallelConfig(), run="loop", turns=turns)
        engines.rollout_workers = workers
        self.engine = engines.rollout(model.tokenizer, options)
        model.remark_on_ends()
        self._tools: dict[Any, FunctionTools] = {}
        self._environments: dict[tuple[str, str], EnvironmentFactory] = {}
        self.ahead: Any = None
        """The ``Ahead`` that draws with this rollout."""
        self.weights_of: object = None
        """Whose weights these are, after ``policy.sync_weights``."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.engine.slots:
            self.release()

    def generate(self, rows: Sequence[Mapping[str, Any]], sampling: SamplingParams) -> Groups:
        """``sampling.n`` completions of each row's ``prompt``.

        A token depends on ``sampling.seed``, the row's place, the completion's number and the position alone: give each
        step a seed of its own.

        Raises:
            ValueError: a row that is no prompt, with its number, the field and what was expected.
        """
        require_kind("sampling", sampling, SamplingParams, "SamplingParams(n=…, max_new_tokens=…)")
        rows = in_hand(rows, model=self.model)
        drawn = completions(self.engine, **self._budget)(rows, sampling)
        return self._groups(drawn, rows, sampling)

    def converse(
        self,
        rows: Sequence[Mapping[str, Any]],
        sampling: SamplingParams,
        environment: EnvironmentFactory | str | None = None,
        *,
        tools: Sequence[Callable[..., Any]] = (),
        parse: Parse | None = None,
        max_turns: int = 4,
        max_tokens: int | None = None,
        step_timeout: float = 60.0,
        processes: int = 0,
    ) -> Groups:
        """``sampling.n`` conversations of each row with an environment of its own, or with functions as tools.

        ``environment`` is a class with ``reset`` and ``step``, or what ``--environment`` takes: ``FILE.py:Name`` or an
        address. The reward named ``environment`` is what the environment gave.

        ``tools`` are functions with types and a docstring that describes each argument. The chat template shows them to
        the model and says how a call is written, unless ``parse`` finds the calls in a turn's text. The policy reads
        what they return, as text or JSON, or the error; a turn without a call ends the conversation.

        A turn has at most ``sampling.max_new_tokens``, the whole conversation ``max_tokens``. An answer takes at most
        ``step_timeout`` seconds, in one of so many ``processes`` in each worker, or in a thread with 0.

        Raises:
            ValueError: tools and an environment, or neither; a function that does not describe itself; a chat template
                without tools, or one whose calls are not JSON.
        """
        require_kind("sampling", sampling, SamplingParams, "SamplingParams(n=…, max_new_tokens=…)")
        rows = in_hand(rows, any_row)
        factory = self.environment_of(rows, environment, tools, parse)
        limits: dict[str, Any] = {"max_tokens": max_tokens, "step_timeout": step_timeout, "processes": processes}
        drawn = self.engine.converse(rows, sampling, factory, max_turns, **limits, **self._budget)
        return self._groups(drawn, rows, sampling)

    def environment_of(
        self,
        rows: Sequence[Mapping[str, Any]],
        environment: EnvironmentFactory | str | None,
        tools: Sequence[Callable[..., Any]],
        parse: Parse | None,
    ) -> EnvironmentFactory:
        """Makes the environment of each conversation of ``rows``: the one that is named, or one of tools."""
        if (environment is None) == (not tools):
            raise ValueError("a conversation is with an environment or with tools: converse(…, tools=[function])")
        if environment is not None:
            require_default({"parse": parse}, (None,), "with an environment, which reads turns itself")
            if not isinstance(environment, str):
                return environment
            place = (os.getcwd(), environment)
            if place not in self._environments:  # one for the rollout's life, whatever becomes of the file
                self._environments[place] = load_environment(environment)
            return self._environments[place]
        key = (*tools, parse)
        if key not in self._tools:
            self._tools = {key: function_tools(tools, self.model.tokenizer, parse)}
            if any(map(tools_of, rows)):
                tell("row key `tools` is not read: the policy is shown the functions of converse(tools=…)")
        prompts = [row for row in rows if isinstance(row, Mapping) and not missing(row, "prompt")]
        name_unread(self.model, prompts, tools=self._tools[key].schemas)
        return self._tools[key]

    def require_lasting(self) -> None:
        """Refuse limits of one call, and turns: rollouts that run ahead draw beside training, in no call of a step.

        Raises:
            ValueError: with the limits, or with what the turns would do.
        """
        if self._budget:
            raise ValueError(f"rollouts that run ahead of training have no limits of a step, got {self._budget}")
        if self.turns is not None:
            raise ValueError(
                "rollouts that run ahead of training draw beside them: this rollout takes turns with others, and its "
                "weights would leave the device"
            )

    def release(self) -> None:
        """Give the model's memory back."""
        self.engine.release()

    def _groups(
        self, drawn: Sequence[Trajectory], rows: Sequence[Mapping[str, Any]], sampling: SamplingParams
    ) -> Groups:
        trajectories = with_rows(drawn, rows)
        phase_ended()  # cycles hold the cache of keys and values
        of_rollout: dict[str, Any] = {"pad_token": self.model.pad_token, "exact": self.exact, "drawn": draw()}
        of_rollout["tokenizer"] = self.model.tokenizer
        return Groups(trajectories=trajectories, sampling=sampling, weights_of=self.weights_of, **of_rollout)
