"""A child process that does not outlive this one, however this one ends.

Forks of a fork server are not started here. They live in the session of the server's guard, and end with that session.
The ranks of an engine of vLLM in this process are vLLM's own children.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rl_bridge.common import guard
from rl_bridge.common.root_cause import root_cause


class Child:
    """A command under a guard, in a session of its own, so that Ctrl-C is this process's alone.

    The command and all that the command starts in its session end with this object, with this process, however that
    ends, and when the command ends. The command inherits no descriptors but those that are named.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path | None = None,
        env: Mapping[str, str] | None = None,
        grace: float = 0.0,
        by_stdin: bool = False,
        piped: bool = False,
        descriptors: Sequence[int] = (),
        record: Path | None = None,
        cores: Sequence[int] = (),
        shared_memory: bool = False,
    ) -> None:
        """Start ``command``; a command that cannot be started ends with exit status 127.

        Args:
            command: the words.
            log: the command's output is appended to this file; else the output goes where that of this process goes.
            env: all environment variables; those of this process if None.
            grace: seconds between the request to end and the kill.
            by_stdin: the request to end is the end of the command's standard input, and not SIGTERM.
            piped: the command's standard output is ``stdout``, which somebody must read to its end.
            descriptors: the command inherits these.
            record: ``RECORD.lock`` is locked while the command may run, and ``RECORD.exit`` gets its exit status, for a
                later process; a command whose record is locked is not started, and counts as killed.
            cores: the command is bound to these.
            shared_memory: Python's shared memory that the command's processes have mapped is removed at their end.
        """
        self.log, self._status = log, list[int]()
        self.dead = threading.Event()
        """Set as soon as the command and all processes that it started have ended."""
        self._control, control = socket.socketpair()
        with control, contextlib.ExitStack() as failure, contextlib.ExitStack() as stack:
            failure.callback(self._control.close)
            output = None if log is None else stack.enter_context(log.open("ab"))
            options: dict[str, Any] = {"control": control.fileno(), "parent": os.getpid(), "grace": grace}
            options |= {"by_stdin": by_stdin, "descriptors": [*descriptors], "cores": [*cores]}
            options |= {"record": None if record is None else str(record), "shared_memory": shared_memory}
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, json.dumps(options), *command],
                pass_fds=[control.fileno(), *descriptors],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else output,
                stderr=output,
                env=env,
            )
            failure.pop_all()
        words = (self._guard.pid, self._control, self.dead, grace, os.getpid())
        self._finalize = weakref.finalize(self, _end, *words)
        received = b""
        try:
            while b"\n" not in received and (part := self._control.recv(64)):
                received += part
            first, _, rest = received.partition(b"\n")
            self.pid = int(first or -1)
            """Process id of the command; -1 if the command was not started."""
            words = (self._guard, self._control, rest, self._status, self.dead)
            threading.Thread(target=_watch, args=words, daemon=True, name=f"process {self.pid}").start()
        except BaseException:  # such as Ctrl-C, or no more threads: nothing watches the guard yet
            self._finalize.detach()
            guard.end_session(self._guard.pid)
            self._guard.wait()
            self._control.close()
            raise

    @property
    def status(self) -> int | None:
        """The exit status of a command that has ended, or its signal's number below 0."""
        return self._status[0] if self.dead.is_set() else None

    @property
    def stdout(self) -> IO[bytes]:
        """The standard output of a ``piped`` command."""
        assert self._guard.stdout is not None
        return self._guard.stdout

    def how_it_ended(self) -> str:
        """The exit status, or the signal, in words; waits for the end a little."""
        self.dead.wait(10.0)
        if self.status is None:
            return "or its connection, in an unknown way"
        return f"by {signal.Signals(-self.status).name}" if self.status < 0 else f"with exit status {self.status}"

    def tail(self, lines: int = 20) -> str:
        """The end of the log, for messages; nothing without a log."""
        if self.log is None:
            return ""
        text = self.log.read_text(errors="replace").strip().splitlines() if self.log.is_file() else []
        cause = root_cause("\n".join(text[:-lines]))  # an error among the last lines is printed with them
        beginning = "" if cause is None else f"the first error in its log: {cause}; "
        return f"{beginning}the end of {self.log}:\n" + ("\n".join(text[-lines:]) or "(empty)")

    def request_end(self) -> None:
        """Ask the command to end, and return at once; the guard kills the command after the grace."""
        with contextlib.suppress(OSError):  # the guard has ended
            self._control.shutdown(socket.SHUT_WR)

    def stop(self) -> None:
        """Ask the command to end; returns when nothing is left."""
        self._finalize()

    def kill(self) -> None:
        """End the command without grace; returns when nothing is left."""
        _kill(self._guard.pid, self.dead)

    def leave(self) -> None:
        """Let the command outlive this object; it ends when this process has ended, which does not wait for that."""
        self._finalize.detach()


def module_at_socket(module: str) -> tuple[Child, socket.socket]:
    """``python -m MODULE DESCRIPTOR`` with this process's path, and this process's end of the socket."""
    near, far = socket.socketpair()
    with far:
        child = Child(
            [sys.executable, "-m", module, str(far.fileno())],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
            descriptors=[far.fileno()],
        )
    return child, near


def _watch(
    leader: "subprocess.Popen[bytes]",
    control: socket.socket,
    received: bytes,
    status: list[int],
    dead: threading.Event,
) -> None:
    """Wait in a thread until the command has ended, and note its status."""
    with contextlib.suppress(ChildProcessError):  # the program ignores SIGCHLD
        # The guard is a zombie until its session has ended: no other process can have its id.
        os.waitid(os.P_PID, leader.pid, os.WEXITED | os.WNOWAIT)
    # Whoever killed the guard alone has left its session behind.
    guard.end_session(leader.pid)
    leader.wait()
    with control, contextlib.suppress(BlockingIOError):
        # A fork of this process may hold the other end open.
        control.setblocking(False)
        while part := control.recv(64):
            received += part
    # Nothing was received if the guard was killed.
    status.append(int(received) if received.strip() else leader.returncode)
    dead.set()


def _end(leader: int, control: socket.socket, dead: threading.Event, grace: float, owner: int) -> None:
    if os.getpid() != owner:  # a fork ends with its own copy of this object
        return
    if grace:
        with contextlib.suppress(OSError):
            control.shutdown(socket.SHUT_WR)
        dead.wait(grace + 5.0)
    # A guard that was stopped does not react.
    _kill(leader, dead)


def _kill(leader: int, dead: threading.Event) -> None:
    if not dead.is_set():
        guard.end_session(leader)
        dead.wait(20.0)
