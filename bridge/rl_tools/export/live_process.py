"""The process that exports a run while it goes on: ``python -m rl_tools.export.live_process``.

The end of its standard input is the trainer's end, of whatever kind. Messages for the trainer to print go to the first
standard output, a line each; the output of libraries goes to a log file.
"""

import json
import os
import select
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from rl_bridge.common.scrubbing import environment_secrets, scrubbed_text
from rl_tools.export.export import ExportOptions, Session


@dataclass(frozen=True)
class Limits:
    """Seconds."""

    every: float = 1.0
    """Between two looks at the record."""
    hang: float = 60.0
    """Without a reply of the library, until the trainer's terminal has a message."""
    retry: float = 30.0
    """After a failure; the next time twice as long, at most ten minutes."""
    end: float = 30.0
    """For the remaining rows when the trainer has ended; then this process ends itself."""


@dataclass
class Live:
    """One tracker of one run, until the trainer has ended."""

    folder: Path
    options: ExportOptions
    limits: Limits
    terminal: TextIO
    _busy_since: float | None = None
    _told: bool = False
    _ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> int:
        """Export until the trainer has ended; returns exit status 0 if everything was sent."""
        threading.Thread(target=self._watch, daemon=True).start()
        pause = self.limits.retry
        while True:
            last = self._ended.is_set()
            try:
                self._session()
                return 0
            except Exception as error:
                traceback.print_exc()
                message = scrubbed_text(" ".join(f"{type(error).__name__}: {error}".split()), environment_secrets())
                self._tell(message[:300])
                if last or isinstance(error, ModuleNotFoundError):
                    return 1
            finally:
                self._busy_since = None
            # The trainer's end cuts the pause short: the last try comes at once.
            self._ended.wait(pause)
            pause = min(2 * pause, 600.0)

    def _session(self) -> None:
        self._busy_since = time.monotonic()
        with Session(self.folder, self.options, wait=self.limits.end) as session:
            while True:
                last = self._ended.is_set()
                self._busy_since = time.monotonic()
                session.catch_up()
                if last:
                    session.send_artifact()
                    break
                self._busy_since = None
                self._ended.wait(self.limits.every)
            self._busy_since = time.monotonic()

    def _watch(self) -> None:
        """Notice the trainer's end and a library that does not reply. A hanging library does not stop this thread."""
        while True:
            readable, _, _ = select.select([sys.stdin.fileno()], [], [], 0.5)
            if readable and not os.read(sys.stdin.fileno(), 1):
                break
            since = self._busy_since
            if since is not None and time.monotonic() - since > self.limits.hang:
                self._tell(f"no answer for {self.limits.hang:.0f} s")
        self._ended.set()
        time.sleep(self.limits.end)
        self._tell(f"it was not done {self.limits.end:.0f} s after the run's end")
        # The guard ends the library's own processes too.
        os._exit(1)

    def _tell(self, text: str) -> None:
        """Send one message to the trainer, the first; later ones are in the log file alone."""
        if self._told:
            return
        self._told = True
        try:
            self.terminal.write(text + "\n")
            self.terminal.flush()
        except BrokenPipeError:
            # The trainer is gone, and its terminal with it.
            traceback.print_exc()


def main(words: list[str]) -> int:
    """Export a run. ``words``: the run's folder, options and limits as JSON."""
    folder, options, limits = Path(words[0]), json.loads(words[1]), json.loads(words[2])
    options["output"] = Path(options["output"])
    # A library's own lines do not come between the trainer's.
    terminal = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return Live(folder, ExportOptions(**options), Limits(**limits), terminal).run()


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    # Nothing that a library left running keeps this process.
    os._exit(status)
