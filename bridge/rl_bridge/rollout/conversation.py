"""One conversation between a policy and an environment: what was said, and what is known of each token."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rl_bridge.data.requests import Message, RequestId
from rl_bridge.data.spans import GIVEN, Span, spans_of_turn
from rl_bridge.data.trajectory import FinishReason, Trajectory
from rl_bridge.environments.base import Step
from rl_bridge.messages import given
from rl_bridge.models.turns import TurnTemplate, UnusableTemplate


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
            raise ValueError(
                "max_turns and turn_tokens must be ≥ 1 and all_tokens ≥ 2 or None, got "
                f"{given(self, 'max_turns', 'turn_tokens', 'all_tokens')}"
            )


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
class Conversation:
    """What was said so far, and what is known of each token."""

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
    failure: BaseException | None = None
    """Why it cannot go on."""

    def heard(self, step: Step, template: TurnTemplate, limits: Limits, tools: Sequence[Any]) -> FinishReason | int:
        """Take what the environment says; the tokens that the policy may draw now, or why the conversation ends.

        Raises:
            UnusableTemplate: no conversation can go on with the chat template.
        """
        opening = not self.drawn
        if not opening:
            self.rewards.append(step.reward)
            self.answers += 1
        answer: list[Message] = [dict(message) for message in step.messages]
        if not opening and (step.done or not answer):
            found: FinishReason | int = "stop"
        elif len(self.drawn) == limits.max_turns:
            found = "turns"
        else:
            found = self._go_on(answer, step, template, limits, tools)
        self.said += answer
        return found

    def spoke(self, turn: DrawnTurn, version: int, template: TurnTemplate) -> bool:
        """Take a turn of the policy; whether the environment is to answer."""
        self.take(turn, version)
        stopped = turn.reason == "stop"
        self.ended = stopped and template.ends(turn.tokens[-1])
        text = template.text(turn.tokens[:-1] if self.ended else turn.tokens)
        self.drawn.append(len(self.said))
        self.said.append({"role": "assistant", "content": text})
        if not stopped:
            self.rewards.append(None)
        return stopped

    def failed(self, error: BaseException) -> None:
        """The environment gave no answer to what was drawn since the last one."""
        self.failure = error
        self.unanswered()

    def unanswered(self) -> None:
        """Nobody answers what was drawn since the last answer."""
        self.rewards += [None] * (len(self.drawn) - len(self.rewards))

    def cause(self, error: BaseException) -> str:
        """An error of the environment, with the row and the turn."""
        return f"{self.opening.where}, turn {len(self.drawn)}: {type(error).__name__}: {error}"

    def _go_on(
        self, answer: list[Message], step: Step, template: TurnTemplate, limits: Limits, tools: Sequence[Any]
    ) -> FinishReason | int:
        try:
            if self.drawn:
                given = template.between(self.said, self.drawn, answer, tools, ended=self.ended)
            else:
                given = template.opening(answer, tools)
        except UnusableTemplate:
            raise
        except ValueError as error:
            self.failure = error
            return "error"
        room = limits.turn_tokens
        if limits.all_tokens is not None:
            room = min(room, limits.all_tokens - len(self.tokens) - len(given))
        if room < 1 and self.drawn:
            return "length"
        self.give(given)
        if room < 1:
            return "length"
        self.states.append(step.state_id)
        return room

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
