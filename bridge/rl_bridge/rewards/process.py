"""A reward function in a process of its own, which is ended when the function takes too long."""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, Self

from rl_bridge.data.trajectory import Trajectory
from rl_bridge.rewards.function import OF_LISTS, Protocol, RewardError, Values, said

START = 60.0
"""Seconds for Python to start and to import the function's file, beside the time limit of a call."""


class AskedElsewhere:
    """As ``Asked``, with a limit of ``seconds`` for each result. A function that hangs or dies takes nothing with it.

    The process begins with ``begin`` or the first call, and begins anew after it was ended.
    """

    def __init__(self, name: str, source: str | Callable[..., Any], protocol: Protocol | None, seconds: float) -> None:
        """``source``: ``FILE.py:function``, or a function that can be pickled."""
        if not 0 < seconds < float("inf"):
            raise ValueError(f"the time limit of a reward must be a positive number of seconds, got {seconds}")
        self.name, self.seconds = name, seconds
        self.title = source.rpartition(":")[2] if isinstance(source, str) else getattr(source, "__name__", name)
        try:
            if getattr(source, "__module__", None) == "__main__":
                raise pickle.PicklingError(f"{self.title} is defined in the program itself")
            self._start = pickle.dumps((name, source, protocol, list(sys.path)))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"reward {self.title} cannot run in a process of its own, which a time limit needs: {error}; "
                "take a function of a module, or FILE.py:function"
            ) from error
        self._source = f": {source}" if isinstance(source, str) else ""
        self._protocol = protocol
        self._process: _Process | None = None

    @property
    def apart(self) -> bool:
        """As of ``Asked``; False before the process has said what the function's parameters show."""
        return self._protocol is not None and self._protocol not in OF_LISTS

    def begin(self) -> Self:
        """Load the function in its process, and see what is wrong with it.

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
                process.connection.send_bytes(pickle.dumps(tuple(trajectories)))
            except OSError:  # it was gone since the batch before
                raise self._ended(process, trajectories[0]) from None
            for trajectory in trajectories:
                kind, value = self._next(process, self.seconds, trajectory)
                if kind == "error":
                    raise RewardError(value)
                yield value
        except RewardError:
            raise
        except BaseException:
            self.close()  # results that nobody waits for would be taken for those of the next call
            raise

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.end()
            self._process = None

    def _running(self) -> "_Process":
        if self._process is None:
            self._process = _Process()
            self._process.connection.send_bytes(self._start)
            kind, value = self._next(self._process, START + self.seconds, None)
            if kind == "error":
                self.close()
                raise value
            self._protocol = value
        return self._process

    def _next(self, process: "_Process", seconds: float, trajectory: Trajectory | None) -> tuple[str, Any]:
        if not process.connection.poll(seconds):
            self.close()
            if trajectory is not None:
                raise RewardError(f"{self._on(trajectory)} did not end within {seconds:g} s{said(trajectory)}")
            limits = f"{START:g} s to start and the limit of {self.seconds:g} s"
            raise RewardError(f"{self._on(None)} could not be loaded within {seconds:g} s ({limits}){self._source}")
        try:
            return pickle.loads(process.connection.recv_bytes())
        except (EOFError, OSError):
            raise self._ended(process, trajectory) from None

    def _ended(self, process: "_Process", trajectory: Trajectory | None) -> RewardError:
        how = process.how_it_ended()
        self.close()
        return RewardError(f"{self._on(trajectory)} ended its process {how}{said(trajectory) if trajectory else ''}")

    def _on(self, trajectory: Trajectory | None) -> str:
        return f"reward {self.title}" + (f" on {trajectory.row.get('_where', 'a row')}" if trajectory else "")


class _Process:
    """``python -m rl_bridge.rewards.process_main`` at the other end of a socket; ended with this object."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "rl_bridge.rewards.process_main", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # what the function starts ends with it; Ctrl-C is the driver's alone
                env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
            )
        self.connection = Connection(ours.detach())
        self._finalize = weakref.finalize(self, _end, self._popen, self.connection)

    def end(self) -> None:
        """End the process and all that it has started."""
        self._finalize()

    def how_it_ended(self) -> str:
        """Its exit status, or the signal."""
        deadline = time.monotonic() + 10
        while self._popen.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        status = self._popen.returncode
        if status is None:
            return "or its connection, in an unknown way"
        return f"by {signal.Signals(-status).name}" if status < 0 else f"with exit status {status}"


def _end(popen: "subprocess.Popen[bytes]", connection: Connection) -> None:
    connection.close()
    with contextlib.suppress(ProcessLookupError):  # nothing may be left of it
        os.killpg(popen.pid, signal.SIGKILL)
    popen.wait()
