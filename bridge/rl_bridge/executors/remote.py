"""The driver's end of a slot whose process is behind a channel."""

import contextlib
import itertools
import queue
import threading
import traceback
from collections.abc import Callable
from typing import Any

from rl_bridge.executors.channel import Channel
from rl_bridge.executors.errors import WorkerDied, worker_error
from rl_bridge.executors.futures import Call, join
from rl_bridge.executors.outbox import Outbox, Outgoing
from rl_bridge.executors.serving import CALL, ERROR, RESULT, STOP, WHERE, decode_error, encode_call, with_step
from rl_bridge.executors.steps import Step
from rl_bridge.executors.wire import Buffer, loads


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
        self._stopping, self._ended = False, threading.Event()
        self.death: WorkerDied | None = None
        self._thread = threading.Thread(target=self._receive, daemon=True, name=f"rl_bridge slot {slot}")
        self._thread.start()

    @staticmethod
    def encode(function: Callable[..., Any], arguments: tuple) -> list[Buffer]:
        """The bytes of a call."""
        return encode_call(function, arguments)

    def send(self, call: Call, encoded: list[Buffer], step: Step | None = None) -> Outgoing | None:
        """Send a call. To a process that is gone it fails at once."""
        with self._lock:
            death, number = self.death, next(self._numbers)
            if death is None:
                self._pending[number] = call
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
                    if (asked := self._places.get(number)) is not None:
                        asked.put(loads(parts))
                elif kind == STOP:
                    self._ended.set()
                else:
                    self._answer(kind, number, parts)
                del parts  # or it would live until the next frame
        except (EOFError, OSError) as error:
            self._gone(str(error))

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

    def _gone(self, how: str) -> None:
        if self._ended.is_set():
            how = "it was stopped"
        elif self._stopping:
            how = "it did not stop in time"
        else:
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
        asked = self._places[number] = queue.SimpleQueue()
        try:
            self._outbox.put(WHERE, number)
            return asked.get(timeout=timeout)
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
