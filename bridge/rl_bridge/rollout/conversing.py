"""The method ``converse`` of a rollout worker: its decoder, the environments' threads, and the conversations."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rl_bridge.data.budget import Budget, Spending
from rl_bridge.data.requests import RowRequest, SamplingParams
from rl_bridge.data.trajectory import Trajectory
from rl_bridge.engines.results import returns
from rl_bridge.environments.base import EnvironmentFactory
from rl_bridge.environments.processes import EnvironmentProcesses
from rl_bridge.environments.session import Session, Talker
from rl_bridge.environments.steps import ThreadedSteps
from rl_bridge.models.turns import TurnTemplate
from rl_bridge.rollout.conversation import Limits, Opening
from rl_bridge.rollout.conversations import Conversations
from rl_bridge.rollout.token_sampler import request_seeds

WAIT = 10.0
"""Seconds that a thread waits longer for an environment's process than the process may take."""


class Conversing:
    """What a worker with a decoder can do besides: let the policy and environments talk."""

    _tokenizer: PreTrainedTokenizerBase
    _stop: Collection[int]
    _processes: EnvironmentProcesses | None = None

    @abstractmethod
    def decoder(self, sampling: SamplingParams) -> Any:
        """An empty ``Decoder`` with the weights as they are."""

    @abstractmethod
    def weights_version(self) -> int:
        """The version of the weights in use."""

    @returns("rows")
    @torch.no_grad()
    def converse(
        self,
        requests: Sequence[RowRequest],
        sampling: SamplingParams,
        environment: EnvironmentFactory,
        max_turns: int,
        *,
        max_tokens: int | None = None,
        step_timeout: float = 60.0,
        at_once: int = 64,
        processes: int = 0,
        budget: Budget | None = None,
    ) -> list[list[Trajectory]]:
        """``sampling.n`` conversations of each request's row, each with an environment of its own.

        Args:
            requests: the rows that the environments begin with.
            sampling: ``max_new_tokens`` is of one turn. A turn that reaches it ends the conversation.
            environment: makes one.
            max_turns: of the policy.
            max_tokens: of a whole trajectory, its opening and the environment's words included.
            step_timeout: seconds of one call of an environment.
            at_once: calls of environments that run at the same time.
            processes: environments that live at the same time, each in a process of its own, which is ended when a
                call takes longer than ``step_timeout``. 0: threads of this process, which nothing can end.
            budget: what is not finished at one of its limits ends by "abort".

        Raises:
            ValueError: a limit that leaves no turn, a chat template that no conversation can go on with, environments
                all of which failed, or one that cannot be in a process of its own.
        """
        limits = Limits(max_turns=max_turns, turn_tokens=sampling.max_new_tokens, all_tokens=max_tokens)
        version = self.weights_version()
        if not requests:
            return []
        session: Callable[[], Talker] = partial(Session, environment)
        if processes:
            session = self._environment_processes(environment, step_timeout).session
            # The process keeps the limit; a thread only waits for that.
            step_timeout += WAIT
        seeds = request_seeds([request.id for request in requests], sampling.n, torch.device("cpu")).tolist()
        openings = [
            (
                Opening(
                    request_id=(*request.id, number),
                    seed=seed,
                    row=request.row,
                    group=request.group,
                ),
                session(),
            )
            for request, row_seeds in zip(requests, seeds, strict=True)
            for number, seed in enumerate(row_seeds)
        ]
        with ThreadedSteps(limit=step_timeout, at_once=at_once) as steps:
            template = TurnTemplate(self._tokenizer, self._stop)
            options = {"version": version, "together": processes or None, "spending": Spending(budget or Budget())}
            talks = Conversations(self.decoder(sampling), steps, template, limits, **options)
            made = talks.run(openings)
        return [made[start : start + sampling.n] for start in range(0, len(made), sampling.n)]

    def _environment_processes(self, environment: EnvironmentFactory, limit: float) -> EnvironmentProcesses:
        """What this factory's environments are forked from; the last one is kept, as its start takes seconds."""
        if self._processes is None or not self._processes.serves(environment, limit):
            if self._processes is not None:
                self._processes.close()
            self._processes = EnvironmentProcesses(environment, limit=limit)
        return self._processes
