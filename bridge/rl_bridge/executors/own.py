"""A slot in the driver's own process: its functions run in one thread, so that the driver never hangs in one."""

import queue
import threading
import traceback
from collections.abc import Callable
from typing import Any

from rl_bridge.executors.errors import WorkerDied, worker_error
from rl_bridge.executors.futures import Call
from rl_bridge.executors.host import Host
from rl_bridge.executors.serving import OnError, use_device
from rl_bridge.executors.stacks import where
from rl_bridge.executors.steps import Step
from rl_bridge.executors.wire import refuse_dtensors

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
