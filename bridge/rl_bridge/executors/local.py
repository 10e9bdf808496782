"""One slot, in this process: what a single device needs, and what a debugger can step into."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from rl_bridge.executors.base import Arguments, Slot
from rl_bridge.executors.debug import terminal_debugger
from rl_bridge.executors.errors import WorkerDied
from rl_bridge.executors.host import Host
from rl_bridge.executors.steps import Together


class LocalExecutor:
    """Functions are called directly: an exception comes with its own type and traceback, and nothing can time out."""

    name = "local"

    def __init__(self, device: torch.device | str | None = None, *, debug: str | None = None) -> None:
        """``device``: the slot's. By default the first CUDA or ROCm device, else the CPU. ``debug``: see ``init``."""
        found = ("cuda:0" if torch.cuda.is_available() else "cpu") if device is None else str(device)
        self.slots = (Slot(0, device=found),)
        self.held: dict[int, list[str]] = {}
        self.stopped = False
        self._host = Host(0, found)
        # A function may call the executor again, from its own thread.
        self._one_at_a_time = threading.RLock()
        self._on_error = terminal_debugger(debug)

    def submit(
        self,
        function: Callable[..., Any],
        arguments: Arguments,
        *,
        what: str,
        timeout: float | None = None,
        together: Together | None = None,
    ) -> Future[dict[int, Any]]:
        """Run the function now; the future is done when this returns."""
        future: Future[dict[int, Any]] = Future()
        try:
            future.set_result(self.call(function, arguments, what=what, timeout=timeout))
        except Exception as error:
            future.set_exception(error)
        return future

    def call(
        self,
        function: Callable[..., Any],
        arguments: Arguments,
        *,
        what: str,
        timeout: float | None = None,
        together: Together | None = None,
    ) -> dict[int, Any]:
        """Run the function and return its result, or raise what it raises."""
        if set(arguments) != {0}:
            raise ValueError(f"executor 'local' has slot 0 alone, {what} names {sorted(arguments)}")
        if self.stopped:
            raise ValueError(f"{what}: this executor has been stopped")
        with self._one_at_a_time:
            try:
                return {0: self._host.run(function, arguments[0])}
            except Exception as error:
                if self._on_error is not None:
                    self._on_error(error)
                raise

    def together(self, slots: Sequence[int]) -> None:
        """None: a single process has nobody to wait for."""

    def require_in_step(self, together: Together, what: str) -> None:
        """It always is."""

    def part(self, together: Together) -> None:
        """Nothing to do."""

    def restart(self) -> None:
        """Forget the workers, so that engines can be built again."""
        self._host.workers.clear()
        self.held.clear()

    def dead(self) -> dict[int, WorkerDied]:
        """None: it is this process."""
        return {}

    def revive(self) -> list[int]:
        """Nothing to do."""
        return []

    def stop(self) -> None:
        """Forget the workers for good."""
        self.stopped = True
        self._host.workers.clear()
        self.held.clear()
