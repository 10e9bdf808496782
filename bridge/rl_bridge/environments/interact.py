"""RL2's environments: a function ``interact(messages) -> list of messages``, empty at the end."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any

from rl_bridge.data.requests import Message
from rl_bridge.environments.base import Step
from rl_bridge.models.encoding import messages_of

Function = Callable[[list[Message]], Sequence[Message] | Awaitable[Sequence[Message]]]


@dataclass(frozen=True)
class Interact:
    """An environment of a function without state or reward. The row's ``prompt`` opens the conversation.

    >>> environment = Interact(lambda messages: [{"role": "tool", "content": "4"}] if len(messages) < 3 else [])
    >>> environment.reset({"prompt": "2+2"})
    ({'role': 'user', 'content': '2+2'},)
    """

    interact: Function

    def reset(self, row: Mapping[str, Any]) -> Sequence[Message]:
        """The prompt of the row."""
        return messages_of(row["prompt"])

    def step(self, messages: Sequence[Message]) -> Step | Awaitable[Step]:
        """What the function answers."""
        answer = self.interact(list(messages))
        return _awaited(answer) if isawaitable(answer) else Step(messages=answer)


async def _awaited(answer: Awaitable[Sequence[Message]]) -> Step:
    return Step(messages=await answer)
