"""One event loop of this process for all coroutines of the user's: a client or a semaphore belongs to one loop."""

import asyncio
import atexit
import os
import pickle
import threading
from collections.abc import Awaitable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from rl_bridge.common.user_files import only_the_users_code

Outcome = tuple[Any, BaseException | None]
"""A result, or the error in its place."""
PATIENCE = 5.0
"""Seconds for a loop with a call past its limit to answer before another loop takes its place."""
Futures = set["Future[Outcome]"]


class _Process:
    """The loop of this process: in a daemon thread from the first coroutine on, or one that a thread runs itself."""

    lock = threading.Lock()
    loop: asyncio.AbstractEventLoop | None = None
    thread: threading.Thread | None = None
    runner: asyncio.Runner | None = None
    """In a process that only calls the user's functions, in its main thread: signals arrive there."""


_here = _Process()


def run(awaitable: Awaitable[Any], seconds: float | None = None, among: Futures | None = None) -> Any:
    """The result of a coroutine. Any thread may call this, also one whose own event loop runs.

    ``among`` holds the coroutine while it runs: ``cancel`` ends it from another thread.

    Raises:
        TimeoutError: no result within ``seconds``.
        BaseException: whatever the coroutine raises, SystemExit too.
    """
    value, error = _outcome(awaitable, seconds, among)
    if error is not None:
        raise error
    return value


def run_together(awaitables: Sequence[Awaitable[Any]]) -> list[Outcome]:
    """The results of coroutines that run at once, in order.

    >>> [value for value, error in run_together([asyncio.sleep(0.01, "first"), asyncio.sleep(0, "second")])]
    ['first', 'second']
    """

    async def together() -> list[Outcome]:
        return await asyncio.gather(*map(_carried, awaitables))

    return run(together())


def cancel(futures: Futures) -> None:
    """Cancel coroutines that are ``among`` these."""
    for future in list(futures):
        future.cancel()


@contextmanager
def of_this_thread() -> Iterator[None]:
    """While the block runs, this thread runs the process's coroutines: the main thread, which may handle signals."""
    with asyncio.Runner() as runner:
        _here.runner = runner
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


def _outcome(awaitable: Awaitable[Any], seconds: float | None, among: Futures | None) -> Outcome:
    if _here.runner is not None:
        _here.loop = _here.runner.get_loop()
        return _here.runner.run(_carried(awaitable))
    loop = _background()
    if _running_here() is loop:  # A coroutine that waited here for another one would stop them both.
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(asyncio.run, _carried(awaitable)).result(seconds)
    future = asyncio.run_coroutine_threadsafe(_carried(awaitable), loop)
    futures = set() if among is None else among
    futures.add(future)
    try:
        return future.result(seconds)
    except (TimeoutError, CancelledError):
        _leave_behind_if_stuck(loop)
        raise
    finally:
        future.cancel()
        futures.discard(future)


def _running_here() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _background() -> asyncio.AbstractEventLoop:
    with _here.lock:
        if _here.loop is None:
            _here.loop = asyncio.new_event_loop()
            _here.thread = threading.Thread(target=_serve, args=(_here.loop,), daemon=True, name="user's coroutines")
            _here.thread.start()
        return _here.loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped, then cancel its remaining tasks."""
    stopped: list[bool] = []
    with only_the_users_code():
        while not stopped:
            try:
                loop.run_forever()
                stopped.append(True)
            except (SystemExit, KeyboardInterrupt):  # of a task that nobody waits for
                continue
        loop.run_until_complete(_cancel_others())
        loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _leave_behind_if_stuck(loop: asyncio.AbstractEventLoop) -> None:
    """A coroutine that computes or sleeps without ``await`` stops its loop: others get another one."""
    answers = threading.Event()
    loop.call_soon_threadsafe(answers.set)
    if not answers.wait(PATIENCE):
        _stop(loop)


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    with _here.lock:
        if _here.loop is loop:
            _here.loop = None
            loop.call_soon_threadsafe(loop.stop)


def _close() -> None:
    """At the end of the process: what coroutines do behind ``finally`` is done."""
    if _here.loop is not None and _here.thread is not None and _here.runner is None:
        _stop(_here.loop)
        _here.thread.join(PATIENCE)


def _forked() -> None:
    """A forked child has the loop and not its thread."""
    _here.lock, _here.loop, _here.thread, _here.runner = threading.Lock(), None, None, None


atexit.register(_close)
os.register_at_fork(after_in_child=_forked)
