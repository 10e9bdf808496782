"""The contract between engines and the processes that their workers live in, and what can go wrong there."""

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


class Together(NamedTuple):
    """The slots that an engine's workers join collectives in."""

    slots: tuple[int, ...]
    since: int
    """The number of the last call before its workers were made: what failed until then does not concern it."""


# Errors of a worker, as the driver sees them.


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
    """Progress of a call whose function may join collectives."""

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


# The contract.

Arguments = Mapping[int, tuple[Any, ...]]
"""Slot number → the arguments that the slot's host is called with."""


@dataclass(frozen=True)
class Slot:
    """A process with at most one device. Workers of several engines can take turns in a slot."""

    index: int
    node: str = "localhost"
    """Address of the machine."""
    device: str = "cpu"
    resources: Mapping[str, float] = field(default_factory=dict)


class Executor(Protocol):
    """Runs functions in slots. Building engines, calls, weight transfer and checkpoints are such functions."""

    name: str
    slots: tuple[Slot, ...]
    held: dict[int, list[str]]
    """Names of the engines that have a worker in each slot, kept by the engines."""
    stopped: bool

    def submit(
        self,
        function: Callable[..., Any],
        arguments: Arguments,
        *,
        what: str,
        timeout: float | None = None,
        together: Together | None = None,
    ) -> Future[dict[int, Any]]:
        """Run ``function(host, *arguments[slot])`` in every slot named, each in its own process.

        A slot runs one function at a time, in the order of submission; different slots run at the same time. The
        future has the results by slot, or the first cause of failure; ``what`` names the call in messages. After
        ``timeout`` seconds (None: the executor's own) without every answer it fails and names the slots without one.
        ``together``: the function may join collectives over these slots.

        Raises:
            OutOfStep: an earlier call ``together`` did not end alike in all of the slots. Nothing is sent.

        Raises (in the future):
            WorkerError: the function raised; with slot and remote traceback, the exception itself as its cause.
            WorkerDied: a process is gone.
            DeadlineExceeded: an answer did not come in time.
        """
        ...

    def call(
        self,
        function: Callable[..., Any],
        arguments: Arguments,
        *,
        what: str,
        timeout: float | None = None,
        together: Together | None = None,
    ) -> dict[int, Any]:
        """``submit`` and wait."""
        ...

    def together(self, slots: Sequence[int]) -> Together | None:
        """For an engine whose workers are about to be made there, and will join collectives; None if they cannot."""
        ...

    def require_in_step(self, together: Together, what: str) -> None:
        """Return if a call may be sent.

        Raises:
            OutOfStep: an earlier one did not end alike in all of the slots; with the first cause.
            WorkerDied: the process of a slot is gone.
        """
        ...

    def part(self, together: Together) -> None:
        """The engine is about to be let go of: where its slots are out of step their process groups are made anew."""
        ...

    def restart(self) -> None:
        """Start every worker's process again, empty: engines have to be made and built again.

        Raises:
            NotImplementedError: the processes are somebody else's to start.
            RuntimeError: that has been done as often as ``init(restarts=...)`` allows.
        """
        ...

    def dead(self) -> dict[int, WorkerDied]:
        """Slots whose process is gone, and why."""
        ...

    def revive(self) -> list[int]:
        """Start the processes of dead slots again, empty, beside those that live; which slots these were.

        Raises:
            NotImplementedError: the processes are somebody else's to start.
        """
        ...

    def stop(self) -> None:
        """End the workers' processes."""
        ...
