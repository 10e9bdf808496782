"""The driver's end of slots: a slot in the driver's process, and one behind a channel that nobody may read."""

import contextlib
import itertools
import queue
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from rl_bridge.executors.calls import Call, Step, join
from rl_bridge.executors.channel import Buffer, Channel, dumps, loads, refuse_dtensors, views_of
from rl_bridge.executors.executor import WorkerDied, worker_error
from rl_bridge.executors.host import Host
from rl_bridge.executors.serving import (
    CALL,
    ERROR,
    RESULT,
    STOP,
    WHERE,
    OnError,
    decode_error,
    use_device,
    where,
    with_step,
)

# A slot in the driver's own process: its functions run in one thread, so that the driver never hangs in one.

Task = tuple[Call, Callable[..., Any], tuple[Any, ...], Step | None]


class Own:
    """Arguments and results are not copied: the driver and the worker hold the same objects."""

    death: WorkerDied | None = None
    """It lives as long as the driver."""

    def __init__(self, host: Host, on_error: OnError | None = None) -> None:
        """Start the thread."""
        self.slot = host.slot
        self._host, self._on_error = host, on_error
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._pending: list[Call] = []
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"rl_bridge slot {host.slot}")
        self._thread.start()

    @staticmethod
    def encode(function: Callable[..., Any], arguments: tuple) -> tuple[Callable[..., Any], tuple]:
        """Nothing to do."""
        return function, arguments

    def send(self, call: Call, encoded: tuple[Callable[..., Any], tuple], step: Step | None = None) -> None:
        """Put a call behind those before."""
        with self._lock:
            self._pending.append(call)
        self._tasks.put((call, *encoded, step))

    def _run(self) -> None:
        use_device(self._host)
        while (task := self._tasks.get()) is not None:
            self._do(*task)
            del task  # or its arguments would live until the next one

    def _do(self, call: Call, function: Callable[..., Any], arguments: tuple[Any, ...], step: Step | None) -> None:
        returned = False
        try:
            result = self._host.run(function, arguments, step)
            returned = True
            refuse_dtensors(result)
        except BaseException as error:
            if self._on_error is not None:
                self._on_error(error)
            progress, text = self._host.progress(step, error, completed=returned), traceback.format_exc()
            _let_go(error)
            self._over(call)
            call.fail(self.slot, worker_error(self.slot, call.what, error, text, progress))
        else:
            self._over(call)
            call.succeed(self.slot, result)

    def _over(self, call: Call) -> None:
        with self._lock:
            self._pending.remove(call)

    def unanswered(self) -> list[Call]:
        """Calls sent and not answered, in order."""
        with self._lock:
            return list(self._pending)

    def where(self, timeout: float) -> str:
        """The stack of the thread."""
        return where(self._thread.ident)

    def ask_to_stop(self) -> None:
        """End the thread after what it has been sent."""
        self._tasks.put(None)

    def ended(self, timeout: float) -> bool:
        """Whether it has ended, after waiting for that."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self) -> None:
        """A thread cannot be ended: at exit the process ends around it."""


def _let_go(error: BaseException | None) -> None:
    """Drop what the frames of an error hold, which outlives its call: a worker, and the process groups it waits in."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


# Messages to a process that may read nothing: the driver does not wait.


class Outgoing:
    """A frame on its way. Until it is settled the buffers that it was made of must not change."""

    def __init__(self, views: list[memoryview], lock: threading.Lock) -> None:
        self.size = sum(map(len, views))
        self.settled = threading.Event()
        self._views, self._lock = views, lock

    @property
    def left(self) -> int:
        """Bytes that the process' machine has not taken."""
        with self._lock:
            return sum(map(len, self._views))

    def let_go(self) -> None:
        """Copy what is left to be sent: the caller does not wait any longer, and may change the buffers."""
        with self._lock:
            self._views[:] = [memoryview(bytes(view)) for view in self._views]
        self.settled.set()


class Outbox:
    """Frames in the order of ``put``. What does not go at once is sent by a thread, which starts with the first such.

    A frame is not given up in its middle: what comes after could not be read.
    """

    def __init__(self, channel: Channel, name: str) -> None:
        """``name`` is the thread's. Nobody else sends through the channel."""
        self._channel, self._name = channel, name
        self._frames: deque[tuple[Outgoing, list[memoryview]]] = deque()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._closed = False

    def put(self, kind: int, number: int, parts: Sequence[Buffer] = ()) -> Outgoing:
        """Send one frame, or what goes of it at once.

        Raises:
            OSError: the connection has ended.
        """
        views = views_of(kind, number, parts)
        frame = Outgoing(views, self._lock)
        with self._lock:
            if self._closed:
                raise OSError("connection closed")
            if not self._frames:
                self._channel.send_some(views)
            if not views:
                frame.settled.set()
                return frame
            self._frames.append((frame, views))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name=self._name)
                self._thread.start()
            self._changed.notify()
        return frame

    def stuck(self) -> Outgoing | None:
        """The frame that the process has not read to its end."""
        with self._lock:
            return self._frames[0][0] if self._frames else None

    def close(self) -> None:
        """Send nothing any more; the channel is closed before."""
        self._end()
        join(self._thread)

    def _end(self) -> None:
        with self._lock:
            self._closed = True
            frames = [frame for frame, _ in self._frames]
            self._frames.clear()
            self._changed.notify()
        for frame in frames:
            frame.settled.set()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._frames and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
            self._channel.wait_for_room()
            try:
                self._send()
            except OSError:
                self._channel.close()  # the receiving thread gets the end of the stream
                self._end()
                return

    def _send(self) -> None:
        with self._lock:
            while self._frames:
                frame, views = self._frames[0]
                self._channel.send_some(views)
                if views:
                    return
                self._frames.popleft()
                frame.settled.set()


# The driver's end of a slot whose process is behind a channel.


class Remote:
    """A process behind a channel."""

    def __init__(self, slot: int, channel: Channel, name: str, explain: Callable[[], str] = lambda: "") -> None:
        """``name`` is for messages. ``explain`` may know more about the death of the process; it may take seconds."""
        self.slot = slot
        self._channel, self._name, self._explain = channel, name, explain
        self._outbox = Outbox(channel, f"rl_bridge to slot {slot}")
        self._pending: dict[int, Call] = {}
        self._places: dict[int, queue.SimpleQueue[str]] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._stopping, self._gone, self._ended = False, False, threading.Event()
        self.death: WorkerDied | None = None
        self._thread = threading.Thread(target=self._receive, daemon=True, name=f"rl_bridge slot {slot}")
        self._thread.start()

    @staticmethod
    def encode(function: Callable[..., Any], arguments: tuple) -> list[Buffer]:
        """The bytes of a call."""
        return dumps((function, arguments))

    def send(self, call: Call, encoded: list[Buffer], step: Step | None = None) -> Outgoing | None:
        """Send a call. To a process that is gone it fails at once."""
        with self._lock:
            death, number = self.death, next(self._numbers)
            if death is None:
                self._pending[number] = call
                if self._gone:
                    call.lose(self.slot)
        if death is not None:
            call.fail(self.slot, _again(death))
            return None
        try:
            return self._outbox.put(CALL, number, with_step(encoded, step))
        except OSError:
            self._channel.close()  # the receiving thread gets the end of the stream, and fails all pending calls
            return None

    def _receive(self) -> None:
        try:
            while True:
                kind, number, parts = self._channel.receive()
                if kind == WHERE:
                    if (replies := self._places.get(number)) is not None:
                        replies.put(loads(parts))
                elif kind == STOP:
                    self._ended.set()
                else:
                    self._answer(kind, number, parts)
                del parts  # or it would live until the next frame
        except (EOFError, OSError) as error:
            self._lost(str(error))

    def _answer(self, kind: int, number: int, parts: Any) -> None:
        with self._lock:
            call = self._pending.pop(number)
        try:
            if kind == RESULT:
                call.succeed(self.slot, loads(parts))
            else:
                assert kind == ERROR
                call.fail(self.slot, worker_error(self.slot, call.what, *decode_error(parts)))
        except Exception as error:  # a result whose class the driver does not have
            unread = TypeError(f"the driver cannot read the result: {error}")
            call.fail(self.slot, worker_error(self.slot, call.what, unread, traceback.format_exc()))

    def _lost(self, how: str) -> None:
        with self._lock:
            self._gone = True
            for call in self._pending.values():
                call.lose(self.slot)
        if self._ended.is_set():
            how = "it was stopped"
        elif self._stopping:
            how = "it did not stop in time"
        else:
            with contextlib.suppress(Exception):  # a library that has ended cannot say why; the calls end all the same
                how = self._explain() or how
        with self._lock:
            pending, self._pending = list(self._pending.values()), {}
            running = f" during {pending[0].what}" if pending else ""
            self.death = WorkerDied(f"the worker of slot {self.slot} ({self._name}) ended{running}: {how}")
        self._ended.set()
        for call in pending:
            call.fail(self.slot, _again(self.death))

    def unanswered(self) -> list[Call]:
        """Calls sent and not answered, in order."""
        with self._lock:
            return list(self._pending.values())

    def where(self, timeout: float) -> str:
        """Ask the listening thread of the process."""
        with self._lock:
            death, number = self.death, next(self._numbers)
        if death is not None:
            return f"    {death}"
        if (stuck := self._outbox.stuck()) is not None:
            return (
                f"    it does not read: {stuck.left / 1e6:.1f} of the {stuck.size / 1e6:.1f} MB of a call are not taken"
            )
        replies = self._places[number] = queue.SimpleQueue()
        try:
            self._outbox.put(WHERE, number)
            return replies.get(timeout=timeout)
        except (OSError, queue.Empty):
            return f"    it does not say within {timeout:g} s"
        finally:
            del self._places[number]

    def ask_to_stop(self) -> None:
        """Ask the process to leave after what it has been sent."""
        with contextlib.suppress(OSError):  # it is gone
            self._outbox.put(STOP, 0)

    def ended(self, timeout: float) -> bool:
        """Whether it has ended, after waiting for that."""
        return self._ended.wait(timeout)

    def close(self) -> None:
        """Hang up: a process that has not left ends itself."""
        self._stopping = True
        self._channel.close()
        self._outbox.close()
        join(self._thread)


def _again(death: WorkerDied) -> WorkerDied:
    """An exception of its own for each call: raising one adds to its traceback."""
    return WorkerDied(*death.args)
