"""Environments of conversations that run ahead of training. The ledger has every message that they got."""

import json
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

from rl_bridge.environments.environment import EnvironmentFactory, NeedsOwnProcess, Session, Step, Talker
from rl_bridge.environments.environment_calls import THREAD_WAITS, EnvironmentProcesses, Finished, ThreadedSteps
from rl_bridge.environments.factories import require_here
from rl_bridge.models.turn_template import TurnTemplate
from rl_bridge.rollout.ahead.ledger import Group, Key, Sample, Turn
from rl_bridge.rollout.conversations import Conversation, Limits, Opening
from rl_bridge.rollout.decoder import Drawn

logger = logging.getLogger(__name__)

Name = tuple[Key, int]
"""A conversation and its beginning."""


class Reply(NamedTuple):
    """An environment's answer. Neither turn nor reason: the answer is another one than before, and all begins anew."""

    key: Key
    beginning: int
    turn: Turn | None
    reason: str | None


class Diverged(RuntimeError):
    """An environment that is asked the same a second time answers otherwise."""


@dataclass(frozen=True, kw_only=True)
class Talking:
    """How conversations are held."""

    environment: EnvironmentFactory
    limits: Limits
    template: TurnTemplate
    step_timeout: float = 60.0
    """Seconds of one call of an environment."""
    at_once: int = 64
    """Calls of environments that run at the same time."""
    processes: int = 0
    """Above 0: each environment lives in a process of its own, which is ended at its limit; so many calls at once."""

    def conversation(self, opening: Opening, sample: Sample, versions: Collection[int] = ()) -> Conversation:
        """A sample of the ledger as a conversation. ``versions``: of each drawn token's weights."""
        talk, start = Conversation(opening), 0
        drawn_by = list(versions) or sample.versions
        for place, turn in enumerate(sample.turns):
            talk.heard(_step(turn), self.template, self.limits, turn.tools)
            if turn.drawn:
                stop = start + turn.drawn
                allowed = None if sample.allowed is None else sample.allowed[start:stop]
                over = place + 1 == len(sample.turns) and sample.reason in ("length", "abort")
                reason = "length" if over else "stop"
                tokens, logprobs = sample.tokens[start:stop], sample.logprobs[start:stop]
                drawn = Drawn(None, tokens, logprobs, allowed, reason, drawn_by[start:stop])
                talk.spoke(drawn, -1, self.template)
                start = stop
        return talk


class Talks:
    """The living environments, by conversation.

    An environment dies with its process, and the ledger does not. So one that the ledger's conversation goes on with
    is made anew: it hears the row and every turn again. Where its answers are those of before, the conversation goes
    on; where they are not, it begins anew.
    """

    def __init__(self, talking: Talking, opening: Callable[[Group, int], Opening]) -> None:
        """``opening``: of a sample, by its place in the group.

        Raises:
            FileNotFoundError: this machine lacks the environment's file.
        """
        self._talking, self._opening = talking, opening
        self._processes: EnvironmentProcesses | None = None
        limit, at_once = talking.step_timeout, talking.at_once
        if talking.processes:
            self._processes = EnvironmentProcesses(talking.environment, limit=limit)
            # The process keeps the limit; a thread only waits for the process.
            limit, at_once = limit + THREAD_WAITS, talking.processes
        else:
            require_here(talking.environment)
        self._steps = ThreadedSteps(limit=limit, at_once=at_once)
        self._sessions: dict[Name, Talker] = {}
        self._asked: dict[Name, Conversation] = {}
        self._closing = 0
        self.failures: list[str] = []
        """Errors of environments, with the row."""

    @property
    def busy(self) -> bool:
        """Whether a reply is to come."""
        return bool(self._asked or self._closing)

    def ask(self, group: Group, place: int) -> None:
        """Let the environment of a sample answer; ``replies`` gives its answer."""
        sample = group.samples[place]
        name = (group.number, place), sample.beginnings
        talk = self._talking.conversation(self._opening(group, place), sample)
        self._asked[name] = talk
        is_living, session = name in self._sessions, self._sessions.get(name) or self._session()
        self._sessions[name] = session
        row, messages = talk.opening.row, tuple(talk.said)
        if not sample.turns:
            self._steps.start(name, lambda: session.reset(row))
        elif is_living:
            self._steps.start(name, lambda: session.step(messages))
        else:
            before = list(sample.turns)
            self._steps.start(name, lambda: self._again(session, talk, before), calls=len(before) + 1)

    def replies(self) -> list[Reply]:
        """Wait for answers of environments, or for ``wake``."""
        replies = []
        for finished in self._steps.finished(wait=True):
            if finished.key in self._asked:
                replies.append(self._reply(finished))
            else:
                self._closing -= 1
                if finished.error is not None:
                    cause = f"{type(finished.error).__name__}: {finished.error}"
                    logger.warning("closing an environment failed: %s", cause)
        return replies

    def wake(self) -> None:
        """From any thread: let ``replies`` return."""
        self._steps.wake()

    def keep(self, names: Collection[Name]) -> None:
        """End the environments of all other conversations but those that are being asked."""
        for name in self._sessions.keys() - set(names) - self._asked.keys():
            closing = self._sessions.pop(name).closing
            if closing is not None:
                self._closing += 1
                self._steps.start(("close", name), closing)

    def close(self) -> None:
        """End all environments; each has the time of one call for that."""
        self._asked.clear()
        self.keep(())
        while self._closing:
            self.replies()
        self._steps.__exit__()
        if self._processes is not None:
            self._processes.close()

    def _session(self) -> Talker:
        return Session(self._talking.environment) if self._processes is None else self._processes.session()

    def _again(self, session: Talker, talk: Conversation, turns: list[Turn]) -> Step:
        """Say everything again; returns the environment's answer to the last turn."""
        step = self._steps.awaited(session.reset(talk.opening.row))
        for turn, place in zip(turns, talk.drawn, strict=True):
            if (answer := _turn(step, session)) != _without_tokens(turn):
                raise Diverged(f"{talk.opening.where}: {answer} and before {turn}")
            step = self._steps.awaited(session.step(tuple(talk.said[: place + 1])))
        return step

    def _reply(self, finished: Finished) -> Reply:
        name: Any = finished.key
        (key, beginning), talk = name, self._asked.pop(name)
        session = self._sessions[name]
        if isinstance(finished.error, Diverged):
            logger.warning(
                "a conversation begins anew, its environment answers otherwise than before: %s", finished.error
            )
            return Reply(key, beginning, None, None)
        if isinstance(finished.error, NeedsOwnProcess):
            raise ValueError(talk.cause(finished.error)) from finished.error
        if finished.error is not None:
            talk.failure = finished.error
            return self._failed(key, beginning, talk, None)
        step, before = finished.value, len(talk.tokens)
        room = talk.heard(step, self._talking.template, self._talking.limits, session.tools)
        turn = _turn(step, session)
        if talk.failure is not None:
            return self._failed(key, beginning, talk, turn)
        turn.given = talk.tokens[before:]
        if isinstance(room, int):
            turn.room = room
            return Reply(key, beginning, turn, None)
        return Reply(key, beginning, turn, room)

    def _failed(self, key: Key, beginning: int, talk: Conversation, turn: Turn | None) -> Reply:
        assert talk.failure is not None
        self.failures.append(talk.cause(talk.failure))
        logger.warning("a conversation ended by an error of its environment: %s", self.failures[-1])
        return Reply(key, beginning, turn, "error")


def _turn(step: Step, session: Talker) -> Turn:
    # The turn is one that a checkpoint gives back: JSON has no tuples.
    messages, tools = json.loads(json.dumps([[dict(message) for message in step.messages], list(session.tools)]))
    return Turn(messages, step.reward, step.done, step.state_id, tools)


def _without_tokens(turn: Turn) -> Turn:
    return Turn(turn.messages, turn.reward, turn.done, turn.state_id, turn.tools)


def _step(turn: Turn) -> Step:
    return Step(messages=turn.messages, reward=turn.reward, done=turn.done, state_id=turn.state_id)
