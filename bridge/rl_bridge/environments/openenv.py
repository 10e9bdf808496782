"""Environments behind an OpenEnv server, through OpenEnv's own client (the extra ``openenv``)."""

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_bridge.data.requests import Message
from rl_bridge.environments.base import Step
from rl_bridge.models.encoding import messages_of


def message_action(text: str) -> Mapping[str, Any]:
    """The action of an environment that is spoken to.

    >>> message_action("hello")
    {'message': 'hello'}
    """
    return {"message": text}


def json_action(text: str) -> Mapping[str, Any]:
    """The action that the policy writes as a JSON object.

    >>> json_action('{"guess": 7}')
    {'guess': 7}

    Raises:
        ValueError: the text is no JSON object.
    """
    action = json.loads(text)
    if not isinstance(action, dict):
        raise ValueError(f"an action is a JSON object, the policy wrote {text!r}")
    return action


def observation_text(observation: Mapping[str, Any]) -> str:
    """The only text of an observation, or all of it as JSON.

    >>> observation_text({"echoed_message": "hello", "metadata": {}})
    'hello'
    >>> observation_text({"board": [0, 1], "player": "x"})
    '{"board": [0, 1], "player": "x"}'
    """
    said = {name: value for name, value in observation.items() if name != "metadata"}
    texts = [value for value in said.values() if isinstance(value, str)]
    return texts[0] if len(said) == len(texts) == 1 else json.dumps(said)


@dataclass(frozen=True, kw_only=True)
class OpenEnv:
    """Makes environments that are sessions of one server. Picklable if its functions are.

    The server must allow as many sessions as there are conversations (OpenEnv's ``max_concurrent_envs``, 1 by default).
    """

    url: str
    """``http://HOST:PORT`` or ``ws://HOST:PORT``."""
    action: Callable[[str], Mapping[str, Any]] = message_action
    """What the policy said → the fields of the server's action. ValueError tells the policy what is wrong with it."""
    observe: Callable[[Mapping[str, Any]], str] = observation_text
    """The server's observation → what the policy reads."""
    role: str = "user"
    """Of the observations."""
    timeout: float = 60.0
    """Seconds for an answer of the server."""

    def __call__(self) -> "OpenEnvSession":
        """A new session; it connects when it is reset.

        Raises:
            ModuleNotFoundError: OpenEnv is not installed.
        """
        self.require_client()
        return OpenEnvSession(self)

    def require_client(self) -> None:
        """Raise ModuleNotFoundError where OpenEnv is not installed: before a run begins."""
        if importlib.util.find_spec("openenv") is None:
            raise ModuleNotFoundError("an OpenEnv server needs its client: pip install openenv-core")


class OpenEnvSession:
    """One session: ``reset`` and ``step`` are the server's."""

    def __init__(self, options: OpenEnv) -> None:
        self._options = options
        self._client: Any = None

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Message]:
        """The row's ``prompt``, if it has one, and the first observation. Its ``reset`` is what the server's gets."""
        from openenv.core import GenericEnvClient  # type: ignore[import-not-found]

        options = self._options
        self._client = GenericEnvClient(
            options.url, connect_timeout_s=options.timeout, message_timeout_s=options.timeout, mode="simulation"
        )
        await self._client.connect()
        result = await self._client.reset(**row.get("reset", {}))
        prompt, seen = messages_of(row.get("prompt", ())), options.observe(result.observation)
        if prompt and prompt[-1]["role"] == options.role:  # templates may refuse two messages of one role in a row
            return [*prompt[:-1], {"role": options.role, "content": f"{prompt[-1]['content']}\n{seen}"}]
        return [*prompt, {"role": options.role, "content": seen}]

    async def step(self, messages: Sequence[Message]) -> Step:
        """The server's observation of what the policy said last.

        Words that are no action (``action`` raises ValueError) are answered so, without a reward: the policy's fault,
        which it can learn from, is no failure of the environment.
        """
        options = self._options
        try:
            action = dict(options.action(messages[-1]["content"]))
        except ValueError as error:
            return Step(messages=[{"role": options.role, "content": f"no action: {error}"}], reward=0.0)
        result = await self._client.step(action)
        seen = {"role": options.role, "content": options.observe(result.observation)}
        reward = None if result.reward is None else float(result.reward)
        return Step(messages=[seen], reward=reward, done=bool(result.done))

    async def close(self) -> None:
        """End the session."""
        if self._client is not None:
            await self._client.close()
