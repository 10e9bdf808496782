"""Event loops of this process for coroutines of the user's: a client or a semaphore belongs to one loop.

Rewards have one and environments have one: what a coroutine of one kind does without ``await`` stops none of the other.
"""

import asyncio
import atexit
import contextlib
import os
import pickle
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Literal

from rl_bridge.common.unawaited import drop
from rl_bridge.common.user_files import only_the_users_code

Kind = Literal["reward", "environment"]
Outcome = tuple[Any, BaseException | None]
"""A result, or the error in its place."""
PATIENCE = 5.0
"""Seconds for a loop with a call that was given up to answer before another loop takes its place."""
_this_thread = threading.local()


class _Call:
    """A coroutine that a thread waits for. It begins once, in the loop where it was submitted last."""

    def __init__(self, awaitable: Awaitable[Any]) -> None:
        self.outcome: Future[Outcome] = Future()
        self._awaitable, self._lock = awaitable, threading.Lock()
        self._loop: _Loop | None = None
        self._task: asyncio.Task[Outcome] | None = None

    @property
    def begun(self) -> bool:
        """Whether the coroutine runs or has run."""
        return self._task is not None

    def submit(self, loop: "_Loop") -> None:
        """Begin the coroutine in this loop, unless it has begun in another."""
        with self._lock:
            if not self.begun and not self.outcome.done():
                self._loop = loop
                loop.waiting.add(self)
                loop.events.call_soon_threadsafe(self._begin, loop)

    def give_up(self) -> None:
        """Cancel the coroutine, if it has no outcome yet. Any thread may call this."""
        with self._lock:
            if self.outcome.done():
                return
            self.outcome.cancel()
            if self._loop is not None:
                self._loop.doubtful.add(self)
            if self._loop is not None and self._task is not None:
                self._loop.events.call_soon_threadsafe(self._task.cancel)
            else:
                drop(self._awaitable)

    def _begin(self, loop: "_Loop") -> None:
        with self._lock:
            loop.waiting.discard(self)
            loop.doubtful.discard(self)
            if self._loop is loop and not self.outcome.done():
                self._task = loop.events.create_task(_carried(self._awaitable))
                self._task.add_done_callback(self._end)

    def _end(self, task: "asyncio.Task[Outcome]") -> None:
        with self._lock:
            assert self._loop is not None
            self._loop.doubtful.discard(self)
            if not self.outcome.done():
                self.outcome.set_result((None, asyncio.CancelledError()) if task.cancelled() else task.result())


Calls = set[_Call]


class _Loop:
    """An event loop in a daemon thread. One that is left behind ends when nothing runs in it any more."""

    def __init__(self) -> None:
        self.events = asyncio.new_event_loop()
        self.waiting: Calls = set()
        """Calls that have not begun."""
        self.doubtful: Calls = set()
        """Calls that were given up and have not ended: one of them may stop the loop."""
        _here.loops.append(self)
        threading.Thread(target=self._serve, daemon=True, name="user's coroutines").start()

    def answers(self) -> bool:
        """Whether the loop goes on within ``PATIENCE``. A loop that has ended does not."""
        answer = threading.Event()
        try:
            self.events.call_soon_threadsafe(answer.set)
        except RuntimeError:
            return False
        return answer.wait(PATIENCE)

    def leave(self) -> None:
        """Let what runs here run to its end, and end the loop then."""
        self.events.call_soon_threadsafe(self.events.stop)

    def cancel_all(self) -> threading.Event:
        """Cancel what runs here; the event is set when all of it has ended."""
        ended = threading.Event()

        def cancel() -> None:
            self.events.create_task(_cancel_others()).add_done_callback(lambda _: ended.set())

        try:
            self.events.call_soon_threadsafe(cancel)
        except RuntimeError:  # The loop has ended.
            ended.set()
        return ended

    def _serve(self) -> None:
        _this_thread.serves = True
        with only_the_users_code():
            self._through(self.events.run_forever)
            while self._through(self._run_out):
                pass
        self.events.close()
        _here.loops.remove(self)

    def _through(self, run: Callable[[], Any]) -> Any:
        while True:
            try:
                return run()
            except (SystemExit, KeyboardInterrupt):  # of a task that nobody waits for
                continue

    def _run_out(self) -> bool:
        self.events.run_until_complete(asyncio.sleep(0))  # Callers of what has just ended get the outcome.
        others = asyncio.all_tasks(self.events)
        if others:
            self.events.run_until_complete(asyncio.wait(others))
        return bool(others)


class _Loops:
    """The loop of one kind of coroutines, from the first on."""

    def __init__(self) -> None:
        self.loop: _Loop | None = None
        self._lock = threading.Lock()

    def submit(self, call: _Call) -> None:
        """Begin the coroutine in a loop that goes on."""
        self.mend()
        with self._lock:
            if self.loop is None:
                self.loop = _Loop()
            call.submit(self.loop)

    def mend(self, *, doubtful: bool = False) -> None:
        """Replace a loop with a call that was given up, if the loop does not answer.

        A coroutine that computes or sleeps without ``await`` stops its loop. Calls that wait there begin in the next.
        """
        loop = self.loop
        if loop is None or not (doubtful or loop.doubtful) or loop.answers():
            return
        with self._lock:
            if self.loop is loop:
                self.loop = _Loop()
                for call in list(loop.waiting):
                    call.submit(self.loop)
                loop.leave()

    def outcome(self, call: _Call, seconds: float | None) -> Outcome:
        """The outcome of a call that was submitted.

        Raises:
            TimeoutError: none within ``seconds``.
            CancelledError: the call was given up.
        """
        until = float("inf") if seconds is None else time.monotonic() + seconds
        try:
            while not call.begun and until - time.monotonic() > PATIENCE:
                with contextlib.suppress(TimeoutError):
                    return call.outcome.result(PATIENCE)
                self.mend()
            return call.outcome.result(None if seconds is None else max(0.0, until - time.monotonic()))
        except (TimeoutError, CancelledError):
            call.give_up()
            self.mend(doubtful=True)
            raise


class _Process:
    """The loops of this process: each in a daemon thread, or one that a thread runs itself."""

    def __init__(self) -> None:
        self.kinds: dict[Kind, _Loops] = {"reward": _Loops(), "environment": _Loops()}
        self.loops: list[_Loop] = []
        """All loops in threads, those left behind too."""
        self.runner: asyncio.Runner | None = None
        """In a process that only calls the user's functions, in its main thread: signals arrive there."""
        self.loop: asyncio.AbstractEventLoop | None = None
        """The runner's, from the first coroutine on."""
        self.progress: Callable[[], None] = lambda: None


_here = _Process()


def run(awaitable: Awaitable[Any], kind: Kind, seconds: float | None = None, among: Calls | None = None) -> Any:
    """The result of a coroutine. Any thread may call this, also one whose own event loop runs.

    ``among`` holds the coroutine while it runs: ``cancel`` ends it from another thread.

    Raises:
        TimeoutError: no result within ``seconds``.
        BaseException: whatever the coroutine raises, SystemExit too.
    """
    value, error = _outcome(awaitable, kind, seconds, among)
    if error is not None:
        raise error
    return value


def run_in_order(awaitables: Sequence[Awaitable[Any]], kind: Kind) -> Iterator[Outcome]:
    """The results of coroutines that run at once, in order, each as soon as it and those before it are there.

    Coroutines that nobody waits for any more are cancelled.

    >>> together = run_in_order([asyncio.sleep(0.01, "first"), asyncio.sleep(0, "second")], "reward")
    >>> [value for value, error in together]
    ['first', 'second']
    """
    if _here.runner is not None:
        yield from _in_order_here(awaitables, _here.runner)
    elif _serves_here():

        async def together() -> list[Outcome]:
            return await asyncio.gather(*map(_carried, awaitables))

        yield from run(together(), kind)
    else:
        calls = [_Call(awaitable) for awaitable in awaitables]
        try:
            for call in calls:
                _here.kinds[kind].submit(call)
            for call in calls:
                yield _here.kinds[kind].outcome(call, None)
        finally:
            for call in calls:
                call.give_up()


def _in_order_here(awaitables: Sequence[Awaitable[Any]], runner: asyncio.Runner) -> Iterator[Outcome]:
    _here.loop = loop = runner.get_loop()
    tasks = [loop.create_task(_carried(awaitable)) for awaitable in awaitables]
    progress = _here.progress

    def tell(_: Any) -> None:
        progress()

    async def ended(task: "asyncio.Task[Outcome]") -> Outcome:
        return await task

    for task in tasks:
        task.add_done_callback(tell)
    try:
        for task in tasks:
            yield runner.run(ended(task))
    finally:
        for task in tasks:
            task.remove_done_callback(tell)
            task.cancel()


def cancel(calls: Calls) -> None:
    """Cancel coroutines that are ``among`` these."""
    for call in list(calls):
        call.give_up()


@contextmanager
def of_this_thread(progress: Callable[[], None] = lambda: None) -> Iterator[None]:
    """While the block runs, this thread runs the process's coroutines: the main thread, which may handle signals.

    ``progress`` is called whenever one of the coroutines of ``run_in_order`` has ended, in whatever order.
    """
    with asyncio.Runner() as runner:
        _here.runner, _here.progress = runner, progress
        try:
            yield
        finally:
            _here.runner = _here.loop = None


def in_main_thread(*, coroutine: bool) -> bool:
    """Whether a function of the user's, or a ``coroutine``, that this thread asks for runs in a main thread."""
    main = threading.current_thread() is threading.main_thread()
    return main and (not coroutine or _here.runner is not None)


def received(connection: Connection) -> Any:
    """The next message of the connection, in a process whose main thread runs the coroutines: others go on meanwhile.

    Raises:
        EOFError: the other end is closed.
    """
    if _here.runner is not None and _here.loop is not None:
        _here.runner.run(_readable(connection.fileno()))
    return pickle.loads(connection.recv_bytes())


async def _readable(descriptor: int) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)


async def _carried(awaitable: Awaitable[Any]) -> Outcome:
    """SystemExit would end the loop of all others; an error of one is no error of those beside it."""
    try:
        return await awaitable, None
    except BaseException as error:
        return None, error


def _outcome(awaitable: Awaitable[Any], kind: Kind, seconds: float | None, among: Calls | None) -> Outcome:
    if _here.runner is not None:
        _here.loop = _here.runner.get_loop()
        return _here.runner.run(_carried(awaitable))
    if _serves_here():  # A coroutine that waited here for another one would stop them both.
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(asyncio.run, _carried(awaitable)).result(seconds)
    call, calls, loops = _Call(awaitable), set() if among is None else among, _here.kinds[kind]
    calls.add(call)
    try:
        loops.submit(call)
        return loops.outcome(call, seconds)
    finally:
        call.give_up()
        calls.discard(call)


def _serves_here() -> bool:
    return getattr(_this_thread, "serves", False)


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _close() -> None:
    """At the end of the process: what coroutines do behind ``finally`` is done."""
    endings, until = [loop.cancel_all() for loop in list(_here.loops)], time.monotonic() + PATIENCE
    for ended in endings:
        ended.wait(max(0.0, until - time.monotonic()))


def _forked() -> None:
    """A forked child has the loops and not their threads."""
    global _here
    _here = _Process()
    _this_thread.serves = False


atexit.register(_close)
os.register_at_fork(after_in_child=_forked)
