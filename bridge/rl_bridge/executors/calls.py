"""Calls into slots: the results of one, or the first cause why there are none; and whether slots are still in step.

A collective pairs with whatever its peers join next. After an error in one process of a group, its next collective
would pair with the last one of the others: they would hang, read each other's values, or abort the process.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from rl_bridge.executors.executor import OutOfStep, Together, WorkerDied

# The results of one call from several slots, or the first cause why there are none.

# What a collective says when the process at its other end is gone or gave up: that process knows why.
_CONSEQUENCES = ("connection closed", "connection reset", "broken pipe", "gloo", "nccl", "pair closure")
_GRACE = 2.0
_END = 5.0  # seconds of waiting for a thread that has nothing more to do


def is_consequence(error: BaseException) -> bool:
    """Whether a worker's error is one that another worker's end or error brings about in a collective."""
    cause = error.__cause__
    return isinstance(cause, RuntimeError) and any(words in str(cause).lower() for words in _CONSEQUENCES)


def first_cause(errors: Iterable[BaseException]) -> BaseException:
    """The cause of a call's errors, which are in order of arrival: a death, else no consequence, else the first."""
    in_order = list(errors)
    deaths = [error for error in in_order if isinstance(error, WorkerDied)]
    causes = [error for error in in_order if not is_consequence(error)]
    return (deaths or causes or in_order)[0]


class Call:
    """One function on its way through several slots."""

    def __init__(self, what: str, slots: Iterable[int], clock: "Clock") -> None:
        """Wait for an answer from each of ``slots``; ``clock`` tells when a consequence has no cause."""
        self.what = what
        self.future: Future[dict[int, Any]] = Future()
        self.future.set_running_or_notify_cancel()  # what is on its way cannot be cancelled
        self._order = tuple(slots)
        self._waiting = set(self._order)
        self._results: dict[int, Any] = {}
        self._errors: dict[int, BaseException] = {}
        self._lost: set[int] = set()
        self._abandoned: BaseException | None = None
        self._answered = threading.Event()
        self.over, self._over_at = False, 0.0
        """Whether its future is done, whoever may still answer; and since when."""
        self._lock = threading.Lock()
        self._clock = clock

    @property
    def waiting(self) -> list[int]:
        """Slots without an answer."""
        with self._lock:
            return sorted(self._waiting)

    def succeed(self, slot: int, result: Any) -> None:
        """A slot's result."""
        with self._lock:
            self._waiting.discard(slot)
            # Nobody will ask for the result of a call that has failed.
            self._results[slot] = None if self.over else result
            waiting = len(self._waiting)
        if not waiting:
            self._answered.set()
            self._finish()

    def lose(self, slot: int) -> None:
        """A slot's process is gone: ``fail`` says why in a moment, and errors of other slots follow from that."""
        with self._lock:
            self._lost.add(slot)

    def fail(self, slot: int, error: BaseException) -> None:
        """A slot's error. One that has no cause of its own waits a moment for the cause."""
        with self._lock:
            self._waiting.discard(slot)
            self._errors[slot] = error
            waiting = len(self._waiting)
        if not waiting:
            self._answered.set()
        if not waiting or not is_consequence(error):
            self._fail()
        else:
            self._clock.at(time.monotonic() + _GRACE, self._fail)

    def _fail(self) -> None:
        with self._lock:
            awaits_a_death = bool(self._lost & self._waiting)
        if not awaits_a_death:
            self._finish()

    def abandon(self, error: BaseException) -> None:
        """End the call with an error, whoever may still answer."""
        with self._lock:
            if self.over:
                return
            self._abandoned = error
        self._finish()

    def ended_alike(self, patience: float) -> bool:
        """Whether a failed call left its slots in step: all have answered, ``patience`` seconds after the first error.

        Either its function returned in every slot, and only its results could not be sent, or it raised an error of one
        class at one place in every slot, after as many collectives.
        """
        seconds = max(0.0, self._over_at + patience - time.monotonic())
        if self._abandoned is not None or not self._answered.wait(seconds):
            return False
        with self._lock:
            errors = list(self._errors.values())
            returned = [getattr(error, "progress", None) for error in errors]
        if all(progress is not None and progress.completed for progress in returned):
            return True
        if len(errors) < len(self._order) or any(isinstance(e, WorkerDied) or is_consequence(e) for e in errors):
            return False
        reports = [progress for progress in returned if progress is not None]
        if len({type(error.__cause__) for error in errors}) > 1 or len({progress[:2] for progress in reports}) != 1:
            return False
        return len(reports) == len(errors) and _agree([progress.collectives for progress in reports])

    def _finish(self) -> None:
        with self._lock:
            if self.over:
                return
            self.over, self._over_at = True, time.monotonic()
        # Callbacks of the future run here, so the lock is free by now.
        if self._abandoned is not None:
            self.future.set_exception(self._abandoned)
        elif self._errors:
            self._results = dict.fromkeys(self._results)
            self.future.set_exception(first_cause(self._errors.values()))
        else:
            self.future.set_result({slot: self._results[slot] for slot in self._order})


def _agree(counts: Sequence[Mapping[str, int]]) -> bool:
    """Whether every process group has the same count in all of its members."""
    groups = {group for count in counts for group in count}
    return all(len({count[group] for count in counts if group in count}) == 1 for group in groups)


def join(thread: threading.Thread | None) -> None:
    """Wait a moment for a thread's end; the thread itself does not wait.

    A thread that lets go of a tensor while the interpreter ends aborts the process: torch's C++ code frees the tensor
    without the interpreter's lock, and Python ends a thread that asks for the lock so late.
    """
    if thread is not None and thread is not threading.current_thread():
        thread.join(_END)


class Clock:
    """One thread that calls functions at their time: deadlines cost no thread of their own."""

    def __init__(self) -> None:
        """The thread starts with the first function."""
        self._due: dict[int, tuple[float, Callable[[], None]]] = {}
        self._number = 0
        self._wakes = float("inf")
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def at(self, when: float, function: Callable[[], None]) -> Callable[[], None]:
        """Call ``function`` at ``time.monotonic() == when``; returns what takes that back."""
        with self._changed:
            self._number += 1
            number = self._number
            self._due[number] = (when, function)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="rl_bridge clock")
                self._thread.start()
            elif when < self._wakes:
                self._changed.notify()

        def cancel() -> None:
            with self._changed:
                self._due.pop(number, None)

        return cancel

    def stop(self) -> None:
        """Call nothing any more, and wait for the end of the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        join(self._thread)

    def _run(self) -> None:
        while True:
            with self._changed:
                # Of several that are due, the earliest; of one time, the one that was registered first.
                number = min(self._due, key=lambda n: (self._due[n][0], n), default=None)
                self._wakes = float("inf") if number is None else self._due[number][0]
                seconds = self._wakes - time.monotonic()
                if number is None or seconds > 0:
                    if self._stopped:
                        return
                    self._changed.wait(min(seconds, threading.TIMEOUT_MAX))
                    continue
                _, function = self._due.pop(number)
            function()
            del function  # and what the function holds


# Slots whose functions join collectives with one another, and whether they are still in step.

# How long the others may take to end as the first has: the same error comes to all of them at nearly the same time.
PATIENCE = 2.0


class Step(NamedTuple):
    """A call's number and its slots, for a slot whose function may join collectives."""

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
        call.future.add_done_callback(lambda future: None if future.exception() else self.forget([step]))
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
