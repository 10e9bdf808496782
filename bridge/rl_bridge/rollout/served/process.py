"""A server that this process starts, watches and ends."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rl_bridge.common.children import Child

GRACE = 10.0
"""Seconds between the request to end and the end."""


class ServerDied(RuntimeError):
    """The server's process ended, or never replied; the message has the end of its log."""


class ServerProcess(Child):
    """A command that serves, with a log file. Nothing of it outlives this process, whatever ends this process."""

    def __init__(
        self, command: Sequence[str], log: Path, *, env: Mapping[str, str] | None = None, name: str = "server"
    ) -> None:
        """Start ``command``. ``env``: all of its variables; those of this process if None. ``name``: in messages."""
        self.name = name
        super().__init__(command, log=log, env=env, grace=GRACE, shared_memory=True)

    def wait_until(self, ready: Callable[[], bool], seconds: float) -> None:
        """Wait until ``ready()``.

        Raises:
            ServerDied: the process ended first.
            TimeoutError: the process was not ready within ``seconds``, and was ended.
        """
        deadline = time.monotonic() + seconds
        while not ready():
            if self.dead.wait(0.1):
                raise self.death()
            if time.monotonic() > deadline:
                self.stop()
                raise TimeoutError(f"{self.name} did not reply within {seconds:g} s of its start; {self.tail()}")

    def death(self) -> ServerDied:
        """End the rest of a dead process; returns the error with its exit status and the end of its log."""
        self.stop()
        return ServerDied(f"{self.name} (process {self.pid}) ended {self.how_it_ended()}; {self.tail()}")

    def unhealthy(self, why: str) -> ServerDied:
        """End a process that lives but does not serve; returns the error with the end of its log."""
        self.stop()
        return ServerDied(f"{self.name} (process {self.pid}) {why}, and was ended; {self.tail()}")
