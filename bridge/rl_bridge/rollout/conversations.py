"""Many conversations between a policy and its environments at once, none of which waits for another."""

import logging
from collections import deque
from collections.abc import Collection, Hashable, Sequence
from typing import Any, Protocol

from rl_bridge.data.budget import Budget, Spending
from rl_bridge.data.trajectory import FinishReason, Trajectory
from rl_bridge.environments.session import Talker
from rl_bridge.environments.steps import Finished, Steps
from rl_bridge.models.turns import TurnTemplate
from rl_bridge.rollout.conversation import Conversation, DrawnTurn, Limits, Opening

logger = logging.getLogger(__name__)
MOMENT = {"seconds": 0.05}
"""How long an answer is waited for until limits are looked at again."""


class Sampler(Protocol):
    """Rows that join and leave between two tokens (``rl_bridge.rollout.decoder``)."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    def add(self, key: Hashable, tokens: Sequence[int], *, seed: int, drawn: int = 0, limit: int) -> None: ...
    def step(self) -> Sequence[DrawnTurn]: ...
    def withdraw(self, keys: Collection[Hashable] | None = None) -> Sequence[DrawnTurn]: ...
    def count_tokens(self) -> None: ...
    @property
    def unfinished_tokens(self) -> int: ...


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
        spending: Spending | None = None,
    ) -> None:
        """Nothing is drawn yet.

        Args:
            sampler: draws the policy's turns.
            steps: where environments are called.
            template: what stands between two turns.
            limits: where a conversation ends.
            version: of the weights that draw, of turns that do not say so themselves.
            together: conversations that are open at the same time; others wait. None: all.
            spending: at whose limits conversations are given up.
        """
        self._spending = Spending(Budget()) if spending is None else spending
        self._tokens = 0
        if self._spending.budget.tokens is not None:
            sampler.count_tokens()
        self._sampler, self._steps, self._template = sampler, steps, template
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
            ValueError: every conversation failed; the message has the first one's row and cause.
            UnusableTemplate: no conversation can go on with the tokenizer's chat template.
        """
        self._waiting.extend((key, *opening) for key, opening in enumerate(openings))
        self._begin()
        while self._open or self._closing:
            if self._spending.budget:
                self._keep_limits()
            drawing = bool(self._sampler.running or self._sampler.waiting)
            answers = self._steps.finished(wait=not drawing, **MOMENT if self._spending.budget else {})
            assert drawing or answers or self._spending.budget, "conversations are open, and nobody is about to speak"
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
            self._open[key], self._began[key] = (Conversation(opening), session), self._spending.clock()
            self._thinking.add(key)
            self._steps.start(key, lambda opening=opening, session=session: session.reset(opening.row))

    def _drew(self, turn: DrawnTurn) -> None:
        key: Any = turn.key
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
        if finished.error is not None:
            talk.failed(finished.error)
        else:
            room = talk.heard(finished.value, self._template, self._limits, session.tools)
        if talk.failure is not None:
            self._note(talk, talk.failure)
        if isinstance(room, int):
            tokens, seed = tuple(talk.tokens), talk.opening.seed
            self._sampler.add(key, tokens, seed=seed, drawn=sum(talk.mask), limit=room)
        else:
            self._end(key, room)

    def _keep_limits(self) -> None:
        """Give up what has had its time, or everything."""
        counted = self._spending.budget.tokens is not None
        over = self._spending.over(self._tokens + (self._sampler.unfinished_tokens if counted else 0))
        if over:
            for key, opening, _ in self._waiting:
                self._ended[key] = Conversation(opening).trajectory("abort", self._template.end_token)
            self._waiting.clear()
        late = [key for key in self._open if over or self._spending.late(self._began[key])]
        drawn: dict[Any, DrawnTurn] = {}
        if drawing := [key for key in late if key not in self._thinking]:
            drawn = {turn.key: turn for turn in self._sampler.withdraw(drawing)}
        for key in late:
            talk, session = self._open[key]
            if key in self._thinking:
                session.give_up()
                talk.unanswered()
            elif drawn[key].tokens:
                talk.spoke(drawn[key], self._version, self._template)
            else:
                talk.states.pop()  # that of a turn in which nothing was drawn
            self._end(key, "abort")

    def _note(self, talk: Conversation, error: BaseException) -> None:
        self._failures.append(talk.cause(error))
        logger.warning("a conversation ended by an error of its environment: %s", self._failures[-1])

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
