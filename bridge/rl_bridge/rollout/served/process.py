"""A server that this process starts, watches and ends."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rl_bridge.common.root_cause import root_cause

WATCHER = Path(__file__).with_name("watcher.py")


class ServerDied(RuntimeError):
    """The server's process ended, or never came to reply; the message has the end of its log."""


class ServerProcess:
    """A command that serves, with a log file. Nothing of it outlives this process, whatever ends this process."""

    def __init__(
        self, command: Sequence[str], log: Path, *, environment: Mapping[str, str] | None = None, name: str = "server"
    ) -> None:
        """Start ``command``. ``environment``: variables besides those of this process. ``name``: in messages."""
        self.name, self.log = name, log
        ours, theirs = socket.socketpair()
        with theirs, log.open("ab") as output:
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-S", str(WATCHER), str(theirs.fileno()), *command],
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # one group to end; Ctrl-C is the driver's alone
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **(environment or {})},
            )
        self._status: list[int] = []
        self._dead = threading.Event()
        self._finalize = weakref.finalize(self, _end, self._popen, ours)
        said = b""
        while b"\n" not in said and (part := ours.recv(64)):
            said += part
        first, _, rest = said.partition(b"\n")
        self.pid = int(first or -1)
        """Of the command."""
        words = (self._popen, ours, rest, self._status, self._dead)
        threading.Thread(target=_watch, args=words, daemon=True, name=f"{name} watch").start()

    @property
    def dead(self) -> threading.Event:
        """Set as soon as the process has ended."""
        return self._dead

    def wait_until(self, ready: Callable[[], bool], seconds: float) -> None:
        """Until ``ready()``.

        Raises:
            ServerDied: the process ended first.
            TimeoutError: it did not come to that in ``seconds``.
        """
        deadline = time.monotonic() + seconds
        while not ready():
            if self._dead.wait(0.1):
                raise self.death()
            if time.monotonic() > deadline:
                self.stop()
                raise TimeoutError(f"{self.name} did not reply within {seconds:g} s of its start; {self.tail()}")

    def death(self) -> ServerDied:
        """How the process ended, with the end of its log; ends what is left of it."""
        self.stop()
        [status] = self._status
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with exit status {status}"
        return ServerDied(f"{self.name} (process {self.pid}) ended {how}; {self.tail()}")

    def unhealthy(self, why: str) -> ServerDied:
        """A process that serves no more though it lives: it is ended."""
        self.stop()
        return ServerDied(f"{self.name} (process {self.pid}) {why}, and was ended; {self.tail()}")

    def tail(self, lines: int = 20) -> str:
        """The end of the log, for messages."""
        text = self.log.read_text(errors="replace").strip().splitlines() if self.log.is_file() else []
        cause = root_cause("\n".join(text[:-lines]))  # one in the end is seen there
        first = "" if cause is None else f"the first error in its log: {cause}; "
        return f"{first}the end of {self.log}:\n" + ("\n".join(text[-lines:]) or "(empty)")

    def stop(self) -> None:
        """End the process and all that it has started; returns when they are gone."""
        self._finalize()
        self._dead.wait(20)


def _watch(
    popen: "subprocess.Popen[bytes]", control: socket.socket, said: bytes, status: list[int], dead: threading.Event
) -> None:
    """In a thread: tell how the command ended, as soon as it has."""
    with control:
        while part := control.recv(64):
            said += part
        popen.wait()
    # Whoever killed the watcher alone has left its group behind.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(popen.pid, signal.SIGKILL)
    # Nothing was said if the watcher was killed, or could not start the command.
    status.append(int(said) if said.strip() else popen.returncode)
    dead.set()


def _end(popen: "subprocess.Popen[bytes]", control: socket.socket) -> None:
    with contextlib.suppress(OSError):
        control.shutdown(socket.SHUT_WR)
    deadline = time.monotonic() + 15
    while popen.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(popen.pid, signal.SIGKILL)
    popen.wait()
