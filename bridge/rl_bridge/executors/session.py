"""The executor of this process: one slot in it, or what ``init`` was asked for."""

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, get_args

import torch

from rl_bridge.executors.debug import check_debugger, debugger
from rl_bridge.executors.executor import Arguments, Executor, Slot, Together, WorkerDied
from rl_bridge.executors.host import Host
from rl_bridge.executors.torchrun import TorchrunExecutor, under_torchrun

# One slot, in this process: what a single device needs, and what a debugger can step into.


class LocalExecutor:
    """Functions are called directly: an exception comes with its own type and traceback, and nothing can time out."""

    name = "local"

    def __init__(self, device: torch.device | str | None = None, *, debug: str | None = None) -> None:
        """``device``: the slot's. By default the first CUDA or ROCm device, else the CPU. ``debug``: see ``init``."""
        place = ("cuda:0" if torch.cuda.is_available() else "cpu") if device is None else str(device)
        self.slots = (Slot(0, device=place),)
        self.held: dict[int, list[str]] = {}
        self.stopped = False
        self._host = Host(0, place)
        # A function may call the executor again, from its own thread.
        self._one_at_a_time = threading.RLock()
        self._on_error = debugger(debug, 0)

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


# The executor of this process: made by ``init``, or when the first engine asks for it.

_current: list[Executor] = []

Name = Literal["local", "torchrun", "ray"]
_NAMES = "'local', 'torchrun' and 'ray'"


def init(
    executor: Name | None = None,
    *,
    workers: int | None = None,
    slots: Sequence[Mapping[str, float]] | None = None,
    address: str | None = None,
    timeout: float = 1800.0,
    start_timeout: float = 300.0,
    restarts: int = 0,
    log_level: str = "WARNING",
    debug: Literal["debugpy"] | None = None,
) -> Executor:
    """Make the executor that engines use by default.

    Under torchrun this returns in rank 0 alone: the other ranks serve it until it ends, and leave. A script that calls
    ``init()`` first runs as it is with ``python``, with ``torchrun``, and over Ray where the environment says
    ``RL_BRIDGE_EXECUTOR=ray``.

    Args:
        executor: "local" (this process), "torchrun" (the ranks of this job), or "ray". By default what
            ``RL_BRIDGE_EXECUTOR`` says, else "torchrun" in a rank of a job, else "local".
        workers: how many slots, by default ``RL_BRIDGE_WORKERS`` where the executor is the environment's, too. Under
            torchrun it must agree with ``--nproc_per_node``.
        slots: Ray only. Resources of each slot, such as ``[{"GPU": 1, "CPU": 4}, {"CPU": 8}]``; by default one slot for
            each GPU of the cluster.
        address: Ray only. The cluster to attach to, "auto" for the one on this machine; by default ``RAY_ADDRESS``.
            Without either a cluster is started, and ends with the executor.
        timeout: seconds that a call may take.
        start_timeout: seconds until all ranks have to be here, or all slots of a Ray cluster free. A cluster that was
            there before may grow meanwhile; one that is started here is refused what this machine does not have.
        restarts: Ray only. How often ``executor.restart()`` may start all workers again.
        log_level: of the logger "rl_bridge", and of Ray; "INFO" shows what the workers print under Ray too.
        debug: "debugpy" stops a worker where it raises, and waits for an editor on a port of its machine. Calls have
            no deadline then.

    Raises:
        ValueError: an option that the executor does not have, a variable of the environment that says none, or an
            executor is in use already.
    """
    logging.getLogger("rl_bridge").setLevel(log_level)
    if _current and not _current[0].stopped and (_current[0].name != "local" or any(_current[0].held.values())):
        raise ValueError(f"executor {_current[0].name!r} is in use; call its stop() before another init()")
    name, workers = (executor, workers) if executor else _started_with(workers)
    timeout = timeout if debug is None else float("inf")
    check_debugger(debug)
    if name != "ray":
        _refuse(name, slots=slots, address=address, restarts=restarts)
    match name:
        case "local":
            _require(name, workers, 1)
            instance: Executor = LocalExecutor(debug=debug)
        case "torchrun":
            instance = TorchrunExecutor(timeout=timeout, start_timeout=start_timeout, debug=debug)
            _require(name, workers, len(instance.slots))
        case "ray":
            try:
                from rl_bridge.executors.ray import RayExecutor
            except ModuleNotFoundError as error:
                raise ValueError("executor 'ray' needs Ray: pip install '.[ray]'") from error
            instance = RayExecutor(
                workers=workers,
                slots=slots,
                address=address,
                timeout=timeout,
                start_timeout=start_timeout,
                restarts=restarts,
                log_level=log_level,
                debug=debug,
            )
        case _:
            raise ValueError(f"there is no executor {name!r}; there are {_NAMES}")
    _current[:] = [instance]
    return instance


def current_executor() -> Executor:
    """The executor that engines use by default. Without ``init`` it is what ``init()`` makes."""
    if not _current or _current[0].stopped:
        init()
    return _current[0]


def _started_with(workers: int | None) -> tuple[str, int | None]:
    """The executor and the number of slots that this process was started with."""
    ranks = "torchrun" if under_torchrun() else "local"
    name, count = (os.environ.get(f"RL_BRIDGE_{word}", "").strip() for word in ("EXECUTOR", "WORKERS"))
    if name and name not in get_args(Name):
        raise ValueError(f"RL_BRIDGE_EXECUTOR={name} is no executor; there are {_NAMES}")
    if name and name != ranks and ranks == "torchrun":
        raise ValueError(
            f"RL_BRIDGE_EXECUTOR={name}, and torchrun started this process: each rank would begin an executor of its "
            f"own. Start the script with python, or without the variable"
        )
    if count and not (count.isascii() and count.isdigit() and int(count)):
        raise ValueError(f"RL_BRIDGE_WORKERS={count} is no whole number of at least 1")
    return name or ranks, workers if workers is not None or not count else int(count)


def _refuse(name: str, **options: object) -> None:
    for option, value in options.items():
        if value:
            raise ValueError(f"{option}={value!r} is for executor 'ray', and this is {name!r}")


def _require(name: str, workers: int | None, actual: int) -> None:
    if workers not in (None, actual):
        raise ValueError(
            f"{workers} workers were asked for (by workers= or RL_BRIDGE_WORKERS), and executor {name!r} has {actual}: "
            "Ray alone starts some (RL_BRIDGE_EXECUTOR=ray)"
        )
