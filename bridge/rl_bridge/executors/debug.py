"""A debugger in a worker: a slot's process has no terminal, so it is reached over a port of its own machine."""

import functools
import hmac
import importlib
import pdb
import secrets
import socket
import sys
from typing import IO

from rl_bridge.common.terminal import say
from rl_bridge.executors.serving import OnError

# How long a worker waits for somebody to debug it.
PATIENCE = 3600.0


def debugger(kind: str | None, slot: int) -> OnError | None:
    """A worker's act on an exception before the driver hears of it; ``breakpoint()`` leads there too.

    "pdb" waits at a port of this machine's loopback for ``nc 127.0.0.1 PORT`` and the word that it prints, so that
    other users of the machine stay outside. "debugpy" listens for an editor from the start.

    Raises:
        ValueError: another ``kind``, or debugpy is not installed.
    """
    match kind:
        case None:
            return None
        case "pdb":
            sys.breakpointhook = functools.partial(_breakpoint, slot)
            return functools.partial(_post_mortem, slot)
        case "debugpy":
            return _debugpy(slot)
        case _:
            raise ValueError(f"debug={kind!r}; there are 'pdb' and 'debugpy'")


def terminal_debugger(kind: str | None) -> OnError | None:
    """The same for a function that runs in a process with a terminal, where a frame of it can be looked at there."""
    return (lambda error: pdb.post_mortem(error.__traceback__)) if kind == "pdb" else debugger(kind, 0)


def _post_mortem(slot: int, error: BaseException) -> None:
    terminal = _terminal(slot, f"{type(error).__name__}: {error}")
    if terminal is not None:
        debugger = _RemotePdb(*terminal)
        debugger.reset()
        debugger.interaction(None, error.__traceback__)
        debugger.hang_up()


def _breakpoint(slot: int, *args: object, **kwargs: object) -> None:
    frame = sys._getframe(1)
    terminal = _terminal(slot, f"breakpoint() at {frame.f_code.co_filename}:{frame.f_lineno}")
    if terminal is not None:
        # The last call here: a debugger that steps would stop in the next one.
        _RemotePdb(*terminal).set_trace(frame)


class _RemotePdb(pdb.Pdb):
    """Hangs up when there is nothing more to stop at."""

    def __init__(self, reader: IO[str], writer: IO[str]) -> None:
        super().__init__(stdin=reader, stdout=writer)
        self._files = (reader, writer)

    def set_continue(self) -> None:
        super().set_continue()
        if not self.breaks:
            self.hang_up()

    def set_quit(self) -> None:
        super().set_quit()
        self.hang_up()

    def hang_up(self) -> None:
        """The client reads the end."""
        for file in self._files:
            file.close()


def _terminal(slot: int, why: str) -> tuple[IO[str], IO[str]] | None:
    """A connection to somebody who has read the word that this prints; None if nobody comes."""
    word = secrets.token_urlsafe(9)
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        say(f"rl_bridge: slot {slot}: {why}\n  debug it: nc 127.0.0.1 {port}, then {word}", error=True, flush=True)
        door.settimeout(PATIENCE)
        while True:
            try:
                connection, _ = door.accept()
            except TimeoutError:
                say(f"rl_bridge: slot {slot}: nobody came in {PATIENCE:g} s", error=True, flush=True)
                return None
            connection.settimeout(60)
            # Two files: one for both directions forgets what it has read ahead when it writes.
            reader, writer = connection.makefile("r", encoding="utf-8"), connection.makefile("w", encoding="utf-8")
            try:
                is_right = hmac.compare_digest(reader.readline(100).strip().encode(), word.encode())
            except (OSError, ValueError):  # too slow, or no text
                is_right = False
            connection.settimeout(None)
            connection.close()  # once the files are closed too
            if is_right:
                return reader, writer
            reader.close()
            writer.close()


def _debugpy(slot: int) -> OnError:
    try:
        debugpy = importlib.import_module("debugpy")
    except ModuleNotFoundError as error:
        raise ValueError("debug='debugpy' needs debugpy: pip install debugpy") from error
    host, port = debugpy.listen(("127.0.0.1", 0))
    say(f"rl_bridge: slot {slot}: debugpy listens at {host}:{port}", error=True, flush=True)

    def wait(error: BaseException) -> None:
        say(f"rl_bridge: slot {slot}: {type(error).__name__}: {error}; it waits for debugpy", error=True)
        debugpy.wait_for_client()
        debugpy.breakpoint()

    return wait
