"""Models that score: a judge or a reward model over HTTP, and a reward model in this process."""

import dataclasses
import json
import math
import os
import re
import threading
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from rl_bridge.common import http
from rl_bridge.common.http import Askers, NoReply
from rl_bridge.common.scrubbing import scrubbed_text
from rl_bridge.common.terminal import given
from rl_bridge.data.messages import ARGUMENTS, arguments_of
from rl_bridge.data.trajectory import Trajectory
from rl_bridge.data.unread_keys import WORD_KEYS, KeyMemory, remark_on_keys, says_something
from rl_bridge.rewards.function import RowFailed, short

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Server(http.Server):
    """A server that scores items."""

    largest: int | None = 1 << 26

    def each(self, ask: Callable[[Item, threading.Event], float], items: Sequence[Item]) -> list[float]:
        """The results of ``ask`` for every item, in order, several items at a time.

        ``ask`` also gets an event, which is set when nobody waits for its result.

        Raises:
            RowFailed: the first item, in their order, that got no reply. Items that wait are not asked about any more.
                Neither this error nor an interrupt waits for a request that is under way.
        """
        stop = threading.Event()
        with Askers(self.concurrency, "reward request") as askers:
            futures = [askers.submit(partial(ask, item, stop)) for item in items]
            results = []
            try:
                for place, future in enumerate(futures):
                    try:
                        results.append(future.result())
                    except NoReply as error:
                        raise RowFailed(place, str(error)) from error
            finally:
                stop.set()
        return results


_FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")


@dataclass(frozen=True, kw_only=True)
class Judge:
    """A reward of a whole batch: one chat completion (OpenAI's protocol) a trajectory, whose text holds the score.

    The judge reads ``template`` with ``{prompt}``, ``{completion}`` and the row's columns, as ``{answer}``, filled in;
    other braces stay. ``score`` is a regular expression with one group, the number; the last match counts.
    """

    url: str
    """Address of the server, as http://localhost:8000/v1; /chat/completions follows."""
    model: str
    template: str
    score: str = r"\[\[(-?\d+(?:\.\d+)?)\]\]"
    maximum: float = 1.0
    """Divisor of the judge's number. A number below 0 or above ``maximum`` is no score."""
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
        """Refuse a pattern without just one group, a template without the completion, and limits that limit nothing."""
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
        if "completion" not in _FIELD.findall(self.template):
            raise ValueError(
                "template must have the text that is judged, {completion} in single braces, beside {prompt} and the "
                f"columns of the row: got {self.template[:200]!r}"
            )

    @classmethod
    def of_file(cls, path: Path) -> Self:
        """The judge of a TOML file with these fields.

        Raises:
            FileNotFoundError: no such file.
            ValueError: it is not TOML, or has unknown, missing or unusable fields.
        """
        if not path.is_file():
            raise FileNotFoundError(f"no such judge file: {path}")
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
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
        scores = re.findall(self.score, text or "")
        reason = f"has no score {self.score!r}"
        try:
            # A completion that talks a judge into a larger number gains nothing.
            if 0 <= float(scores[-1]) <= self.maximum:
                return float(scores[-1]) / self.maximum
            reason = f"has the score {scores[-1]}, which is not from 0 to maximum = {self.maximum:g}"
        except (IndexError, ValueError):
            pass
        if self.missing is None:
            raise NoReply(f"the judge's reply {reason}: {short(text)}")
        return self.missing


@dataclass(frozen=True, kw_only=True)
class RemoteRewardModel:
    """A reward of a whole batch: a server that scores several conversations at once.

    The server gets ``{"messages": [[…]], "query": […], "prompts": […], "labels": […]}``, as OpenRLHF's servers do, and
    replies ``{"rewards": […]}``, one number a conversation. Where a conversation had tools, ``"tools"`` has each one's.
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
        scores: list[float] = []
        url = scrubbed_text(self.server.url)
        for start in range(0, len(trajectories), self.batch):
            part = trajectories[start : start + self.batch]
            prompts = [prompt_text(trajectory) for trajectory in part]
            texts = [prompt + t.completion for prompt, t in zip(prompts, part, strict=True)]
            payload = {"query": texts, "prompts": prompts, "labels": [t.row.get("answer") for t in part]}
            payload["messages"] = [[dict(message) for message in t.messages] for t in part]
            if any(t.tools for t in part):
                payload["tools"] = [list(t.tools) for t in part]
            try:
                rewards = _list_of(self.server.post(payload), url)
            except NoReply as error:
                raise RowFailed(start, str(error)) from error
            if len(rewards) != len(part):
                raise RowFailed(start, f"{url} replied {len(rewards)} rewards for {len(part)} completions")
            scores += rewards
        return scores


def prompt_text(trajectory: Trajectory) -> str:
    """The messages before the completion, as text: a single message without its role.

    Tools, calls, and what else a message says beside its content, such as thoughts or a name, are JSON.
    """
    before = trajectory.messages[: trajectory.last_turn]
    if len(before) == 1 and not trajectory.tools:
        return _text_of(before[0])
    tools = f"tools: {json.dumps(list(trajectory.tools), ensure_ascii=False)}\n" if trajectory.tools else ""
    return tools + "".join(f"{message['role']}: {_text_of(message)}\n" for message in before)


def _text_of(message: Mapping[str, Any]) -> str:
    others = {key: message[key] for key in WORD_KEYS if says_something(message.get(key))}
    parts = [others.pop("tool_calls", None), others]
    return str(message["content"]) + "".join(json.dumps(x, ensure_ascii=False, default=str) for x in parts if x)


def _list_of(reply: Any, url: str) -> list[Any]:
    rewards = reply.get("rewards") if isinstance(reply, Mapping) else None
    if not isinstance(rewards, list):
        raise NoReply(f"{url} replied with no list of rewards: {short(reply)}")
    return rewards


MICRO_BATCH_TOKENS = 16384
"""Tokens of one forward pass, unless a program says otherwise."""


class RewardModel:
    """A reward of a whole batch: the number that a ``*ForSequenceClassification`` of one label gives a conversation.

    The number is transformers' own, whoever trained the model. Its input is the conversation up to the assistant's last
    message, as the model's chat template renders a conversation to its end; it is read at the last token that is not
    the padding of config.json. Contents are concatenated, each turn with its end token, where the tokenizer has no
    template. Words, tools and keys of messages that the template leaves out are named once.
    """

    def __init__(self, name: str, *, micro_batch_tokens: int = MICRO_BATCH_TOKENS) -> None:
        """``name``: a folder or hub id. A model that does not fit is refused here; weights are read when first needed.

        Raises:
            ValueError: there is no such model, or it has another head.
        """
        # Not at the top: most runs have no reward model, and a reward's own process needs no torch.
        import torch

        from rl_bridge.models.model_source import PretrainedValueSource
        from rl_bridge.models.pretrained import tokenizer_of
        from rl_bridge.models.row_checks import Fits

        self.name, self._tokens = name, micro_batch_tokens
        self._source = PretrainedValueSource(name)
        with torch.device("meta"):
            empty = self._source.empty()
        self._source.check(empty)
        self._tokenizer: PreTrainedTokenizerBase = tokenizer_of(name)
        self._fits = Fits(empty, self._tokenizer)
        self._keys = KeyMemory()
        self._model: PreTrainedModel | None = None

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """The model's numbers.

        Raises:
            RowFailed: a conversation that its tokenizer or template refuses.
        """
        import torch

        from rl_bridge.data.token_batch import collate, micro_batches
        from rl_bridge.parallel.heads import scored_places, token_values

        model, pad = self._loaded(), self._tokenizer.pad_token_id
        assert isinstance(pad, int)
        batch = collate([self._encoded(t, place) for place, t in enumerate(trajectories)], pad)
        rewards = torch.zeros(len(trajectories))
        with torch.no_grad():
            for part in micro_batches(batch, self._tokens):
                inside = part.batch.to(model.device)
                values = token_values(model, inside.tokens)
                last = scored_places(model, inside.tokens, inside.lengths)
                rewards[part.places] = values.gather(1, last[:, None])[:, 0].cpu()
        return rewards.tolist()

    def close(self) -> None:
        """Give the weights' memory back."""
        self._model = None

    def _loaded(self) -> "PreTrainedModel":
        import torch

        if self._model is None:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            with torch.device("meta"):
                model = self._source.empty()
            self._source.load(model, device)
            self._model = model
        return self._model

    def _encoded(self, trajectory: Trajectory, place: int) -> Trajectory:
        from rl_bridge.models.encoding import encode_row
        from rl_bridge.models.row_checks import chat_of_row, remark_on_words

        template = bool(self._tokenizer.chat_template)
        reading: dict[str, bool] = {"apply_chat_template": template, "to_end": True, "require_messages": False}

        def encoded(row: Mapping[str, Any]) -> Trajectory:
            return encode_row(self._tokenizer, row, **reading)

        row = {"messages": list(trajectory.messages), "tools": trajectory.tools}
        row[ARGUMENTS] = arguments_of(trajectory.row)
        row |= {"_where": trajectory.row["_where"]} if "_where" in trajectory.row else {}
        try:
            tokens = encoded(row)
            self._fits.require_tokens(tokens.tokens)
        except ValueError as error:
            raise RowFailed(place, f"the reward model {self.name!r} cannot read the conversation: {error}") from error
        # The model reads less than the policy did where its template writes less.
        named: dict[str, Any] = {"memory": self._keys, "by": f" by the reward model {self.name!r}"}
        remark_on_keys([row], lambda row: encoded(row).tokens, **named)
        if template:
            remark_on_words(self._tokenizer, [row], lambda row: [chat_of_row(row)], memory=self._keys)
        return tokens
