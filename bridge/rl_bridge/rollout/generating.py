"""The methods ``generate`` and ``stream`` of a rollout worker: prompts through its decoder, trajectories out."""

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rl_bridge.data.budget import Budget, Spending
from rl_bridge.data.requests import Request, SamplingParams
from rl_bridge.data.trajectory import Trajectory
from rl_bridge.engines.results import returns
from rl_bridge.models.encoding import encode_prompt
from rl_bridge.rollout.completed import completed
from rl_bridge.rollout.token_sampler import request_seeds


class Generating:
    """What a worker with a decoder can do with prompts."""

    _tokenizer: PreTrainedTokenizerBase
    _streams: dict[int, "Completions"]
    longest: int | None = None
    """Tokens of the longest sequence; None: no limit but the model's."""

    @abstractmethod
    def decoder(self, sampling: SamplingParams) -> Any:
        """An empty ``Decoder`` with the weights as they are."""

    @abstractmethod
    def weights_version(self) -> int:
        """The version of the weights in use."""

    @returns("rows")
    @torch.no_grad()
    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, budget: Budget | None = None
    ) -> list[list[Trajectory]]:
        """``sampling.n`` trajectories of each request, in the order of the requests.

        ``budget``: what is not finished then is taken out, with the finish reason "abort" and what it has. All requests
        begin with the call.
        """
        completions = Completions(self, self._tokenizer, requests, sampling, budget)
        made: dict[tuple[int, int], Trajectory] = {}
        while completions.left:
            made |= completions.step()
        return [[made[place, number] for number in range(sampling.n)] for place in range(len(requests))]

    @returns("same")
    def open_stream(
        self, requests: Sequence[Request], sampling: SamplingParams, name: int, budget: Budget | None = None
    ) -> None:
        """Begin on these requests: ``next_completions(name)`` gives what finishes, until ``close_stream(name)``."""
        made = Completions(self, self._tokenizer, requests, sampling, budget)
        self.__dict__.setdefault("_streams", {})[name] = made

    @returns("local")
    @torch.no_grad()
    def next_completions(self, name: int) -> list[Trajectory]:
        """Draw until a trajectory finishes: all that did. An empty list: there are no more.

        Raises:
            ValueError: the weights of a worker in this process have changed since the stream was opened.
        """
        completions = self._streams[name]
        made: dict[tuple[int, int], Trajectory] = {}
        while completions.left and not made:
            made = completions.step()
        return list(made.values())

    @returns("same")
    def close_stream(self, name: int) -> None:
        """Forget the stream; the engine has room for others at once."""
        completions = self._streams.pop(name, None)
        if completions is not None and completions.left:
            completions.withdraw()


class Completions:
    """Requests in a decoder of their own, and the trajectories that they become."""

    def __init__(
        self,
        worker: Generating,
        tokenizer: PreTrainedTokenizerBase,
        requests: Sequence[Request],
        sampling: SamplingParams,
        budget: Budget | None = None,
    ) -> None:
        """Encode the prompts and add them: nothing is drawn yet. From here on the budget is spent."""
        self._worker, self._tokenizer = worker, tokenizer
        self._requests, self._sampling = requests, sampling
        self._version = worker.weights_version()
        self._prompts = [encode_prompt(tokenizer, request.prompt) for request in requests]
        length = max(map(len, self._prompts), default=0) + sampling.max_new_tokens
        if worker.longest is not None and length > worker.longest:
            new = sampling.max_new_tokens
            raise ValueError(
                f"a prompt of {length - new} tokens and {new} new ones are more than the engine holds, "
                f"{worker.longest} (max_model_len)"
            )
        self.left = len(requests) * sampling.n
        """Trajectories that have not finished."""
        self._spending = None if budget is None else Spending(budget)
        self._began, self._tokens = time.monotonic(), 0
        if not requests:
            return
        self._decoder = worker.decoder(sampling)
        if budget is not None and budget.tokens is not None:
            self._decoder.count_tokens()
        seeds = request_seeds([request.id for request in requests], sampling.n, torch.device("cpu")).tolist()
        # Prompts of similar length go together: a step costs as much as its longest row.
        for place in sorted(range(len(requests)), key=lambda n: len(self._prompts[n])):
            for number, seed in enumerate(seeds[place]):
                self._decoder.add((place, number), self._prompts[place], seed=seed, limit=sampling.max_new_tokens)

    def step(self) -> dict[tuple[int, int], Trajectory]:
        """One step of the decoder: the trajectories that finished, by the place of the request and their number."""
        if not self.left:
            return {}
        if not self._spent():
            return self._made(self._decoder.step())
        made = self.withdraw()
        while self.left:
            made |= self._made(self._decoder.step())  # what had ended when the rest was taken out
        return made

    def _spent(self) -> bool:
        """Whether the budget ends what is left."""
        if self._spending is None:
            return False
        counted = self._spending.budget.tokens is not None
        tokens = self._tokens + (self._decoder.unfinished_tokens if counted else 0)
        return self._spending.over(tokens) or self._spending.late(self._began)

    def withdraw(self) -> dict[tuple[int, int], Trajectory]:
        """All that are left, unfinished."""
        return self._made(self._decoder.withdraw())

    def _made(self, rows: Sequence[Any]) -> dict[tuple[int, int], Trajectory]:
        made: dict[tuple[int, int], Trajectory] = {}
        for drawn in rows:
            place, number = drawn.key
            made[place, number] = self._trajectory(place, number, drawn)
            self._tokens += len(drawn.tokens)
        self.left -= len(made)
        return made

    def _trajectory(self, place: int, number: int, drawn: Any) -> Trajectory:
        request, prompt = self._requests[place], self._prompts[place]
        if drawn.versions is None and self._worker.weights_version() != self._version:
            raise ValueError(
                f"the weights changed from version {self._version} to {self._worker.weights_version()} while "
                "completions were drawn"
            )
        versions = self._version if drawn.versions is None else drawn.versions
        return completed(self._tokenizer, request, number, prompt, drawn, versions, self._sampling.stop)
