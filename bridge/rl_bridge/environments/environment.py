"""The protocol of an environment, and one conversation's environment with every return value checked."""

import copy
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import isawaitable
from typing import Any, Protocol

from rl_bridge.common.scalars import FLOAT32, plain_scalar
from rl_bridge.common.user_files import belongs_to_a_thread, the_users_code
from rl_bridge.data.messages import require_characters, tools_of
from rl_bridge.data.trajectory import Message


@dataclass(frozen=True, kw_only=True)
class Step:
    """An environment's answer to a turn of the policy. Without ``messages`` the conversation ends."""

    messages: Sequence[Message] = ()
    """Follow the policy's turn; the policy then draws its next one."""
    reward: float | None = None
    """Reward of the turn. None: this environment gives none, and the reward function sees the whole conversation."""
    done: bool = False
    """End here. ``messages`` are then kept as text alone."""
    state_id: int | None = None
    """The state that the next turn begins in, for advantages among equal states (GiGPO); ids are ≥ 0."""


class Environment(Protocol):
    """One conversation's environment: it is made anew for every trajectory, in the rollout worker.

    Both methods may be ``async``. They run beside the sampler, each conversation's one after another. Two optional
    attributes: ``tools``, JSON schemas for the chat template in place of the row's, and ``close()``, called at the end.
    """

    def reset(self, row: Mapping[str, Any]) -> Sequence[Message] | Step | Awaitable[Sequence[Message] | Step]:
        """The first messages, for a row of the data; a ``Step`` of them says the first turn's state too."""
        ...

    def step(self, messages: Sequence[Message]) -> Step | Awaitable[Step]:
        """The whole conversation, the policy's turn last → what follows."""
        ...


EnvironmentFactory = Callable[[], Environment]
"""Makes an environment. Picklable, as the rollout workers get it."""


class NeedsOwnProcess(RuntimeError):
    """An environment or a tool that cannot be called from the threads of a rollout: no conversation can go on."""


class Talker(Protocol):
    """One conversation's environment as the sampler uses it, in this process or another."""

    tools: tuple[Any, ...]

    def reset(self, row: Mapping[str, Any]) -> Step | Awaitable[Step]: ...
    def step(self, messages: Sequence[Message]) -> Step | Awaitable[Step]: ...
    @property
    def closing(self) -> Callable[[], Any] | None: ...
    def give_up(self) -> None: ...


class Session:
    """A ``Talker`` that checks every return value of the user's class.

    The environment is made in ``reset``, so that a constructor that fails is this conversation's failure.
    """

    def __init__(self, factory: EnvironmentFactory) -> None:
        self._factory = factory
        self._environment: Any = None
        self.tools: tuple[Any, ...] = ()

    def reset(self, row: Mapping[str, Any]) -> Step | Awaitable[Step]:
        """The opening messages. The environment gets a copy of the row."""
        with the_users_code(), not_of_a_thread():
            self._environment = self._factory()
            tools = getattr(self._environment, "tools", None)
            if not isinstance(tools, list | tuple | None):
                raise TypeError(f"the environment has the tools {tools!r}, expected a list of JSON schemas or None")
            self.tools = tools_of(row) if tools is None else tuple(tools)
            return _then_checked(self._environment.reset(copy.deepcopy(dict(row))), "reset")

    def step(self, messages: Sequence[Message]) -> Step | Awaitable[Step]:
        """The environment's answer to the conversation, of which it gets a copy."""
        with the_users_code(), not_of_a_thread():
            return _then_checked(self._environment.step([dict(message) for message in messages]), "step")

    def give_up(self) -> None:
        """Called while nobody waits any more for the environment's answer. Does nothing: a thread cannot be ended."""

    @property
    def closing(self) -> Callable[[], Any] | None:
        """The environment's own ``close``, if it has one."""
        close = getattr(self._environment, "close", None)
        return close if callable(close) else None


def _then_checked(answer: Any, method: str) -> Step | Awaitable[Step]:
    if not isawaitable(answer):
        return _checked(answer, method)

    async def checked() -> Step:
        with not_of_a_thread():
            return _checked(await answer, method)

    return checked()


@contextmanager
def not_of_a_thread() -> Iterator[None]:
    """SIGALRM, among others, is for a main thread: every conversation would fail, or the policy read the error."""
    try:
        yield
    except Exception as error:
        if threading.current_thread() is threading.main_thread() or not belongs_to_a_thread(error):
            raise
        raise NeedsOwnProcess(
            f"{type(error).__name__}: {error}; with --environment-processes N (processes of converse) each environment "
            "is called in the main thread of a process of its own"
        ) from error


def _checked(answer: Any, method: str) -> Step:
    """The answer as a ``Step``.

    Raises:
        TypeError: another type than the protocol's.
        ValueError: a reward that is not finite, a state id below 0, a text with half of a character, or a reset that
            ends.
    """
    step = Step(messages=answer) if method == "reset" and isinstance(answer, list | tuple) else answer
    if not isinstance(step, Step):
        expected = "messages or a Step" if method == "reset" else "a Step"
        raise TypeError(f"{method}() returned {answer!r}, expected {expected}")
    if not isinstance(step.messages, list | tuple) or not all(_is_message(message) for message in step.messages):
        raise TypeError(f"{method}() gave messages {step.messages!r}, expected a list of role and content, both text")
    require_characters(list(step.messages), f"{method}().messages")
    reward, state = plain_scalar(step.reward), plain_scalar(step.state_id)
    if reward is not None and not (isinstance(reward, bool | int | float) and abs(reward) <= FLOAT32):
        raise ValueError(
            f"{method}() gave the reward {step.reward!r}, expected a finite number or None, up to {FLOAT32:.4g}"
        )
    if state is not None and not (isinstance(state, int) and state >= 0):
        raise ValueError(f"{method}() gave the state {step.state_id!r}, expected an integer ≥ 0 or None")
    if not isinstance(done := plain_scalar(step.done), bool | int | None):
        raise TypeError(f"{method}() gave done={step.done!r}, expected True or False")
    if method == "reset" and (done or not step.messages):
        raise ValueError(f"reset() gave {step}: there is nothing to begin a conversation with")
    reward, state = None if reward is None else float(reward), None if state is None else int(state)
    return replace(step, reward=reward, state_id=state, done=bool(done))


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))
