"""Where the workers of an engine live. ``local``: in this process."""

from rl_bridge.executors.base import Executor
from rl_bridge.executors.local import LocalExecutor

__all__ = ["Executor", "LocalExecutor", "resolve_executor"]

_EXECUTORS = {"local": LocalExecutor}


def resolve_executor(name: str) -> type[Executor]:
    """The executor of that name; an unknown one raises and lists those there are."""
    if name not in _EXECUTORS:
        raise NotImplementedError(f"executor {name!r} is not available; there is: {', '.join(sorted(_EXECUTORS))}")
    return _EXECUTORS[name]
