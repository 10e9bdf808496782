"""``FILE.py:Name``, or a server's address → a factory of environments."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rl_bridge.environments.base import Environment, EnvironmentFactory
from rl_bridge.environments.interact import Interact
from rl_bridge.environments.openenv import OpenEnv
from rl_bridge.user_files import load_file


@dataclass(frozen=True)
class FileFactory:
    """Makes the environment that a file names. It travels by the file's path, which every worker must see."""

    path: str
    name: str
    _make: dict[str, EnvironmentFactory] = field(default_factory=dict, repr=False, compare=False)

    def __call__(self) -> Environment:
        """A new environment."""
        self.load()
        return self._make[self.name]()

    def load(self) -> None:
        """Load the file, unless this was done here before.

        Raises:
            FileNotFoundError: no such file.
            ValueError: the file fails to load, or the name is no environment.
        """
        if not self._make:
            self._make[self.name] = _factory(Path(self.path), self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        """What was loaded stays in its process."""
        return FileFactory, (self.path, self.name)


def load_environment(source: str) -> FileFactory | OpenEnv:
    """The environments of ``FILE.py:Name``, loaded here once to see that they can be; or of an OpenEnv server's URL.

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
    factory = FileFactory(str(Path(match[1]).resolve()), match[2])
    factory.load()
    return factory


def _factory(path: Path, name: str) -> Any:
    found: Any = getattr(load_file(path, "environment"), name, None)
    if inspect.isclass(found):
        lacking = [method for method in ("reset", "step") if not callable(getattr(found, method, None))]
        if lacking:
            raise ValueError(f"{path}: class {name} has no method {' and no method '.join(lacking)}")
        if needed := _needed(found):
            raise ValueError(f"{path}: {name} is made without arguments, and asks for {', '.join(needed)}")
        return found
    if not callable(found):
        raise ValueError(f"{path} has no class or function {name!r}")
    function: Any = found
    needed = _needed(function)
    if not needed:
        return function
    if len(needed) > 1:
        raise ValueError(
            f"{path}: an environment's function takes the messages, or nothing and returns an environment; "
            f"{name} asks for {', '.join(needed)}"
        )
    return partial(Interact, function)


def _needed(function: Callable[..., Any]) -> list[str]:
    """Names of the arguments that a call must give."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in kinds]
