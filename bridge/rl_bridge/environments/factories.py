"""Factories of environments: ``FILE.py:Name``, RL2's function ``interact``, an OpenEnv server's address."""

import functools
import hashlib
import importlib.util
import inspect
import json
import re
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import isawaitable
from pathlib import Path
from typing import Any

from rl_bridge.common.scrubbing import scrubbed_path
from rl_bridge.common.user_files import load_file, required_arguments
from rl_bridge.common.user_marks import content_of, mark_of, sources_of
from rl_bridge.data.trajectory import Message
from rl_bridge.environments.environment import Environment, EnvironmentFactory, Step
from rl_bridge.models.encoding import messages_of

# RL2's environments: a function ``interact(messages) -> list of messages``, empty at the end.

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
        """The function's answer."""
        answer = self.interact(list(messages))
        return _awaited(answer) if isawaitable(answer) else Step(messages=answer)


async def _awaited(answer: Awaitable[Sequence[Message]]) -> Step:
    return Step(messages=await answer)


# Environments behind an OpenEnv server, through OpenEnv's own client (the extra ``openenv``).


def message_action(text: str) -> Mapping[str, Any]:
    """The action of an environment that reads messages.

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
    fields = {name: value for name, value in observation.items() if name != "metadata"}
    texts = [value for value in fields.values() if isinstance(value, str)]
    return texts[0] if len(fields) == len(texts) == 1 else json.dumps(fields)


@dataclass(frozen=True, kw_only=True)
class OpenEnv:
    """Makes environments that are sessions of one server. Picklable if its functions are.

    The server must allow as many sessions as there are conversations (OpenEnv's ``max_concurrent_envs``, 1 by default).
    """

    url: str
    """``http://HOST:PORT`` or ``ws://HOST:PORT``."""
    action: Callable[[str], Mapping[str, Any]] = message_action
    """The policy's text → the fields of the server's action. The policy reads the text of a ValueError."""
    observe: Callable[[Mapping[str, Any]], str] = observation_text
    """The server's observation → the text that the policy reads."""
    role: str = "user"
    """Role of the observations' messages."""
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
        """Raise ModuleNotFoundError where OpenEnv is not installed. Comes before a run begins."""
        if importlib.util.find_spec("openenv") is None:
            raise ModuleNotFoundError("an OpenEnv server needs its client: pip install openenv-core")


class OpenEnvSession:
    """One session: ``reset`` and ``step`` are the server's."""

    def __init__(self, options: OpenEnv) -> None:
        self._options = options
        self._client: Any = None

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Message]:
        """The row's ``prompt``, if it has one, and the first observation.

        The server's reset gets the row's ``reset``.
        """
        from openenv.core import GenericEnvClient  # type: ignore[import-not-found]

        options = self._options
        self._client = GenericEnvClient(
            options.url, connect_timeout_s=options.timeout, message_timeout_s=options.timeout, mode="simulation"
        )
        await self._client.connect()
        result = await self._client.reset(**row.get("reset", {}))
        prompt, observation = messages_of(row.get("prompt", ())), options.observe(result.observation)
        if prompt and prompt[-1]["role"] == options.role:  # Templates may refuse two messages of one role in a row.
            return [*prompt[:-1], {"role": options.role, "content": f"{prompt[-1]['content']}\n{observation}"}]
        return [*prompt, {"role": options.role, "content": observation}]

    async def step(self, messages: Sequence[Message]) -> Step:
        """The server's observation after the policy's last message.

        A text that is no action (``action`` raises ValueError) gets the error as its answer, and the reward 0: the
        policy can learn from its fault, and the environment has not failed.
        """
        options = self._options
        try:
            action = dict(options.action(messages[-1]["content"]))
        except ValueError as error:
            return Step(messages=[{"role": options.role, "content": f"no action: {error}"}], reward=0.0)
        result = await self._client.step(action)
        observation = {"role": options.role, "content": options.observe(result.observation)}
        reward = None if result.reward is None else float(result.reward)
        return Step(messages=[observation], reward=reward, done=bool(result.done))

    async def close(self) -> None:
        """End the session."""
        if self._client is not None:
            await self._client.close()


@dataclass(frozen=True)
class FileFactory:
    """Makes the environment ``name`` of a file. It is pickled by the file's path, which every worker must see.

    A process loads the file once for all calls, unless its ``content`` is another: conversations share its globals.
    """

    path: str
    name: str
    content: str = ""
    file: str = ""
    """The hash of the file and of its neighbours that it imports; "" compares nothing."""
    _make: dict[str, EnvironmentFactory] = field(default_factory=dict, repr=False, compare=False)
    # A file may make environments of other files when it is loaded.
    _loading: Any = field(default_factory=threading.RLock, repr=False, compare=False)

    def __call__(self) -> Environment:
        """A new environment."""
        self.load()
        environment = self._make[self.name]()
        if any(not callable(getattr(environment, method, None)) for method in ("reset", "step")):
            raise ValueError(
                f"{self.path}: {self.name}() returns an environment, with the methods reset and step; got "
                f"{environment!r}"
            )
        return environment

    def load(self) -> None:
        """Load the file, unless this process has done so before. Threads that need the file wait for the first.

        Raises:
            FileNotFoundError: no such file; with this machine's name where the driver's had the file.
            ValueError: the file is another than the driver's was, fails to load, or the name is no environment.
        """
        with self._loading:
            if not self._make:
                self.require_file()
                self._make[self.name] = _factory(Path(self.path), self.name)

    def require_file(self) -> None:
        """Refuse a machine that lacks the file or has another one, before its conversations fail one by one.

        Raises:
            FileNotFoundError, ValueError: with the path and this machine's name, where the driver had the file.
        """
        if self._make:
            return
        if self.content and not Path(self.path).is_file():
            raise FileNotFoundError(
                f"no such environment file on {socket.gethostname()}: {self.path}; the driver's machine had the file "
                "when the run began, and every machine with a worker needs the file at this path"
            )
        if self.file and _hash(Path(self.path)) != self.file:
            raise ValueError(
                f"the environment file on {socket.gethostname()}, or a module beside it, is another than the driver's "
                f"when the run began: {self.path}; every machine with a worker needs the same files, and an edit is "
                "for the next run"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the path, the name and the content's hash: the loaded factory stays in its process."""
        return _file_factory, (self.path, self.name, self.content, self.file)


def require_here(factory: EnvironmentFactory) -> None:
    """Refuse a machine that lacks the factory's file, if the factory is of one; see ``FileFactory.require_file``."""
    if isinstance(factory, FileFactory):
        factory.require_file()


def fingerprint_of(factory: EnvironmentFactory) -> str:
    """Changes where an environment's file or its imports do, or a tool; not with the place of a file or a server."""
    if isinstance(factory, FileFactory):
        return f"{factory.name}:{factory.content}"
    if isinstance(factory, OpenEnv):
        return mark_of(replace(factory, url=scrubbed_path(factory.url), timeout=0.0))
    return mark_of(factory)


_lock, _made = threading.Lock(), functools.lru_cache(maxsize=64)(FileFactory)


def _file_factory(path: str, name: str, content: str, file: str) -> FileFactory:
    with _lock:  # Two threads that unpickle at once get the same factory.
        return _made(path, name, content, file)


def _hash(file: Path) -> str:
    """A hash of the file and of what it imports from its own folder, which lies beside it on every machine."""
    parts = sources_of(file, search=())
    return hashlib.sha256(b"".join(hashlib.sha256(part.read_bytes()).digest() for part in sorted(parts))).hexdigest()[
        :16
    ]


def load_environment(source: str) -> FileFactory | OpenEnv:
    """The factory of ``FILE.py:Name``, which is loaded here once to refuse a bad file; or of an OpenEnv server's URL.

    ``Name`` is a class with ``reset`` and ``step`` that is made without arguments, a function without parameters that
    returns such an environment, or RL2's function of the messages. The file may import its neighbours.

    Raises:
        FileNotFoundError: no such file.
        ModuleNotFoundError: a server's client is not installed.
        ValueError: the source is not of that form, the file fails to load, or the name is none of these.
    """
    if re.match(r"(http|ws)s?://", source):
        server = OpenEnv(url=source)
        server.require_client()
        return server
    match = re.fullmatch(r"(.+\.py):([A-Za-z_]\w*)", source)
    if match is None:
        raise ValueError(f"an environment is named FILE.py:Name or http://HOST:PORT, got {source!r}")
    path = Path(match[1]).resolve()
    content, file = (content_of(path)[:16], _hash(path)) if path.is_file() else ("", "")
    factory = FileFactory(str(path), match[2], content, file)
    factory.load()
    return factory


def _factory(path: Path, name: str) -> Any:
    value: Any = getattr(load_file(path, "environment"), name, None)
    if not callable(value):
        raise ValueError(f"{path} has no class or function {name!r}")
    methods = ("reset", "step") if inspect.isclass(value) else ()
    if lacking := [method for method in methods if not callable(getattr(value, method, None))]:
        raise ValueError(f"{path}: class {name} has no method {' and no method '.join(lacking)}")
    needed = required_arguments(value)
    if not needed:
        return value
    if inspect.isclass(value):
        raise ValueError(f"{path}: {name} is made without arguments, and asks for {', '.join(needed)}")
    if len(needed) > 1:
        raise ValueError(
            f"{path}: an environment's function takes the messages, or nothing and returns an environment; "
            f"{name} asks for {', '.join(needed)}"
        )
    function: Any = value
    return partial(Interact, function)
