"""What a rollout is asked: prompts with an id each, and how their completions are sampled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, NamedTuple

Message = Mapping[str, str]
Prompt = str | Sequence[Message] | Sequence[int]
"""Text, chat messages (``{"role": ..., "content": ...}``), or token ids that are used as they are."""
RequestId = tuple[int, ...]
"""Random numbers are made from it, so no two requests of a run share one."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How completions are sampled. ``temperature`` 0 is greedy; ``n`` completions a prompt.

    A token depends on the request's id, the sample's number and the position alone: not on how the rows were batched
    and not on the worker.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    """Texts that end a completion, besides the tokenizer's and the model's own stop tokens. All tokens that were drawn
    are kept, the one that completed the text included (``rl_bridge.rollout.stop_texts``)."""
    seed: int = 0
    """First number of the ids of requests that are made from bare prompts (``requests_of``)."""

    def __post_init__(self) -> None:
        """Refuse what cannot be sampled, naming the argument.

        Raises:
            TypeError: for what is no number of its kind; True and False are none.
            ValueError: for a number out of range.
        """
        for name in ("max_new_tokens", "n", "seed", "temperature", "top_k", "top_p", "min_p"):
            value, kind = getattr(self, name), Real if name in ("temperature", "top_p", "min_p") else Integral
            optional = name in ("top_k", "top_p", "min_p")
            if (isinstance(value, bool) or not isinstance(value, kind)) and not (optional and value is None):
                wanted = ("a number" if kind is Real else "an integer") + (" or None" if optional else "")
                raise TypeError(f"{name} must be {wanted}, got {value!r}")
        if self.max_new_tokens < 1 or self.n < 1:
            raise ValueError(f"max_new_tokens and n must be ≥ 1, got {self.max_new_tokens} and {self.n}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be ≥ 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be ≥ 1, got {self.top_k}")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {value}")
        if isinstance(self.stop, str) or not all(isinstance(text, str) for text in self.stop):
            raise TypeError(f"stop must be a sequence of texts, got {self.stop!r}")
        if not all(self.stop) or any("\N{REPLACEMENT CHARACTER}" in text for text in self.stop):
            raise ValueError(f"a stop text has characters, and no U+FFFD among them, got {self.stop!r}")

    def greedily(self) -> "SamplingParams":
        """The same with the most likely tokens.

        >>> SamplingParams(max_new_tokens=8, temperature=0.7, top_p=0.9).greedily()
        SamplingParams(max_new_tokens=8, temperature=0.0, top_k=None, top_p=None, min_p=None, n=1, stop=(), seed=0)
        """
        return replace(self, temperature=0.0, top_k=None, top_p=None, min_p=None)


class Request(NamedTuple):
    """A prompt; each of its ``SamplingParams.n`` trajectories bears ``group``, and the id with its number added."""

    prompt: Prompt
    id: RequestId
    group: int = 0


class RowRequest(NamedTuple):
    """A row that an environment begins a conversation with; ``id`` and ``group`` as a ``Request`` has them."""

    row: Mapping[str, Any]
    id: RequestId
    group: int = 0


def requests_of(prompts: Sequence[Prompt], seed: int) -> list[Request]:
    """One request a prompt: its id is (seed, place in the call), its group its place.

    >>> requests_of(["1+1=", "2+2="], seed=7)[1]
    Request(prompt='2+2=', id=(7, 1), group=1)
    """
    return [Request(prompt, (seed, place), place) for place, prompt in enumerate(prompts)]
