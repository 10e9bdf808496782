"""Many conversations between a policy and its environments at once, none of which waits for another."""

import logging
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rl_bridge.data.requests import Message, RequestId
from rl_bridge.data.spans import GIVEN, Span, spans_of_turn
from rl_bridge.data.trajectory import FinishReason, Trajectory
from rl_bridge.environments.base import Step
from rl_bridge.environments.session import Talker
from rl_bridge.environments.steps import Finished, Steps
from rl_bridge.models.turns import TurnTemplate, UnusableTemplate

logger = logging.getLogger(__name__)


class DrawnTurn(Protocol):
    """What the sampler drew for one row: up to and with the end-of-sequence token, or to the row's limit."""

    @property
    def key(self) -> Hashable: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[float]: ...
    @property
    def allowed(self) -> Sequence[Sequence[int]] | None: ...
    @property
    def versions(self) -> Sequence[int] | None: ...
    @property
    def reason(self) -> str: ...


class Sampler(Protocol):
    """Rows that join and leave between two tokens (``rl_bridge.rollout.decoder``)."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    def add(self, key: Hashable, tokens: Sequence[int], *, seed: int, drawn: int = 0, limit: int) -> None: ...
    def step(self) -> Sequence[DrawnTurn]: ...


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Where a conversation ends if the environment does not end it."""

    max_turns: int
    turn_tokens: int
    """Tokens that the policy draws in one turn."""
    all_tokens: int | None = None
    """Tokens of the whole trajectory, opening and environment included."""

    def __post_init__(self) -> None:
        """Refuse what leaves no turn."""
        if self.max_turns < 1 or self.turn_tokens < 1 or (self.all_tokens is not None and self.all_tokens < 2):
            raise ValueError(f"max_turns and turn_tokens must be ≥ 1 and all_tokens ≥ 2 or None, got {self}")


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What one conversation begins with; its tokens depend on this and the environment's words alone."""

    request_id: RequestId
    seed: int
    row: Mapping[str, Any]
    group: int = 0

    @property
    def where(self) -> str:
        """The row, for messages."""
        return str(self.row.get("_where", f"request {self.request_id}"))


@dataclass
class _Conversation:
    """What was said so far, and what is known of each token."""

    opening: Opening
    session: Talker
    said: list[Message] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)
    """Places in ``said`` of the policy's messages, one a turn."""
    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    allowed: list[Sequence[int]] | None = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    spans: tuple[Span, ...] = ()
    ended: bool = True
    """Whether the last turn ended with a token, and not with a stop text."""
    answers: int = 0
    """Turns that the environment has answered."""
    rewards: list[float | None] = field(default_factory=list)
    states: list[int | None] = field(default_factory=list)
    """The state that each turn began in."""

    def give(self, tokens: Iterable[int]) -> None:
        """Tokens that the policy did not draw."""
        tokens = list(tokens)
        self.versions += [GIVEN] * len(tokens)
        self._append(tokens, False, [0.0] * len(tokens), [() for _ in tokens])

    def take(self, turn: DrawnTurn, version: int) -> None:
        """The tokens of a turn, which ``version`` drew unless the turn says otherwise."""
        allowed = None if turn.allowed is None else list(turn.allowed)
        versions = [version] * len(turn.tokens) if turn.versions is None else turn.versions
        number, start = len(self.drawn), len(self.tokens)
        self.spans += spans_of_turn(self.opening.request_id, number, start, turn.tokens, versions)
        self.versions += versions
        self._append(list(turn.tokens), True, list(turn.logprobs), allowed)

    def _append(
        self, tokens: list[int], drawn: bool, logprobs: list[float], allowed: list[Sequence[int]] | None
    ) -> None:
        self.tokens += tokens
        self.mask += [drawn] * len(tokens)
        self.logprobs += logprobs
        self.allowed = None if self.allowed is None or allowed is None else self.allowed + allowed

    def trajectory(self, reason: FinishReason, fallback: int) -> Trajectory:
        """``fallback``: the token of a conversation that failed before it had one."""
        if not self.tokens:
            self.give([fallback])
        given = [reward for reward in self.rewards if reward is not None]
        states = any(state is not None for state in self.states)
        return Trajectory(
            tokens=tuple(self.tokens),
            loss_mask=tuple(self.mask),
            logprobs=tuple(self.logprobs),
            weights_versions=tuple(self.versions),
            allowed_tokens=tuple(self.allowed) if self.allowed is not None and self.drawn else None,
            finish_reason=reason,
            turns=len(self.drawn),
            request_id=self.opening.request_id,
            group=self.opening.group,
            # Nobody knows whether an environment that was never asked gives rewards.
            rewards={"environment": float(sum(given))} if given or not self.answers else {},
            turn_rewards=tuple(float(reward or 0.0) for reward in self.rewards) if given else (),
            state_ids=tuple(-1 if state is None else state for state in self.states) if states else (),
            row=self.opening.row,
            messages=tuple(self.said),
            spans=self.spans,
        )


class Conversations:
    """A state machine: a row is drawn from, or its environment is thinking, or it has ended.

    A row whose environment thinks leaves the batch, and the others go on. Which of them comes back first changes no
    trajectory: a token depends on the seed and on how many the policy drew before in this conversation.
    """

    def __init__(
        self,
        sampler: Sampler,
        steps: Steps,
        template: TurnTemplate,
        limits: Limits,
        *,
        version: int = 0,
        together: int | None = None,
    ) -> None:
        """Nothing is drawn yet.

        Args:
            sampler: draws the policy's turns.
            steps: where environments are called.
            template: what stands between two turns.
            limits: where a conversation ends.
            version: of the weights that draw, of turns that do not say so themselves.
            together: conversations that are open at the same time; others wait. None: all.
        """
        self._sampler, self._steps, self._template = sampler, steps, template
        self._limits, self._version, self._together = limits, version, together
        self._waiting: deque[tuple[int, Opening, Talker]] = deque()
        self._open: dict[int, _Conversation] = {}
        self._ended: dict[int, Trajectory] = {}
        self._closing = 0
        self._failures: list[str] = []

    def run(self, openings: Sequence[tuple[Opening, Talker]]) -> list[Trajectory]:
        """Hold all conversations to their ends; one trajectory each, in order.

        Raises:
            ValueError: every conversation failed; the message has the first one's row and cause.
            UnusableTemplate: no conversation can go on with the tokenizer's chat template.
        """
        self._waiting.extend((key, *opening) for key, opening in enumerate(openings))
        self._begin()
        while self._open or self._closing:
            drawing = bool(self._sampler.running or self._sampler.waiting)
            answers = self._steps.finished(wait=not drawing)
            assert drawing or answers, "conversations are open, and nobody is about to speak"
            for finished in answers:
                self._answered(finished)
            if drawing:
                for turn in self._sampler.step():
                    self._drew(turn)
        if openings and len(self._failures) == len(openings):
            raise ValueError(f"the environment failed in all {len(openings)} conversations; {self._failures[0]}")
        return [self._ended[key] for key in range(len(openings))]

    def _begin(self) -> None:
        """Open conversations that wait, as many as there is room for."""
        while self._waiting and (self._together is None or len(self._open) + self._closing < self._together):
            key, opening, session = self._waiting.popleft()
            self._open[key] = _Conversation(opening, session)
            self._steps.start(key, lambda opening=opening, session=session: session.reset(opening.row))

    def _drew(self, turn: DrawnTurn) -> None:
        key: Any = turn.key
        talk = self._open[key]
        talk.take(turn, self._version)
        stopped = turn.reason == "stop"
        talk.ended = stopped and self._template.ends(turn.tokens[-1])
        text = self._template.text(turn.tokens[:-1] if talk.ended else turn.tokens)
        talk.drawn.append(len(talk.said))
        talk.said.append({"role": "assistant", "content": text})
        if stopped:
            messages = tuple(talk.said)
            self._steps.start(key, lambda: talk.session.step(messages))
        else:
            talk.rewards.append(None)
            self._end(key, "length")

    def _answered(self, finished: Finished) -> None:
        if finished.key not in self._open:
            self._closed(finished)
            return
        key: Any = finished.key
        talk = self._open[key]
        if finished.error is not None:
            talk.rewards += [None] * (len(talk.drawn) - len(talk.rewards))
            self._fail(key, finished.error)
            return
        step: Step = finished.value
        opening = not talk.drawn
        if not opening:
            talk.rewards.append(step.reward)
            talk.answers += 1
        answer: list[Message] = [dict(message) for message in step.messages]
        reason: FinishReason | None = None
        if not opening and (step.done or not answer):
            reason = "stop"
        elif len(talk.drawn) == self._limits.max_turns:
            reason = "turns"
        if reason is None:
            reason = self._go_on(key, talk, answer, step)
        talk.said += answer
        if reason is not None:
            self._end(key, reason)

    def _go_on(self, key: int, talk: _Conversation, answer: list[Message], step: Step) -> FinishReason | None:
        """Put the row into the batch, with the answer's tokens; or the reason why the conversation ends."""
        tools = talk.session.tools
        try:
            if talk.drawn:
                given = self._template.between(talk.said, talk.drawn, answer, tools, ended=talk.ended)
            else:
                given = self._template.opening(answer, tools)
        except UnusableTemplate:
            raise
        except ValueError as error:
            self._note(talk, error)
            return "error"
        room = self._limits.turn_tokens
        if self._limits.all_tokens is not None:
            room = min(room, self._limits.all_tokens - len(talk.tokens) - len(given))
        if room < 1 and talk.drawn:
            return "length"
        talk.give(given)
        if room < 1:
            return "length"
        talk.states.append(step.state_id)
        self._sampler.add(key, tuple(talk.tokens), seed=talk.opening.seed, drawn=sum(talk.mask), limit=room)
        return None

    def _fail(self, key: int, error: BaseException) -> None:
        self._note(self._open[key], error)
        self._end(key, "error")

    def _note(self, talk: _Conversation, error: BaseException) -> None:
        cause = f"{talk.opening.where}, turn {len(talk.drawn)}: {type(error).__name__}: {error}"
        self._failures.append(cause)
        logger.warning("a conversation ended by an error of its environment: %s", cause)

    def _end(self, key: int, reason: FinishReason) -> None:
        talk = self._open.pop(key)
        self._ended[key] = talk.trajectory(reason, self._template.end_token)
        if talk.session.closing is not None:
            self._closing += 1
            self._steps.start(("close", key), talk.session.closing)
        self._begin()

    def _closed(self, finished: Finished) -> None:
        self._closing -= 1
        if finished.error is not None:
            logger.warning("closing an environment failed: %s: %s", type(finished.error).__name__, finished.error)
        self._begin()
