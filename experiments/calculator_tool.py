"""A calculator as a tool: products that a small model cannot compute, and can ask for."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rl_bridge.data.trajectory import Message
from rl_bridge.environments.environment import Step
from rl_bridge.models.encoding import messages_of

CALL = re.compile(r"\[(\d{1,6})\*(\d{1,6})\]")
"""``[12*34]`` is a call of the tool; everything else is the answer, which ends the conversation."""


def product_row(a: int, b: int) -> dict[str, Any]:
    """A row whose answer is a product.

    >>> product_row(12, 34)
    {'prompt': '12*34?', 'answer': '408'}
    """
    return {"prompt": f"{a}*{b}?", "answer": str(a * b)}


def demonstration(a: int, b: int) -> dict[str, Any]:
    """How the tool is used, as a conversation to imitate.

    >>> [message["content"] for message in demonstration(12, 34)["messages"]]
    ['12*34?', '[12*34]', '=408;', '408']
    """
    said = [("user", f"{a}*{b}?"), ("assistant", f"[{a}*{b}]"), ("tool", f"={a * b};"), ("assistant", str(a * b))]
    return {"messages": [{"role": role, "content": content} for role, content in said]}


class Calculator:
    """Answers calls. The reward is 1 for the right answer; calls cost nothing."""

    connected = True

    def __init__(self) -> None:
        self._answer = ""

    def reset(self, row: Mapping[str, Any]) -> Sequence[Message]:
        """The row's ``prompt``; its ``answer`` is kept."""
        self._answer = str(row["answer"])
        return messages_of(row["prompt"])

    def step(self, messages: Sequence[Message]) -> Step:
        """The product that the policy asked for, or the reward of its answer."""
        said = messages[-1]["content"]
        if call := CALL.fullmatch(said):
            result = str(int(call[1]) * int(call[2])) if self.connected else "?"
            return Step(messages=[{"role": "tool", "content": f"={result};"}], reward=0.0)
        return Step(reward=float(said == self._answer), done=True)


class Disconnected(Calculator):
    """The same task with a tool that answers every call with a question mark."""

    connected = False
