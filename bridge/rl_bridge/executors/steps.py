"""Slots whose functions join collectives with one another, and whether they are still in step.

A collective pairs with whatever its peers join next. After an error in one process of a group, its next collective
would pair with the last one of the others: they would hang, read each other's values, or abort the process.
"""

import threading
from collections.abc import Sequence
from typing import NamedTuple

from rl_bridge.executors.errors import OutOfStep, WorkerDied
from rl_bridge.executors.futures import Call

# How long the others may take to end as the first has: the same error comes to all of them at nearly the same time.
PATIENCE = 2.0


class Together(NamedTuple):
    """Of an engine: the slots that its workers join collectives in."""

    slots: tuple[int, ...]
    since: int
    """The number of the last call before its workers were made: what failed until then does not concern it."""


class Step(NamedTuple):
    """What a slot is told of a call whose function may join collectives."""

    number: int
    together: Together
    what: str


def concerns(step: Step, together: Together) -> bool:
    """Whether a process group of ``together`` may be out of step where this step failed: it has two slots of it."""
    return step.number > together.since and len({*step.together.slots} & {*together.slots}) > 1


def not_run(what: str, failed: Step, error: str) -> OutOfStep:
    """The error of a call that was sent before its slot knew of the failure."""
    return OutOfStep(f"{what} was not run, because {failed.what} before it failed: {error}")


class Steps:
    """The driver's list of such calls: those under way, and those that failed."""

    def __init__(self) -> None:
        """Nothing has been called."""
        self._count = 0
        self._calls: dict[int, tuple[Step, Call]] = {}
        self._lock = threading.Lock()

    def together(self, slots: Sequence[int]) -> Together:
        """The slots of an engine whose workers are about to be made."""
        with self._lock:
            return Together(tuple(slots), self._count)

    def begin(self, together: Together, call: Call) -> Step:
        """Number a call, in the order in which calls are sent."""
        with self._lock:
            self._count += 1
            step = Step(self._count, together, call.what)
            self._calls[step.number] = step, call
        # One that succeeds holds results, and is of no interest.
        call.future.add_done_callback(lambda done: None if done.exception() else self.forget([step]))
        return step

    def forget(self, steps: Sequence[Step]) -> None:
        """Leave calls out."""
        with self._lock:
            for step in steps:
                self._calls.pop(step.number, None)

    def clear(self) -> None:
        """All processes are new."""
        with self._lock:
            self._calls.clear()

    def failed(self, together: Together) -> tuple[list[Step], list[tuple[Step, Call]]]:
        """Failed calls that concern these slots: those that ended alike in all of their slots, and the others.

        Which it is shows when all slots have answered, for which this waits a moment.
        """
        with self._lock:
            calls = [(step, call) for step, call in self._calls.values() if concerns(step, together)]
        calls = [(step, call) for step, call in calls if call.future.done() and call.future.exception() is not None]
        alike = [step for step, call in calls if call.ended_alike(PATIENCE)]
        return alike, [(step, call) for step, call in calls if step not in alike]


def out_of_step(what: str, failed: tuple[Step, Call]) -> OutOfStep | WorkerDied:
    """The error of a call that is not sent."""
    step, call = failed
    cause = call.future.exception()
    if isinstance(cause, WorkerDied):
        error: OutOfStep | WorkerDied = WorkerDied(f"{what}: {cause}")
    else:
        error = OutOfStep(
            f"{what} was not called: {step.what} failed before, and did not end alike in slots "
            f"{list(step.together.slots)}. A collective of one would pair with another one's. Call release() of every "
            "engine that has these slots and build() them again, or start the workers again (executor.restart() under "
            f"Ray); a run goes on with --resume.\nfirst cause: {cause}"
        )
    error.__cause__ = cause
    return error
