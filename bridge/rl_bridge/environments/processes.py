"""Environments in a process each, which is ended when a call takes too long, whatever the environment is doing."""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from rl_bridge.data.requests import Message
from rl_bridge.environments.base import EnvironmentFactory, Step

START = 120.0
"""Seconds for Python to start and to load the environment, and for a fork to begin."""


class EnvironmentProcesses:
    """Makes sessions whose environments are processes, forked from one that has loaded the factory.

    Forking costs milliseconds. The process that is forked from lives as long as this object.
    """

    def __init__(self, factory: EnvironmentFactory, *, limit: float) -> None:
        """``limit``: seconds of one call of an environment.

        Raises:
            ValueError: a factory that cannot travel to another process, or cannot be loaded there.
            TimeoutError: the process did not start.
        """
        self._limit, self._start = limit, _travelling(factory)
        self._control, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "rl_bridge.environments.served", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is the driver's alone
                env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
            )
        self._process, self._lock = process, threading.Lock()
        self._finalize = weakref.finalize(self, _end, process, self._control)
        connection = Connection(os.dup(self._control.fileno()))
        with contextlib.closing(connection):
            connection.send_bytes(self._start)
            if not connection.poll(START):
                self.close()
                raise TimeoutError(f"the process of the environments did not start within {START:g} s")
            try:
                error = pickle.loads(connection.recv_bytes())
            except EOFError:
                error = RuntimeError(f"its process ended with exit status {process.wait(10)}")
        if error is not None:
            self.close()
            raise ValueError(f"the environment cannot be loaded in a process of its own: {error}") from error

    def serves(self, factory: EnvironmentFactory, limit: float) -> bool:
        """Whether conversations of this factory and limit can begin here."""
        return self._process.poll() is None and (limit, _travelling(factory)) == (self._limit, self._start)

    def session(self) -> "ForkedSession":
        """A new conversation's environment; its process begins with ``reset``."""
        return ForkedSession(self._fork, self._limit)

    def close(self) -> None:
        """End the process that others are forked from, and these with it."""
        self._finalize()

    def _fork(self) -> Connection:
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            try:
                socket.send_fds(self._control, [b"\0"], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise RuntimeError(f"the process that environments are forked from is gone: {error}") from error
        return Connection(ours.detach())


class ForkedSession:
    """As ``Session``, with the environment in another process."""

    def __init__(self, fork: Callable[[], Connection], limit: float) -> None:
        self._fork, self._limit = fork, limit
        self._connection: Connection | None = None
        self._process: int | None = None
        self._given_up = False
        self.tools: tuple[Any, ...] = ()

    def reset(self, row: Mapping[str, Any]) -> Step:
        """The opening messages."""
        self._connection = self._fork()
        # The limit is the environment's. A busy machine may take longer to begin a process.
        self._process = self._reply("reset", START)
        return self._ask("reset", dict(row))

    def step(self, messages: Sequence[Message]) -> Step:
        """What the environment says to the conversation."""
        return self._ask("step", [dict(message) for message in messages])

    @property
    def closing(self) -> Callable[[], None] | None:
        """The environment's own ``close``, and the end of its process."""
        return None if self._connection is None or self._given_up else self._close

    def give_up(self) -> None:
        """End the environment's process and all that it has started, while it is called."""
        self._given_up = True
        self._kill()

    def _close(self) -> None:
        try:
            self._ask("close")
        finally:
            self._end()

    def _ask(self, method: str, *arguments: Any) -> Any:
        if self._connection is None:
            raise RuntimeError("the process of the environment was ended")
        with contextlib.suppress(OSError):  # it ended: no reply says so
            self._connection.send_bytes(pickle.dumps((method, *arguments)))
        error, value, self.tools = self._reply(method, self._limit)
        if error is not None:
            raise error
        return value

    def _reply(self, method: str, limit: float) -> Any:
        assert self._connection is not None
        if not self._connection.poll(limit):
            self._end(kill=True)
            raise TimeoutError(f"took longer than {limit:g} s, and its process was ended")
        try:
            return pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            self._end()
            raise RuntimeError(f"the environment ended its process in {method}()") from None

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process, signal.SIGKILL)

    def _end(self, *, kill: bool = False) -> None:
        """Close the connection, at which the process ends; one that does not listen is killed with all it started."""
        if kill:
            self._kill()
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _end(process: "subprocess.Popen[bytes]", control: socket.socket) -> None:
    control.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _travelling(factory: EnvironmentFactory) -> bytes:
    """What the other process makes the factory from."""
    try:
        return pickle.dumps((list(sys.path), pickle.dumps(factory)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"the environment cannot be in a process of its own: {error}; name it FILE.py:Name, or take a class of a "
            "module"
        ) from error
