"""Conversations of a policy with its environments, many at once: their messages, and the facts of each token."""

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_bridge.common.terminal import given
from rl_bridge.data.messages import Chat, arguments_of
from rl_bridge.data.trajectory import (
    GIVEN,
    Budget,
    FinishReason,
    Message,
    RequestId,
    Span,
    Spending,
    Trajectory,
    spans_of_turn,
)
from rl_bridge.environments.environment import NeedsOwnProcess, Step, Talker
from rl_bridge.environments.environment_calls import Finished, Steps
from rl_bridge.models.turn_template import TurnTemplate, UnusableTemplate
from rl_bridge.rollout.decoder import Decoder, Drawn


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Where a conversation ends if the environment does not end it."""

    max_turns: int
    turn_tokens: int
    """Tokens that the policy draws in one turn."""
    all_tokens: int | None = None
    """Tokens of the whole trajectory, opening and environment included."""
    longest: int | None = None
    """Tokens of the longest sequence that the engine holds, or that the model has positions for."""

    def __post_init__(self) -> None:
        """Refuse limits that leave no turn."""
        if self.max_turns < 1 or self.turn_tokens < 1:
            raise ValueError(
                f"a conversation has a turn, and a turn a token: got {given(self, 'max_turns', 'turn_tokens')}"
            )
        if self.all_tokens is not None and self.all_tokens < 2:
            raise ValueError(
                "a whole conversation has two tokens or more (max_tokens, --max-trajectory-tokens), got "
                f"{self.all_tokens}"
            )
        if self.all_tokens is not None and self.longest is not None and self.all_tokens > self.longest:
            raise ValueError(
                f"conversations of {self.all_tokens} tokens (max_tokens, --max-trajectory-tokens) are longer than the "
                f"engine holds, {self.longest} (max_model_len, or the model's positions): give that, or leave it out"
            )

    def room(self, tokens: int) -> int:
        """Tokens that the policy may draw behind so many; below 1: none."""
        most = [limit - tokens for limit in (self.all_tokens, self.longest) if limit is not None]
        return min([self.turn_tokens, *most])


@dataclass(frozen=True, kw_only=True)
class Opening:
    """The beginning of one conversation, whose tokens depend on this and the environment's words alone."""

    request_id: RequestId
    seed: int
    row: Mapping[str, Any]
    group: int = 0

    @property
    def where(self) -> str:
        """The row, for messages."""
        return str(self.row.get("_where", f"request {self.request_id}"))


@dataclass
class Conversation:
    """The messages of one conversation so far, and the facts of each token."""

    opening: Opening
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
    tools: tuple[Any, ...] = ()
    """JSON schemas that the chat template was given last."""
    failure: BaseException | None = None
    """Why it cannot go on."""

    def heard(self, step: Step, template: TurnTemplate, limits: Limits, tools: Sequence[Any]) -> FinishReason | int:
        """Take the environment's messages; returns the tokens that the policy may draw now, or the reason of an end.

        Raises:
            UnusableTemplate: no conversation can go on with the chat template.
        """
        opening = not self.drawn
        if not opening:
            self.rewards.append(step.reward)
            self.answers += 1
        answer: list[Message] = [dict(message) for message in step.messages]
        if not opening and (step.done or not answer):
            outcome: FinishReason | int = "stop"
        elif len(self.drawn) == limits.max_turns:
            outcome = "turns"
        else:
            outcome = self._go_on(answer, step, template, limits, tools)
        self.said += answer
        return outcome

    def spoke(self, turn: Drawn, version: int, template: TurnTemplate) -> bool:
        """Take a turn of the policy; whether the environment is to answer."""
        self.take(turn, version)
        stopped = turn.reason == "stop"
        self.ended = stopped and template.ends(turn.tokens[-1])
        text = template.text(turn.tokens[:-1] if self.ended else turn.tokens)
        self.drawn.append(len(self.said))
        self.said.append({"role": "assistant", "content": text})
        return stopped

    def cause(self, error: BaseException) -> str:
        """An error of the environment, with the row and the turn."""
        kind = "" if isinstance(error, NeedsOwnProcess) else f"{type(error).__name__}: "
        return f"{self.opening.where}, turn {len(self.drawn)}: {kind}{error}"

    def _go_on(
        self, answer: list[Message], step: Step, template: TurnTemplate, limits: Limits, tools: Sequence[Any]
    ) -> FinishReason | int:
        self.tools = tuple(tools)
        try:
            arguments = arguments_of(self.opening.row)
            if self.drawn:
                chat = Chat(self.said, self.tools, arguments)
                new_tokens = template.between(chat, self.drawn, answer, ended=self.ended)
            else:
                new_tokens = template.opening(Chat(answer, self.tools, arguments))
        except UnusableTemplate:
            raise
        except ValueError as error:
            self.failure = error
            return "error"
        room = limits.room(len(self.tokens) + len(new_tokens))
        if room < 1 and self.drawn:
            return "length"
        if limits.longest is not None and len(new_tokens) >= limits.longest:
            self.failure = ValueError(
                f"the environment opens with {len(new_tokens)} tokens, and the engine holds {limits.longest} "
                "(max_model_len, or the model's positions): no turn has room"
            )
            return "error"
        self.give(new_tokens)
        if room < 1:
            return "length"
        self.states.append(step.state_id)
        return room

    def give(self, tokens: Iterable[int]) -> None:
        """Add tokens that the policy did not draw."""
        tokens = list(tokens)
        self.versions += [GIVEN] * len(tokens)
        self._append(tokens, False, [0.0] * len(tokens), [() for _ in tokens])

    def take(self, turn: Drawn, version: int) -> None:
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
        rewards = [reward for reward in self.rewards if reward is not None]
        # Nobody answered the turns since the last answer, and a turn in which nothing was drawn is none.
        of_turns = self.rewards + [None] * (len(self.drawn) - len(self.rewards))
        states = self.states[: len(self.drawn)]
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
            rewards={"environment": float(sum(rewards))} if rewards or not self.answers else {},
            turn_rewards=tuple(float(reward or 0.0) for reward in of_turns) if rewards else (),
            state_ids=(
                tuple(-1 if state is None else state for state in states)
                if any(state is not None for state in states)
                else ()
            ),
            row=self.opening.row,
            messages=tuple(self.said),
            turn_messages=tuple(self.drawn),
            tools=self.tools,
            spans=self.spans,
        )


logger = logging.getLogger(__name__)
MOMENT = {"seconds": 0.05}
"""The wait for an answer until limits are looked at again."""


class Conversations:
    """Many conversations at once, none of which waits for another.

    A row is drawn from, or its environment is thinking, or the row has ended. A row whose environment thinks leaves the
    batch, and the others go on. The order in which rows come back changes no trajectory: a token depends on the
    seed and on the number of tokens that the policy drew before in this conversation.
    """

    def __init__(
        self,
        decoder: Decoder,
        steps: Steps,
        template: TurnTemplate,
        limits: Limits,
        *,
        version: int = 0,
        together: int | None = None,
        spending: Spending | None = None,
    ) -> None:
        """Nothing is drawn yet.

        Args:
            decoder: draws the policy's turns.
            steps: where environments are called.
            template: the text between two turns.
            limits: where a conversation ends.
            version: of the weights that draw, of turns that do not say so themselves.
            together: conversations that are open at the same time; others wait. None: all.
            spending: conversations are given up at its limits.
        """
        self._spending = Spending(Budget()) if spending is None else spending
        self._tokens = 0
        if self._spending.budget.tokens is not None:
            decoder.count_tokens()
        self._decoder, self._steps, self._template = decoder, steps, template
        self._limits, self._version, self._together = limits, version, together
        self._waiting: deque[tuple[int, Opening, Talker]] = deque()
        self._open: dict[int, tuple[Conversation, Talker]] = {}
        self._ended: dict[int, Trajectory] = {}
        self._began: dict[int, float] = {}
        self._thinking: set[int] = set()
        """Conversations whose environment is called."""
        self._closing = 0
        self._failures: list[str] = []

    def run(self, openings: Sequence[tuple[Opening, Talker]]) -> list[Trajectory]:
        """Hold all conversations to their ends; one trajectory each, in order.

        Raises:
            ValueError: every conversation failed, or an environment cannot be called from a thread; the message has
                the row and the cause.
            UnusableTemplate: no conversation can go on with the tokenizer's chat template.
        """
        self._waiting.extend((key, *opening) for key, opening in enumerate(openings))
        self._begin()
        while self._open or self._closing:
            if self._spending.budget:
                self._keep_limits()
            drawing = bool(self._decoder.running or self._decoder.waiting)
            answers = self._steps.finished(wait=not drawing, **MOMENT if self._spending.budget else {})
            assert drawing or answers or self._spending.budget, "conversations are open, and nobody is about to speak"
            for finished in answers:
                self._answered(finished)
            if drawing:
                for turn in self._decoder.step():
                    self._drew(turn)
        if openings and len(self._failures) == len(openings):
            raise ValueError(f"the environment failed in all {len(openings)} conversations; {self._failures[0]}")
        return [self._ended[key] for key in range(len(openings))]

    def _begin(self) -> None:
        """Open conversations that wait, as many as there is room for."""
        while self._waiting and (self._together is None or len(self._open) + self._closing < self._together):
            key, opening, session = self._waiting.popleft()
            self._open[key], self._began[key] = (Conversation(opening), session), self._spending.clock()
            self._thinking.add(key)
            self._steps.start(key, lambda opening=opening, session=session: session.reset(opening.row))

    def _drew(self, turn: Drawn) -> None:
        key = turn.key
        talk, session = self._open[key]
        self._tokens += len(turn.tokens)
        if talk.spoke(turn, self._version, self._template):
            messages = tuple(talk.said)
            self._thinking.add(key)
            self._steps.start(key, lambda: session.step(messages))
        else:
            self._end(key, "length")

    def _answered(self, finished: Finished) -> None:
        key: Any = finished.key
        self._thinking.discard(key)
        if key in self._ended:
            return  # it was given up while its environment was thinking
        if key not in self._open:
            self._closed(finished)
            return
        talk, session = self._open[key]
        room: FinishReason | int = "error"
        if isinstance(finished.error, NeedsOwnProcess):
            raise ValueError(talk.cause(finished.error)) from finished.error
        if finished.error is not None:
            talk.failure = finished.error
        else:
            room = talk.heard(finished.value, self._template, self._limits, session.tools)
        if talk.failure is not None:
            self._failures.append(talk.cause(talk.failure))
            logger.warning("a conversation ended by an error of its environment: %s", self._failures[-1])
        if isinstance(room, int):
            tokens, seed = tuple(talk.tokens), talk.opening.seed
            self._decoder.add(key, tokens, seed=seed, drawn=sum(talk.mask), limit=room)
        else:
            self._end(key, room)

    def _keep_limits(self) -> None:
        """Give up the conversations that have had their time, or all."""
        counted = self._spending.budget.tokens is not None
        over = self._spending.over(self._tokens + (self._decoder.unfinished_tokens if counted else 0))
        if over:
            for key, opening, _ in self._waiting:
                self._ended[key] = Conversation(opening).trajectory("abort", self._template.end_token)
            self._waiting.clear()
        late = [key for key in self._open if over or self._spending.late(self._began[key])]
        drawn: dict[Any, Drawn] = {}
        if drawing := [key for key in late if key not in self._thinking]:
            drawn = {turn.key: turn for turn in self._decoder.withdraw(drawing)}
        for key in late:
            talk, session = self._open[key]
            if key in self._thinking:
                session.give_up()
            elif drawn[key].tokens:
                talk.spoke(drawn[key], self._version, self._template)
            self._end(key, "abort")

    def _end(self, key: int, reason: FinishReason) -> None:
        talk, session = self._open.pop(key)
        self._ended[key] = talk.trajectory(reason, self._template.end_token)
        if session.closing is not None:
            self._closing += 1
            self._steps.start(("close", key), session.closing)
        self._begin()

    def _closed(self, finished: Finished) -> None:
        self._closing -= 1
        if finished.error is not None:
            logger.warning("closing an environment failed: %s: %s", type(finished.error).__name__, finished.error)
        self._begin()
