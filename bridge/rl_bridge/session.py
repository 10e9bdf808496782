"""The executor of this process: made by ``init``, or local when nothing was asked for."""

from rl_bridge.executors import Executor, LocalExecutor

_current: list[Executor] = []


def current_executor() -> Executor:
    """The executor that engines use by default."""
    if not _current:
        _current.append(LocalExecutor())
    return _current[0]
