"""The requests to a server, and its replies, checked before they are believed."""

import json
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from rl_bridge.common.terminal import given
from rl_bridge.data.trajectory import SamplingParams
from rl_bridge.rollout.inside_vllm.held_weights import Held
from rl_bridge.rollout.vllm import weight_probe as probe


class MalformedReply(RuntimeError):
    """A reply that lacks what its server's published types promise, or whose parts do not fit together."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """The time that a server has to reply."""

    start_seconds: float = 600.0
    """Limit until the server replies for the first time; whoever supervises the server may be starting it."""
    request_seconds: float = 3600.0
    """Limit of one request, the time in the engine's queue included."""
    control_seconds: float = 600.0
    """Limit of a pause, a bucket of weights, and any other call that is no request for tokens."""

    def __post_init__(self) -> None:
        """Refuse limits that limit nothing."""
        names = ("start_seconds", "request_seconds", "control_seconds")
        if not all(getattr(self, name) > 0 for name in names):  # NaN is neither
            raise ValueError(f"seconds must be > 0, got {given(self, *names)}")


class Ask(NamedTuple):
    """One request for tokens. ``name`` is its id in the engine."""

    name: str
    tokens: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    drawn: int
    limit: int
    stop: frozenset[int]


class Completion(NamedTuple):
    """The tokens that a server drew for one request."""

    tokens: list[int]
    logprobs: list[float]
    """Under the distribution that the tokens were drawn from."""
    allowed: list[array] | None
    """Ids that the truncated sampler allowed for each token, rising; None where the server does not say."""
    versions: list[int] | None
    """Versions of the weights that drew each token; None where the server does not say."""
    reason: Literal["stop", "length", "abort"]


def field_of(reply: Any, name: str) -> Any:
    """A field that must be there.

    Raises:
        MalformedReply: naming the field, with the reply.
    """
    if not isinstance(reply, Mapping) or name not in reply:
        text = repr(reply)
        raise MalformedReply(f"a reply without {name!r}: {text[:300]}{'…' if len(text) > 300 else ''}")
    return reply[name]


def vocabulary_of(folder: Path) -> int:
    """Ids of the model in a folder; of a file that describes several models, of the one of text."""
    config = json.loads((folder / "config.json").read_text())
    return int(config.get("text_config", config)["vocab_size"])


class EngineServer(Protocol):
    """One server: requests for tokens, and the steps of an update, each of which is one command."""

    limits: probe.EngineLimits

    def draw(self, ask: Ask) -> Completion:
        """The completion of one request; ``ServerDied`` if the server dies first."""
        ...

    def abort(self, names: Collection[str]) -> None:
        """Let these requests reply with what they have, as ``abort``."""
        ...

    def pause(self, *, clear: bool) -> None:
        """Keep the running requests; ``clear``: without their keys and values, and without the prefix cache."""
        ...

    def is_paused(self) -> bool: ...
    def resume(self) -> None: ...
    def start(self) -> None: ...
    def update(self, folder: Path, names: Sequence[str]) -> None: ...
    def finish(self, version: str) -> None: ...

    def adopt(self, folder: Path) -> None:
        """Draw with the LoRA adapter in ``folder`` from now on, the running requests too."""
        ...

    def stamp(self, version: str) -> None:
        """Stamp completions of the weights that are there with this version."""
        ...

    def held(self, folder: Path, adapter: Path | None) -> Held:
        """A comparison of its workers' tensors with the weights, or the adapter, in a folder."""
        ...

    def version(self) -> str: ...
    def reset_prefix_cache(self) -> bool: ...

    def probe(self, prompt: Sequence[int], *, count: int, seed: int, temperature: float) -> probe.Drawn:
        """Exactly ``count`` tokens, end-of-sequence tokens included."""
        ...

    def dead(self) -> bool:
        """Whether there is nothing to ask any more."""
        ...

    def stop(self) -> None: ...
