"""The protocol of an environment, and what one step of it says."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rl_bridge.data.requests import Message


@dataclass(frozen=True, kw_only=True)
class Step:
    """What an environment says to a turn of the policy. Without ``messages`` the conversation ends."""

    messages: Sequence[Message] = ()
    """Follow the policy's turn; the policy then draws its next one."""
    reward: float | None = None
    """Of the turn. None: this environment gives none, and the reward function sees the whole conversation."""
    done: bool = False
    """End here. ``messages`` are then kept as text alone."""
    state_id: int | None = None
    """The state that the next turn begins in, for advantages among equal states (GiGPO); ids are ≥ 0."""


class Environment(Protocol):
    """One conversation's environment: it is made anew for every trajectory, in the rollout worker.

    Both methods may be ``async``. They run beside the sampler, each conversation's one after another. Two optional
    attributes: ``tools``, JSON schemas for the chat template, and ``close()``, called at the end.
    """

    def reset(self, row: Mapping[str, Any]) -> Sequence[Message] | Step | Awaitable[Sequence[Message] | Step]:
        """The first messages, for a row of the data; a ``Step`` of them says the first turn's state too."""
        ...

    def step(self, messages: Sequence[Message]) -> Step | Awaitable[Step]:
        """The whole conversation, the policy's turn last → what follows."""
        ...


EnvironmentFactory = Callable[[], Environment]
"""Picklable: it travels to the rollout workers."""
