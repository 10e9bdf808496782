"""A user at a terminal: words that are shown there, options as messages have them, signals that stop a run.

The words of a user's files, of servers and of libraries reach the terminal by ``say`` alone.
"""

import errno
import signal
import sys
from typing import Any, Self, TextIO

# Text on a terminal: nothing that came from outside moves the cursor, hides text or turns it around.

_KEPT = "\n\t"


def escaped(text: str) -> str:
    """The text with every character that does not print written as Python writes it; lines and tabs stay.

    >>> escaped("run \\x1b[2J\\u202etxt\\n")
    'run \\\\x1b[2J\\\\u202etxt\\n'
    """
    if all(character.isprintable() or character in _KEPT for character in text):
        return text
    return "".join(
        character if character.isprintable() or character in _KEPT else ascii(character)[1:-1] for character in text
    )


def say(text: str, *, error: bool = False, flush: bool = False) -> None:
    """Print a line, to the standard error with ``error``."""
    stream: TextIO = sys.stderr if error else sys.stdout
    print(escaped(text), file=stream, flush=flush)


# Signals that ask a run to stop, and words to a user whose terminal may be gone.

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
        numbers = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._interrupt) for number in numbers}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _interrupt(self, number: int, _: object) -> None:
        """Finish the step and stop there; a second signal does not wait."""
        if self.number is not None:
            raise StoppedAtOnce(number)
        self.number = number
        instruction = "press Ctrl-C again" if number == signal.SIGINT else "signal again"
        tell(f"stopping after this step ({instruction} to stop at once)")


def tell(text: str) -> None:
    """Print a line without breaking a progress bar. A terminal that hung up or a pipe that closed stops no run."""
    try:
        # Not at the top: the commands that need no extra have no tqdm.
        from tqdm import tqdm

        tqdm.write(escaped(text))
    except OSError as error:
        if error.errno not in (errno.EIO, errno.EPIPE):
            raise


_remarks: list[str] = []


def remark(text: str) -> None:
    """``tell`` something about a run's inputs before there is a run: its record keeps the line, too."""
    tell(text)
    _remarks.append(text)


def remarks() -> list[str]:
    """Remarks since the last call, each once."""
    lines = list(dict.fromkeys(_remarks))
    _remarks.clear()
    return lines


def given(options: object, *names: str) -> str:
    """The values of some options, as an error's message has them: not the whole of what they belong to.

    >>> from types import SimpleNamespace
    >>> given(SimpleNamespace(steps=0, rows_per_step=4, seed=1), "steps", "rows_per_step")
    'steps=0, rows_per_step=4'
    """
    return ", ".join(f"{name}={getattr(options, name)!r}" for name in names)
