"""A reward function in a process of its own, which is ended when the function takes too long."""

import contextlib
import itertools
import os
import pickle
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Self

from rl_bridge.common.children import Child, module_at_socket
from rl_bridge.data.trajectory import Trajectory
from rl_bridge.rewards.function import OF_LISTS, Protocol, RewardError, Values, with_completion

START = 60.0
"""Seconds for Python to start and to import the function's file, beside the time limit of a call."""
GRACE = 5.0
"""Seconds for a process that is not needed any more to close its functions and files."""


class _Process(NamedTuple):
    """``python -m rl_bridge.rewards.reward_process_main`` and this end of its socket."""

    child: Child
    connection: Connection
    loaded: set[int]
    """Numbers of the functions that the process has loaded."""


class RewardProcess:
    """The process of the functions of one file, which share its globals. It begins with the first call."""

    def __init__(self) -> None:
        self.running: _Process | None = None
        self._numbers = itertools.count()

    def number(self) -> int:
        """The number of one more function."""
        return next(self._numbers)

    def start(self) -> _Process:
        """The process, begun if there is none."""
        if self.running is None:
            child, near = module_at_socket("rl_bridge.rewards.reward_process_main")
            self.running = _Process(child, Connection(near.detach()), set())
            self.running.connection.send_bytes(pickle.dumps(list(sys.path)))
        return self.running

    def close(self, *, grace: float | None = None) -> None:
        """End the process, if there is one. It has ``grace`` seconds (``GRACE``) to close its functions and files."""
        if self.running is not None:
            child, connection, _ = self.running
            self.running = None
            try:
                # A fork of this process may hold the connection open.
                with (
                    contextlib.suppress(OSError),
                    connection,
                    socket.socket(fileno=os.dup(connection.fileno())) as near,
                ):
                    near.shutdown(socket.SHUT_RDWR)
                child.dead.wait(GRACE if grace is None else grace)
            finally:
                child.stop()


class AskedElsewhere:
    """``Asked`` in a process of its own, with a limit of ``seconds`` for each result, from the one before.

    Coroutines of a batch run together: then a result of any row counts, since each may wait for the others. Of the rows
    without a result the first is named.

    A function that hangs or dies takes no other process with it. The process begins with ``begin`` or the first call,
    and begins anew after its end.
    """

    def __init__(
        self,
        name: str,
        source: str | Callable[..., Any],
        protocol: Protocol | None,
        seconds: float,
        process: RewardProcess | None = None,
    ) -> None:
        """``source``: ``FILE.py:function``, or a function that can be pickled. ``process``: functions share it."""
        if not 0 < seconds < float("inf"):
            raise ValueError(f"the time limit of a reward must be a positive number of seconds, got {seconds}")
        self.name, self.seconds = name, seconds
        self.title = source.rpartition(":")[2] if isinstance(source, str) else getattr(source, "__name__", name)
        try:
            if getattr(source, "__module__", None) == "__main__":
                raise pickle.PicklingError(f"{self.title} is defined in the program itself")
            self._host = process or RewardProcess()
            self._number = self._host.number()
            self._start = pickle.dumps((self._number, name, source, protocol))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"reward {self.title} cannot run in a process of its own, which a time limit needs: {error}; "
                "take a function of a module, or FILE.py:function"
            ) from error
        self._source = f": {source}" if isinstance(source, str) else ""
        self._protocol = protocol

    @property
    def apart(self) -> bool:
        """``Asked.apart``; False before the process has sent the protocol that the function's parameters show."""
        return self._protocol is not None and self._protocol not in OF_LISTS

    def begin(self) -> Self:
        """Load the function in its process, so that a function that cannot be loaded shows here.

        Raises:
            FileNotFoundError, ValueError: as ``load_reward`` does, and for parameters that show no protocol.
            RewardError: the file did not load within ``START`` and the limit, or ended its process.
        """
        self._running()
        return self

    def score(self, trajectories: Sequence[Trajectory]) -> Iterator[Values]:
        """The values of each trajectory by name, in order.

        Raises:
            RewardError: as ``Asked.score``; or no result within the limit; or the process ended.
        """
        if not trajectories:
            return
        process = self._running()
        try:
            try:
                process.connection.send_bytes(pickle.dumps((self._number, tuple(trajectories))))
            except OSError:  # The process has ended since the batch before.
                raise self._ended(process, trajectories[0]) from None
            for trajectory in trajectories:
                kind, value = self._next(process, self.seconds, trajectory)
                if kind == "error":
                    raise RewardError(value)
                yield value
        except RewardError:
            raise
        except BaseException:
            self.close()  # Results that nobody waits for would be taken for results of the next call.
            raise

    def close(self) -> None:
        """Close the function and end its process, if there is one."""
        self._host.close()

    def _running(self) -> _Process:
        process = self._host.start()
        if self._number not in process.loaded:
            try:
                process.connection.send_bytes(self._start)
            except OSError:
                raise self._ended(process, None) from None
            kind, value = self._next(process, START + self.seconds, None)
            if kind == "error":
                self.close()
                raise value
            self._protocol = value
            process.loaded.add(self._number)
        return process

    def _next(self, process: _Process, seconds: float, trajectory: Trajectory | None) -> tuple[str, Any]:
        while process.connection.poll(seconds):
            try:
                kind, value = pickle.loads(process.connection.recv_bytes())
            except (EOFError, OSError):
                raise self._ended(process, trajectory) from None
            if kind != "progress":  # A coroutine has ended: the limit begins anew.
                return kind, value
        self._host.close(grace=0.0)
        if trajectory is not None:
            raise RewardError(f"{self._on(trajectory)} did not end within {seconds:g} s{with_completion(trajectory)}")
        limits = f"{START:g} s to start and the limit of {self.seconds:g} s"
        raise RewardError(f"{self._on(None)} could not be loaded within {seconds:g} s ({limits}){self._source}")

    def _ended(self, process: _Process, trajectory: Trajectory | None) -> RewardError:
        how, end = process.child.how_it_ended(), with_completion(trajectory) if trajectory else ""
        self.close()
        return RewardError(f"{self._on(trajectory)} ended its process {how}{end}")

    def _on(self, trajectory: Trajectory | None) -> str:
        return f"reward {self.title}" + (f" on {trajectory.row.get('_where', 'a row')}" if trajectory else "")
