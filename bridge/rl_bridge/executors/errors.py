"""What can go wrong in a worker, as the driver sees it."""

import functools
from typing import Any, NamedTuple


class Progress(NamedTuple):
    """How far a function came that may have joined collectives."""

    completed: bool
    """It returned, and what failed is to send its result."""
    place: str
    """File and line that raised."""
    collectives: dict[str, int]
    """Process group → collectives joined in its life."""


class WorkerError(RuntimeError):
    """A function raised in a slot.

    The message has the slot, the call and the remote traceback; ``__cause__`` is the exception itself. The error is
    also an instance of the cause's class, so that ``except ValueError`` means the same wherever the workers live.
    """

    slot: int
    what: str
    progress: Progress | None = None
    """Of a call whose function may join collectives."""

    def __str__(self) -> str:
        """The message, whatever the cause's class makes of its arguments."""
        return str(self.args[0]) if self.args else ""


class WorkerDied(RuntimeError):
    """The process of a slot is gone."""


class OutOfStep(RuntimeError):
    """An earlier call failed in some processes of a group and not in all: none of them may join a collective again.

    The message has the first cause, which is ``__cause__`` too, and what to do.
    """


class DeadlineExceeded(TimeoutError):
    """An answer did not come in time; the message names the slots waited for and where each of them is."""


def worker_error(
    slot: int, what: str, cause: BaseException, remote_traceback: str, progress: Progress | None = None
) -> WorkerError:
    """The error of a call whose function raised ``cause`` in a slot."""
    message = f"{what} raised {type(cause).__name__} in slot {slot}: {cause}\n--- traceback of slot {slot} ---\n"
    error = _of_class(type(cause), message + remote_traceback.rstrip())
    error.__dict__.update(cause.__dict__)
    error.slot, error.what, error.progress, error.__cause__ = slot, what, progress, cause
    return error


def _of_class(cause: type[BaseException], message: str) -> WorkerError:
    """A ``WorkerError`` that is a ``cause`` too, if there can be one."""
    # StopIteration would end a caller's generator and SystemExit the driver: both stay behind ``__cause__``.
    if issubclass(cause, Exception) and not issubclass(cause, (StopIteration, StopAsyncIteration, WorkerError)):
        try:
            error = cause.__new__(_both(cause), message)
        except TypeError:  # a class that cannot be a base class, or that wants other arguments
            return WorkerError(message)
        error.args = (message,)
        return error
    return WorkerError(message)


@functools.cache
def _both(cause: type[BaseException]) -> Any:
    return type("WorkerError", (WorkerError, cause), {"__module__": __name__, "__reduce__": _plain})


def _plain(error: WorkerError) -> tuple[Any, ...]:
    """Pickled as the plain class: the one made here has no name to be found by."""
    return WorkerError, error.args, error.__dict__
