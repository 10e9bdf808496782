"""Calls of environments beside the sampler: many at once, each with a time limit, in threads or in processes."""

import contextlib
import itertools
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from inspect import isawaitable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol, Self

from rl_bridge.common import event_loop
from rl_bridge.common.children import module_at_socket
from rl_bridge.common.unawaited import drop
from rl_bridge.data.trajectory import Message
from rl_bridge.environments.environment import EnvironmentFactory, Step

Work = Callable[[], Any | Awaitable[Any]]
WAKE = -1
"""Number of a result that belongs to no call."""


class Finished(NamedTuple):
    """A call that returned or failed."""

    key: Hashable
    value: Any
    error: BaseException | None


class Steps(Protocol):
    """Runs calls of environments. A scheduler of simulated time has the same two methods."""

    def start(self, key: Hashable, work: Work) -> None:
        """Call ``work`` soon; ``finished`` tells its result under ``key``."""
        ...

    def finished(self, *, wait: bool, seconds: float | None = None) -> list[Finished]:
        """The calls that finished since ``finished`` was last asked.

        With ``wait`` at least one, if any is under way, unless none finishes within ``seconds``.
        """
        ...


class _Call(NamedTuple):
    key: Hashable
    deadline: float


class ThreadedSteps:
    """Runs each call in a thread, and coroutines in this process's event loop of environments.

    A thread cannot be stopped. A thread that goes past its limit is left behind: its place is given to the next call,
    and its result is dropped.
    """

    def __init__(self, *, limit: float, at_once: int = 64) -> None:
        """``limit``: seconds of one call. ``at_once``: calls that run at the same time; others wait their turn.

        Raises:
            ValueError: a limit or a number that is not positive.
        """
        if not (limit > 0 and at_once >= 1):
            raise ValueError(f"limit must be > 0 s and at_once ≥ 1, got {limit} and {at_once}")
        self._limit, self._at_once = limit, at_once
        self._waiting: deque[tuple[Hashable, Work, int]] = deque()
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count()
        self._results: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()
        self._woken = False
        self._coroutines: event_loop.Calls = set()
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Cancel the coroutines that still run; calls that wait for their turn are never made."""
        self._waiting.clear()
        self._closed = True
        event_loop.cancel(self._coroutines)

    def start(self, key: Hashable, work: Work, *, calls: int = 1) -> None:
        """Call ``work`` in a thread of its own, in turn. Its limit is that of ``calls`` calls together."""
        self._waiting.append((key, work, calls))
        self._begin()

    def wake(self) -> None:
        """Let ``finished`` return, if only with nothing. Any thread may call this."""
        self._results.put((WAKE, None, None))

    def awaited(self, value: Any) -> Any:
        """The value, or its result if it is awaitable: for a ``work`` of several calls."""
        if not isawaitable(value):
            return value
        if self._closed:
            drop(value)
            raise RuntimeError("the conversations of this environment are over")
        # ``finished`` gives the call up at its limit. This thread ends soon after.
        return event_loop.run(value, "environment", self._limit + 1, self._coroutines)

    def finished(self, *, wait: bool, seconds: float | None = None) -> list[Finished]:
        """Results in the order they came; a call past its limit is a ``TimeoutError``."""
        results: list[Finished] = []
        until = float("inf") if seconds is None else time.monotonic() + seconds
        while True:
            results += self._collect()
            self._begin()
            woken, self._woken = self._woken, False
            if results or woken or not wait or not self._calls or time.monotonic() >= until:
                return results
            nearest = min(until, *(call.deadline for call in self._calls.values()))
            try:
                result = self._results.get(timeout=max(0.0, nearest - time.monotonic()))
            except queue.Empty:
                continue
            results += self._take(*result)

    def _begin(self) -> None:
        while self._waiting and len(self._calls) < self._at_once:
            key, work, calls = self._waiting.popleft()
            number = next(self._numbers)
            self._calls[number] = _Call(key, time.monotonic() + self._limit * calls)
            threading.Thread(target=self._run, args=(number, work), daemon=True, name="environment").start()

    def _run(self, number: int, work: Work) -> None:
        value, failure = None, None
        try:
            value = self.awaited(work())
        except BaseException as error:  # sys.exit() in an environment is a failure of the environment too.
            failure = error
        self._results.put((number, value, failure))

    def _collect(self) -> list[Finished]:
        results: list[Finished] = []
        while not self._results.empty():
            results += self._take(*self._results.get())
        now = time.monotonic()
        for number, call in list(self._calls.items()):
            if call.deadline <= now:
                del self._calls[number]
                results.append(Finished(call.key, None, TimeoutError(f"took longer than {self._limit:g} s")))
        return results

    def _take(self, number: int, value: Any, error: BaseException | None) -> list[Finished]:
        self._woken |= number == WAKE
        call = self._calls.pop(number, None)
        return [] if call is None else [Finished(call.key, value, error)]


THREAD_WAITS = 10.0
"""Seconds that a thread waits longer for an environment's process than the process may take."""
START = 120.0
"""Seconds for Python to start and to load the environment, and for a fork to begin."""


class EnvironmentProcesses:
    """Makes sessions with an environment in a process each, forked from a process that has loaded the factory.

    A process is ended when a call takes too long, whatever the environment is doing. Forking costs milliseconds. The
    process that others are forked from lives as long as this object.
    """

    def __init__(self, factory: EnvironmentFactory, *, limit: float) -> None:
        """``limit``: seconds of one call of an environment.

        Raises:
            ValueError: a factory that cannot travel to another process, or cannot be loaded there.
            TimeoutError: the process did not start.
        """
        self._limit, self._start = limit, _travelling(factory)
        self._process, self._control = module_at_socket("rl_bridge.environments.fork_server")
        self._lock = threading.Lock()
        connection = Connection(os.dup(self._control.fileno()))
        with contextlib.closing(connection):
            connection.send_bytes(self._start)
            if not connection.poll(START):
                self.close()
                raise TimeoutError(f"the process of the environments did not start within {START:g} s")
            try:
                error = pickle.loads(connection.recv_bytes())
            except EOFError:
                error = RuntimeError(f"its process ended {self._process.how_it_ended()}")
        if error is not None:
            self.close()
            raise ValueError(f"the environment cannot be loaded in a process of its own: {error}") from error

    def serves(self, factory: EnvironmentFactory, limit: float) -> bool:
        """Whether conversations of this factory and limit can begin here."""
        return not self._process.dead.is_set() and (limit, _travelling(factory)) == (self._limit, self._start)

    def session(self) -> "ForkedSession":
        """A new conversation's environment; its process begins with ``reset``."""
        return ForkedSession(self._fork, self._limit)

    def close(self) -> None:
        """End the process that others are forked from, and these others."""
        self._process.stop()
        self._control.close()

    def _fork(self) -> Connection:
        near, far = socket.socketpair()
        with far, self._lock:
            try:
                socket.send_fds(self._control, [b"\0"], [far.fileno()])
            except OSError as error:
                near.close()
                raise RuntimeError(f"the process that environments are forked from is gone: {error}") from error
        return Connection(near.detach())


class ForkedSession:
    """A ``Session`` with the environment in another process."""

    def __init__(self, fork: Callable[[], Connection], limit: float) -> None:
        self._fork, self._limit = fork, limit
        self._connection: Connection | None = None
        self._process: int | None = None
        self._given_up = False
        self.tools: tuple[Any, ...] = ()

    def reset(self, row: Mapping[str, Any]) -> Step:
        """The opening messages."""
        self._connection = self._fork()
        # The limit is for the environment's code. A busy machine may take longer to begin a process.
        self._process = self._reply("reset", START)
        return self._ask("reset", dict(row))

    def step(self, messages: Sequence[Message]) -> Step:
        """The environment's answer to the conversation."""
        return self._ask("step", [dict(message) for message in messages])

    @property
    def closing(self) -> Callable[[], None] | None:
        """The environment's own ``close``, and the end of its process."""
        return None if self._connection is None or self._given_up else self._close

    def give_up(self) -> None:
        """End the environment's process and all that it has started, in the middle of a call."""
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
        with contextlib.suppress(OSError):  # The process has ended: ``_reply`` finds that out.
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
        """Close the connection, at which the process ends. ``kill``: end it and all that it has started by a signal."""
        if kill:
            self._kill()
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _travelling(factory: EnvironmentFactory) -> bytes:
    """The bytes from which the other process makes the factory."""
    try:
        return pickle.dumps((list(sys.path), pickle.dumps(factory)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"the environment cannot be in a process of its own: {error}; name it FILE.py:Name, or take a class of a "
            "module"
        ) from error
