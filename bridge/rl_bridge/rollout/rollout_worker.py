"""Methods of a rollout worker: ``generate``, streams, ``converse``, rounds for rollouts that run ahead."""

import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import ClassVar

import torch
from transformers import PreTrainedTokenizerBase

from rl_bridge.data.messages import chat_of
from rl_bridge.data.trajectory import Budget, Request, RowRequest, SamplingParams, Spending, Trajectory, single_turn
from rl_bridge.engines.dispatch import returns
from rl_bridge.environments.environment import EnvironmentFactory, Session, Talker
from rl_bridge.environments.environment_calls import THREAD_WAITS, EnvironmentProcesses, ThreadedSteps
from rl_bridge.environments.factories import require_here
from rl_bridge.models.encoding import encode_prompt, messages_of
from rl_bridge.models.turn_template import TurnTemplate
from rl_bridge.rollout.ahead.ledger import Key, Tokens
from rl_bridge.rollout.ahead.pumps import Ended, Row
from rl_bridge.rollout.conversations import Conversations, Limits, Opening
from rl_bridge.rollout.decoder import Decoder, Drawn
from rl_bridge.rollout.sampling import StopTexts, request_seeds


def completed(
    tokenizer: PreTrainedTokenizerBase,
    request: Request,
    sample: int,
    *,
    prompt: Sequence[int],
    drawn: Drawn,
    version: int | Sequence[int],
    stop: Sequence[str] = (),
) -> Trajectory:
    """Sample number ``sample`` of a request as a trajectory; one of the texts ``stop`` may have ended it.

    ``version``: of the weights that drew the tokens, or of each token. The message's text is without the token that
    ended the sample, and with the text that did. The trajectory has all tokens.
    """
    by_text = StopTexts(tokenizer, stop).found(drawn.tokens) if drawn.reason == "stop" else None
    ended = drawn.reason == "stop" and by_text is None
    text = str(tokenizer.decode(list(drawn.tokens[:-1] if ended else drawn.tokens)))
    return single_turn(
        prompt,
        drawn.tokens,
        logprobs=drawn.logprobs,
        version=version,
        finish_reason=drawn.reason,
        stop_reason=by_text,
        allowed_tokens=None if drawn.allowed is None else (*[()] * len(prompt), *drawn.allowed),
        request_id=(*request.id, sample),
        group=request.group,
        messages=(*messages_of(request.prompt), {"role": "assistant", "content": text}),
        tools=tuple(chat_of(request.prompt).tools),
    )


class WithDecoder:
    """A worker with a decoder."""

    _tokenizer: PreTrainedTokenizerBase
    _stop: Collection[int]
    """Ids that end a completion, or a turn."""
    longest: int | None = None
    """Tokens of the longest sequence that the engine holds or the model has positions for; None: no limit."""
    holds_less: bool = False
    """Whether the model alone would read longer sequences."""

    @abstractmethod
    def decoder(self, sampling: SamplingParams) -> Decoder:
        """An empty decoder with the present weights."""
        ...

    @abstractmethod
    def weights_version(self) -> int:
        """The version of the weights in use."""
        ...

    @returns("same")
    def ends(self) -> tuple[frozenset[int], int | None]:
        """Ids that end a turn, and the tokens of the longest sequence (None: no limit)."""
        return frozenset(self._stop), self.longest

    @returns("same")
    def narrower(self) -> int | None:
        """Tokens of the longest sequence, if the model alone would read longer ones; else None."""
        return self.longest if self.holds_less else None


class Generating(WithDecoder):
    """Completions of prompts, by a worker with a decoder: all at once or as a stream."""

    _streams: dict[int, "Completions"]

    @returns("rows")
    @torch.no_grad()
    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, budget: Budget | None = None
    ) -> list[list[Trajectory]]:
        """``sampling.n`` trajectories of each request, in the order of the requests.

        ``budget``: trajectories that are unfinished at its end are taken out, with the finish reason "abort" and their
        tokens so far. All requests begin with the call.
        """
        completions = Completions(self, self._tokenizer, requests, sampling, budget)
        trajectories: dict[tuple[int, int], Trajectory] = {}
        while completions.left:
            trajectories |= completions.step()
        return [[trajectories[place, number] for number in range(sampling.n)] for place in range(len(requests))]

    @returns("same")
    def open_stream(
        self, requests: Sequence[Request], sampling: SamplingParams, name: int, budget: Budget | None = None
    ) -> None:
        """Begin these requests: ``next_completions(name)`` returns finished ones, until ``close_stream(name)``."""
        completions = Completions(self, self._tokenizer, requests, sampling, budget)
        self.__dict__.setdefault("_streams", {})[name] = completions

    @returns("local")
    @torch.no_grad()
    def next_completions(self, name: int) -> list[Trajectory]:
        """Draw until trajectories finish, and return them. An empty list: there are no more.

        Raises:
            ValueError: the weights of a worker in this process have changed since the stream was opened, or an update
                of an engine has begun and has no proof.
        """
        completions = self._streams[name]
        trajectories: dict[tuple[int, int], Trajectory] = {}
        while completions.left and not trajectories:
            self.weights_version()  # an engine in the middle of an update draws nothing: this raises then
            trajectories = completions.step()
        return list(trajectories.values())

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
        """Encode the prompts and add them; nothing is drawn yet. The budget's time begins here."""
        self._worker, self._tokenizer = worker, tokenizer
        self._requests, self._sampling = requests, sampling
        self._version = worker.weights_version()
        self._prompts = [encode_prompt(tokenizer, request.prompt) for request in requests]
        length = max(map(len, self._prompts), default=0) + sampling.max_new_tokens
        if worker.longest is not None and length > worker.longest:
            new = sampling.max_new_tokens
            raise ValueError(
                f"a prompt of {length - new} tokens and {new} new ones are more than the engine holds, "
                f"{worker.longest} (max_model_len, or the model's positions)"
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
        seeds = request_seeds([request.id for request in requests], sampling.n).tolist()
        # Prompts of similar length go together: a step costs as much as its longest row.
        for place in sorted(range(len(requests)), key=lambda place: len(self._prompts[place])):
            for number, seed in enumerate(seeds[place]):
                self._decoder.add((place, number), self._prompts[place], seed=seed, limit=sampling.max_new_tokens)

    def step(self) -> dict[tuple[int, int], Trajectory]:
        """One step of the decoder; returns (place of the request, number) → trajectory, of those that finished."""
        if not self.left:
            return {}
        return self.withdraw() if self._spent() else self._finished(self._decoder.step())

    def _spent(self) -> bool:
        """Whether the budget is spent."""
        if self._spending is None:
            return False
        counted = self._spending.budget.tokens is not None
        tokens = self._tokens + (self._decoder.unfinished_tokens if counted else 0)
        return self._spending.over(tokens) or self._spending.late(self._began)

    def withdraw(self) -> dict[tuple[int, int], Trajectory]:
        """Take all unfinished trajectories out, and return them."""
        return self._finished(self._decoder.withdraw())

    def _finished(self, rows: Sequence[Drawn]) -> dict[tuple[int, int], Trajectory]:
        trajectories: dict[tuple[int, int], Trajectory] = {}
        for drawn in rows:
            place, number = drawn.key
            trajectories[place, number] = self._trajectory(place, number, drawn)
            self._tokens += len(drawn.tokens)
        self.left -= len(trajectories)
        return trajectories

    def _trajectory(self, place: int, number: int, drawn: Drawn) -> Trajectory:
        request, prompt = self._requests[place], self._prompts[place]
        if drawn.versions is None and self._worker.weights_version() != self._version:
            raise ValueError(
                f"the weights changed from version {self._version} to {self._worker.weights_version()} while "
                "completions were drawn"
            )
        version = self._version if drawn.versions is None else drawn.versions
        stop = self._sampling.stop
        return completed(self._tokenizer, request, number, prompt=prompt, drawn=drawn, version=version, stop=stop)


class Conversing(WithDecoder):
    """Conversations between the policy and environments, by a worker with a decoder."""

    _processes: EnvironmentProcesses | None = None

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
            environment: makes an environment.
            max_turns: turns of the policy.
            max_tokens: tokens of a whole trajectory, its opening and the environment's messages included. None: as many
                as the engine holds, or the model has positions.
            step_timeout: seconds of one call of an environment.
            at_once: calls of environments that run at the same time.
            processes: environments that live at the same time, each in a process of its own, which is ended when a
                call takes longer than ``step_timeout``. 0: threads of this process, which nothing can end.
            budget: conversations that are unfinished at one of its limits end by "abort".

        Raises:
            ValueError: a limit that leaves no turn or is beyond what the engine holds, a chat template that no
                conversation can go on with, environments all of which failed, or one that cannot be in a process of its
                own.
            FileNotFoundError: this machine lacks the environment's file.
        """
        limits = Limits(
            max_turns=max_turns, turn_tokens=sampling.max_new_tokens, all_tokens=max_tokens, longest=self.longest
        )
        version = self.weights_version()
        if not requests:
            return []
        session: Callable[[], Talker] = partial(Session, environment)
        if processes:
            session = self._environment_processes(environment, step_timeout).session
            # The process keeps the limit; a thread only waits for the process.
            step_timeout += THREAD_WAITS
        else:
            require_here(environment)
        seeds = request_seeds([request.id for request in requests], sampling.n).tolist()
        openings = [
            (Opening(request_id=(*request.id, number), seed=seed, row=request.row, group=request.group), session())
            for request, row_seeds in zip(requests, seeds, strict=True)
            for number, seed in enumerate(row_seeds)
        ]
        with ThreadedSteps(limit=step_timeout, at_once=at_once) as steps:
            template = TurnTemplate(self._tokenizer, self._stop)
            options = {"version": version, "together": processes or None, "spending": Spending(budget or Budget())}
            talks = Conversations(self.decoder(sampling), steps, template, limits, **options)
            trajectories = talks.run(openings)
        return [trajectories[start : start + sampling.n] for start in range(0, len(trajectories), sampling.n)]

    def _environment_processes(self, environment: EnvironmentFactory, limit: float) -> EnvironmentProcesses:
        """The processes of this factory's environments. The last ones are kept, as their start takes seconds."""
        if self._processes is None or not self._processes.serves(environment, limit):
            if self._processes is not None:
                self._processes.close()
            self._processes = EnvironmentProcesses(environment, limit=limit)
        return self._processes


NOTHING = Tokens([], [], None)


class EngineDied(RuntimeError):
    """The engine behind a worker is gone with the tokens that it was drawing. The worker may be able to restart it."""


class Advancing(WithDecoder):
    """Rounds of a decoder whose rows stay between calls, for the rollout pump.

    Weights change only when no row is left. Then rows go in again with their tokens so far, so that each token is of
    one version.
    """

    engine_errors: ClassVar[tuple[type[Exception], ...]] = ()
    """Errors of a decoder's step that mean that the engine behind the decoder is gone."""
    _advancing: Decoder | None = None
    _advancing_version = -1

    @returns("local")
    @torch.no_grad()
    def advance(self, rows: Sequence[Row], sampling: SamplingParams, steps: int, exactly: bool = False) -> list[Ended]:
        """Put ``rows`` in, then draw up to ``steps`` tokens for every row; returns the rows that ended.

        A row's prompt is token ids. ``exactly``: an engine that draws on by itself stops every row after ``steps``.

        Raises:
            EngineDied: there is no engine any more.
            ValueError: a row went on behind its stop token, in a checkpoint of an older version.
        """
        decoder, version = self._advancing, self.weights_version()
        if decoder is None or not (decoder.running or decoder.waiting):
            decoder, self._advancing_version = self.decoder(sampling), version
            if exactly:
                decoder.draw_in_rounds()
            self._advancing = decoder
        assert version == self._advancing_version, (
            f"weights changed from version {self._advancing_version} to {version} under rows that are being drawn"
        )
        # Prompts of similar length go together: a step costs as much as its longest row.
        ended = [Ended(row.key, NOTHING, "stop") for row in rows if _has_stopped(row, self._stop)]
        over = {row.key for row in ended}
        for row in sorted(rows, key=lambda row: len(row.prompt) + len(row.tokens)):
            if row.key in over:
                continue
            tokens = [*row.prompt, *row.tokens]
            decoder.add(
                row.key, tokens, seed=row.seed, drawn=row.drawn, limit=row.limit, said=row.said, greedy=row.greedy
            )
        try:
            return ended + [_ended(drawn) for drawn in decoder.round(steps)]
        except self.engine_errors as error:
            raise EngineDied(f"{type(error).__name__}: {error}") from error

    @returns("local")
    def withdraw(self, keys: Collection[Key]) -> list[Ended]:
        """Take these rows out; they are unfinished, but for those that ended since the last round.

        Rows of other workers may be among ``keys``.
        """
        if self._advancing is None:
            return []
        return [_ended(drawn) for drawn in self._advancing.withdraw(keys)]

    @returns("local")
    def restart(self) -> None:
        """Forget all rows, and start the engine again if it is gone. Its weights are the source's then."""
        self._advancing = None


def _ended(drawn: Drawn) -> Ended:
    # A server draws between two commands, so that a row may have ended before it was withdrawn.
    reason = None if drawn.reason == "abort" else drawn.reason
    return Ended(drawn.key, Tokens(drawn.tokens, drawn.logprobs, drawn.allowed), reason)


def _has_stopped(row: Row, stop: Collection[int]) -> bool:
    """Whether a row's last token is a stop token: older checkpoints have such rows of servers among the unfinished."""
    turn = row.tokens[len(row.tokens) - row.said :]
    place = next((place for place, token in enumerate(turn) if token in stop), None)
    if place is not None and place + 1 < len(turn):
        raise ValueError(
            f"sample {row.key[1]} of prompt {row.key[0]} has {len(turn) - place - 1} tokens behind its stop token "
            f"{turn[place]}: an older version drew on there and wrote it to the checkpoint. Resume from a checkpoint "
            "before that, or begin the run anew"
        )
    return place is not None
