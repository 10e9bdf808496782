"""A debugger in a worker: a slot's process has no terminal, so debugpy is reached over a port of its own machine."""

import importlib

from rl_bridge.common.terminal import say
from rl_bridge.executors.serving import OnError


def debugger(kind: str | None, slot: int) -> OnError | None:
    """A worker's act on an exception before the driver hears of it: it stops there for an editor.

    debugpy listens at a free port of the machine's loopback from the start, and an editor that is attached stops at
    ``breakpoint()`` too.

    Raises:
        ValueError: another ``kind`` than "debugpy", or debugpy is not installed.
    """
    check_debugger(kind)
    if kind is None:
        return None
    try:
        debugpy = importlib.import_module("debugpy")
    except ModuleNotFoundError as error:
        raise ValueError("debug='debugpy' needs debugpy: pip install debugpy") from error
    host, port = debugpy.listen(("127.0.0.1", 0))
    say(f"rl_bridge: slot {slot}: debugpy listens at {host}:{port}", error=True, flush=True)

    def wait(error: BaseException) -> None:
        say(f"rl_bridge: slot {slot}: {type(error).__name__}: {error}; it waits for debugpy", error=True, flush=True)
        debugpy.wait_for_client()
        debugpy.breakpoint()

    return wait


def check_debugger(kind: str | None) -> None:
    """Refuse what is no debugger of a worker.

    Raises:
        ValueError: another ``kind`` than None and "debugpy".
    """
    if kind == "pdb":
        raise ValueError(
            "debug='pdb': a worker has no terminal; debug='debugpy' stops it where it raises, for an editor "
            "(pip install debugpy). In one process, `python -m pdb SCRIPT` needs no option"
        )
    if kind not in (None, "debugpy"):
        raise ValueError(f"debug={kind!r}; there is 'debugpy'")
