"""Processes of environments that begin with everything imported: forked from one that is started once.

A run starts Python anew for the process that its environments are forked from, and imports transformers for a second
and a half of a core. In the place of that start, a template forks a process that goes on as the started one would.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import NoReturn

from rl_bridge.common import guard


class Template:
    """The process that the others are forked from."""

    def __init__(self) -> None:
        self._control, far = socket.socketpair()
        with far:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.warm_environments", str(far.fileno())],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                pass_fds=[far.fileno()],
            )

    def at_socket(self, module: str) -> tuple["Forked", socket.socket]:
        """In the place of ``children.module_at_socket``: the new process, and this process's end of its socket."""
        assert module == "rl_bridge.environments.fork_server"
        near, far = socket.socketpair()
        with far:
            socket.send_fds(self._control, [b"\0"], [far.fileno()])
        return Forked(int.from_bytes(self._control.recv(8))), near

    def close(self) -> None:
        """Let the template end."""
        self._control.close()
        self._process.wait(30)


class Forked:
    """The part of ``children.Child`` that environments use."""

    def __init__(self, pid: int) -> None:
        self.pid, self.dead = pid, threading.Event()

    def stop(self) -> None:
        """End the process and all that are forked from it."""
        guard.end_session(self.pid)
        self.dead.set()


def main() -> None:
    """Fork a process for each socket that arrives, and reply with its pid, until the other end is closed."""
    from rl_bridge.environments import fork_server

    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nobody reads how a process ended.
    while True:
        data, files, *_ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        if not (pid := os.fork()):
            control.close()
            _serve(fork_server.serve, socket.socket(fileno=files[0]))
        os.close(files[0])
        control.send(pid.to_bytes(8))


def _serve(serve, connection: socket.socket) -> NoReturn:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        with contextlib.suppress(EOFError):  # The run is over.
            serve(connection)
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
