"""Calls of environments beside the sampler: many at once, each with a time limit."""

import asyncio
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from inspect import isawaitable
from typing import Any, NamedTuple, Protocol, Self

Work = Callable[[], Any | Awaitable[Any]]
WAKE = -1
"""The number of no call."""


class Finished(NamedTuple):
    """A call that returned or failed."""

    key: Hashable
    value: Any
    error: BaseException | None


class Steps(Protocol):
    """Where environments' calls run. A scheduler of simulated time has the same two methods."""

    def start(self, key: Hashable, work: Work) -> None:
        """Call ``work`` soon; ``finished`` tells its result under ``key``."""
        ...

    def finished(self, *, wait: bool, seconds: float | None = None) -> list[Finished]:
        """What finished since the last call; with ``wait`` at least one, if any is under way, or for so long."""
        ...


class _Call(NamedTuple):
    key: Hashable
    deadline: float


class ThreadedSteps:
    """Each call in a thread; coroutines in one event loop beside them.

    A thread cannot be stopped: one that goes past its limit is left behind, its place is given to the next call, and
    what it returns later counts for nothing.
    """

    def __init__(self, *, limit: float, at_once: int = 64) -> None:
        """``limit``: seconds of one call. ``at_once``: calls that run at the same time; others wait their turn.

        Raises:
            ValueError: a limit or a number that is not positive.
        """
        if not (limit > 0 and at_once >= 1):
            raise ValueError(f"limit must be > 0 s and at_once ≥ 1, got {limit} and {at_once}")
        self._limit, self._at_once = limit, at_once
        self._waiting: deque[tuple[Hashable, Work, int]] = deque()
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count()
        self._results: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()
        self._woken = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the event loop; calls that wait for their turn are never made."""
        self._waiting.clear()
        with self._lock:
            self._closed = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._loop = None

    def start(self, key: Hashable, work: Work, *, calls: int = 1) -> None:
        """Call ``work`` in a thread of its own, in turn. It has the time of so many ``calls``."""
        self._waiting.append((key, work, calls))
        self._begin()

    def wake(self) -> None:
        """From any thread: let ``finished`` return, if only with nothing."""
        self._results.put((WAKE, None, None))

    def awaited(self, value: Any) -> Any:
        """For a ``work`` of several calls: what one of them returned, or what that is a promise of."""
        return self._awaited(value) if isawaitable(value) else value

    def finished(self, *, wait: bool, seconds: float | None = None) -> list[Finished]:
        """Results in the order they came; a call past its limit is a ``TimeoutError``."""
        found: list[Finished] = []
        until = float("inf") if seconds is None else time.monotonic() + seconds
        while True:
            found += self._collect()
            self._begin()
            woken, self._woken = self._woken, False
            if found or woken or not wait or not self._calls or time.monotonic() >= until:
                return found
            nearest = min(until, *(call.deadline for call in self._calls.values()))
            try:
                result = self._results.get(timeout=max(0.0, nearest - time.monotonic()))
            except queue.Empty:
                continue
            found += self._take(*result)

    def _begin(self) -> None:
        while self._waiting and len(self._calls) < self._at_once:
            key, work, calls = self._waiting.popleft()
            number = next(self._numbers)
            self._calls[number] = _Call(key, time.monotonic() + self._limit * calls)
            threading.Thread(target=self._run, args=(number, work), daemon=True, name="environment").start()

    def _run(self, number: int, work: Work) -> None:
        value, failure = None, None
        try:
            value = self.awaited(work())
        except BaseException as error:  # sys.exit() in an environment is its failure too
            failure = error
        self._results.put((number, value, failure))

    def _awaited(self, value: Awaitable[Any]) -> Any:
        future = asyncio.run_coroutine_threadsafe(_coroutine(value), self._event_loop())
        try:
            # ``finished`` gives the call up at its limit; this thread ends soon after.
            return future.result(self._limit + 1)
        finally:
            future.cancel()

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._closed:
                raise RuntimeError("the conversations of this environment are over")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_serve, args=(self._loop,), daemon=True, name="environments").start()
            return self._loop

    def _collect(self) -> list[Finished]:
        found: list[Finished] = []
        while not self._results.empty():
            found += self._take(*self._results.get())
        now = time.monotonic()
        for number, call in list(self._calls.items()):
            if call.deadline <= now:
                del self._calls[number]
                found.append(Finished(call.key, None, TimeoutError(f"took longer than {self._limit:g} s")))
        return found

    def _take(self, number: int, value: Any, error: BaseException | None) -> list[Finished]:
        self._woken |= number == WAKE
        call = self._calls.pop(number, None)
        return [] if call is None else [Finished(call.key, value, error)]


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped, then cancel what is left in it."""
    loop.run_forever()
    loop.run_until_complete(_cancel_others())
    loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _coroutine(value: Awaitable[Any]) -> Any:
    try:
        return await value
    except (SystemExit, KeyboardInterrupt) as error:  # would end the event loop of all the others
        raise RuntimeError(f"the environment raised {error!r}") from error
