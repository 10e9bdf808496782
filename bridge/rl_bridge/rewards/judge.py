"""Models that score over HTTP: a judge that writes its score (OpenAI's chat completions), and a reward model."""

import dataclasses
import math
import os
import re
import threading
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rl_bridge.data.trajectory import Trajectory
from rl_bridge.messages import given
from rl_bridge.rewards.asking import short
from rl_bridge.rewards.errors import RowFailed
from rl_bridge.rewards.http import NoReply, Server
from rl_bridge.tracking.scrubbing import scrubbed_text

_FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")


@dataclass(frozen=True, kw_only=True)
class Judge:
    """A reward of a whole batch: one chat completion a trajectory, whose text holds the score.

    ``template`` is what the judge reads: ``{prompt}``, ``{completion}`` and the row's columns, as ``{answer}``, are
    filled in; other braces stay. ``score`` is a regular expression with one group, the number; the last match counts.
    """

    url: str
    """Of the server, as http://localhost:8000/v1; /chat/completions follows."""
    model: str
    template: str
    score: str = r"\[\[(-?\d+(?:\.\d+)?)\]\]"
    maximum: float = 1.0
    """The judge's number is divided by it; a number below 0 or above it is no score."""
    system: str = ""
    temperature: float = 0.0
    max_tokens: int | None = None
    missing: float | None = None
    """The score of a reply without one. None stops the run, with the reply."""
    api_key_variable: str = "OPENAI_API_KEY"
    """The environment variable that holds the key; none is sent if it is not set."""
    timeout: float = 60.0
    retries: int = 5
    wait: float = 0.5
    concurrency: int = 16

    def __post_init__(self) -> None:
        """Refuse a pattern without just one group, and limits that limit nothing."""
        try:
            groups = re.compile(self.score).groups
        except re.error as error:
            raise ValueError(f"score is not a regular expression: {self.score!r}: {error}") from error
        if groups != 1:
            raise ValueError(f"score must have one group, the number, got {self.score!r} with {groups}")
        texts = ("url", "model", "template", "system", "api_key_variable")
        for name in (name for name in texts if not isinstance(getattr(self, name), str)):
            raise ValueError(f"{name} must be text, got {getattr(self, name)!r}")
        for name in ("maximum", "temperature", "max_tokens", "missing"):
            value, kind = getattr(self, name), int if name == "max_tokens" else int | float
            if value is None and name in ("max_tokens", "missing"):
                continue
            if isinstance(value, bool) or not isinstance(value, kind):
                raise ValueError(f"{name} must be a {'whole ' if kind is int else ''}number, got {value!r}")
            if not math.isfinite(value):
                raise ValueError(f"{name} must be finite, got {value}")
        if self.maximum <= 0 or self.temperature < 0 or (self.max_tokens is not None and self.max_tokens < 1):
            numbers = given(self, "maximum", "temperature", "max_tokens")
            raise ValueError(f"maximum must be > 0, temperature ≥ 0 and max_tokens ≥ 1, got {numbers}")
        self._server()

    @classmethod
    def of_file(cls, path: Path) -> Self:
        """From a TOML file with these fields.

        Raises:
            FileNotFoundError: no such file.
            ValueError: it is not TOML, or has unknown, missing or unusable fields.
        """
        if not path.is_file():
            raise FileNotFoundError(f"no such judge file: {path}")
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not TOML: {error}") from error
        fields = dataclasses.fields(cls)
        unknown = sorted(values.keys() - {field.name for field in fields})
        missing = [f.name for f in fields if f.default is dataclasses.MISSING and f.name not in values]
        if unknown or missing:
            raise ValueError(f"{path}: unknown fields {unknown}, missing fields {missing}")
        try:
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """The judge's scores.

        Raises:
            RowFailed: the trajectory that got none.
        """
        server = self._server()
        prompts = [self._filled(trajectory, place) for place, trajectory in enumerate(trajectories)]
        return server.each(lambda prompt, stop: self._ask(server, prompt, stop), prompts)

    def _server(self) -> Server:
        key = os.environ.get(self.api_key_variable)
        return Server(
            url=self.url.rstrip("/") + "/chat/completions",
            headers=(("Authorization", f"Bearer {key}"),) if key else (),
            timeout=self.timeout,
            retries=self.retries,
            wait=self.wait,
            concurrency=self.concurrency,
        )

    def _filled(self, trajectory: Trajectory, place: int) -> str:
        values = {**trajectory.row, "prompt": prompt_text(trajectory), "completion": trajectory.completion}
        if unknown := [name for name in _FIELD.findall(self.template) if name not in values]:
            raise RowFailed(
                place, f"the judge's template reads {{{unknown[0]}}}, and the row has {sorted(map(str, values))}"
            )
        return _FIELD.sub(lambda match: str(values[match[1]]), self.template)

    def _ask(self, server: Server, prompt: str, stop: threading.Event) -> float:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        payload = {"model": self.model, "temperature": self.temperature}
        payload |= {"messages": [*messages, {"role": "user", "content": prompt}]}
        if self.max_tokens is not None:
            payload["max_tokens"] = self.max_tokens
        reply = server.post(payload, stop)
        try:
            text = reply["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            raise NoReply(f"{scrubbed_text(server.url)} replied with no chat completion: {short(reply)}") from None
        found = re.findall(self.score, text or "")
        reason = f"has no score {self.score!r}"
        try:
            # A completion that talks a judge into a larger number gains nothing by it.
            if 0 <= float(found[-1]) <= self.maximum:
                return float(found[-1]) / self.maximum
            reason = f"has the score {found[-1]}, which is not from 0 to maximum = {self.maximum:g}"
        except (IndexError, ValueError):
            pass
        if self.missing is None:
            raise NoReply(f"the judge's reply {reason}: {short(text)}")
        return self.missing


@dataclass(frozen=True, kw_only=True)
class RemoteRewardModel:
    """A reward of a whole batch: a server that scores several conversations at once.

    It is sent ``{"messages": [[…]], "query": […], "prompts": […], "labels": […]}``, as OpenRLHF's servers are, and
    replies ``{"rewards": […]}``, one number each.
    """

    server: Server
    batch: int = 64
    """Conversations of one request."""

    def __post_init__(self) -> None:
        """Refuse requests without a conversation."""
        if self.batch < 1:
            raise ValueError(f"batch must be at least 1, got {self.batch}")

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """The server's scores.

        Raises:
            RowFailed: the first trajectory of a request that got none.
        """
        found: list[float] = []
        url = scrubbed_text(self.server.url)
        for start in range(0, len(trajectories), self.batch):
            part = trajectories[start : start + self.batch]
            prompts = [prompt_text(trajectory) for trajectory in part]
            texts = [prompt + t.completion for prompt, t in zip(prompts, part, strict=True)]
            payload = {"query": texts, "prompts": prompts, "labels": [t.row.get("answer") for t in part]}
            payload["messages"] = [[dict(message) for message in t.messages] for t in part]
            try:
                rewards = _list_of(self.server.post(payload), url)
            except NoReply as error:
                raise RowFailed(start, str(error)) from error
            if len(rewards) != len(part):
                raise RowFailed(start, f"{url} replied {len(rewards)} rewards for {len(part)} completions")
            found += rewards
        return found


def prompt_text(trajectory: Trajectory) -> str:
    """What stands before the completion, as text: a single message without its role."""
    before = trajectory.messages[:-1]
    if len(before) == 1:
        return str(before[0]["content"])
    return "".join(f"{message['role']}: {message['content']}\n" for message in before)


def _list_of(reply: Any, url: str) -> list[Any]:
    rewards = reply.get("rewards") if isinstance(reply, Mapping) else None
    if not isinstance(rewards, list):
        raise NoReply(f"{url} replied with no list of rewards: {short(reply)}")
    return rewards
