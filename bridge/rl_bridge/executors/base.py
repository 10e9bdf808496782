"""The contract between engines and the processes that their workers live in."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from rl_bridge.executors.errors import WorkerDied
from rl_bridge.executors.steps import Together

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
