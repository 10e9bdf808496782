"""Signals that ask a run to stop, and words to a user whose terminal may be gone."""

import errno
import signal
from typing import Any, Self

from rl_bridge.terminal import escaped

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """A signal asked the run ``name`` to stop; a checkpoint of the last whole step is on disk."""

    def __init__(self, message: str, name: str, number: int) -> None:
        super().__init__(message)
        self.name, self.number = name, number


class StoppedAtOnce(KeyboardInterrupt):
    """A second signal came."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class StopRequest:
    """Use as a context manager. ``number`` is that of the first signal that came, None before."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # What is ignored stays ignored: nohup and a shell's background jobs rely on that.
        wanted = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._interrupt) for number in wanted}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _interrupt(self, number: int, _: object) -> None:
        """Finish the step and stop there; a second signal does not wait."""
        if self.number is not None:
            raise StoppedAtOnce(number)
        self.number = number
        again = "press Ctrl-C again" if number == signal.SIGINT else "signal again"
        tell(f"stopping after this step ({again} to stop at once)")


def tell(text: str) -> None:
    """Print a line without breaking a progress bar. A terminal that hung up or a pipe that closed stops no run."""
    try:
        # Not at the top: the commands that need no extra have no tqdm.
        from tqdm import tqdm

        tqdm.write(escaped(text))
    except OSError as gone:
        if gone.errno not in (errno.EIO, errno.EPIPE):
            raise


_remarks: list[str] = []


def remark(text: str) -> None:
    """``tell`` something about a run's inputs before there is a run: its record keeps the line, too."""
    tell(text)
    _remarks.append(text)


def remarks() -> list[str]:
    """What was remarked since the last call, each once."""
    found = list(dict.fromkeys(_remarks))
    _remarks.clear()
    return found
