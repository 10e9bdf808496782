"""The first of several workers, alone in this process: its peers answer nothing, and what they would send is not there.

The process group is torch's fake one, through which every collective ends at once. Sizes and memory of the first worker
are those of a real run; the numbers of what was gathered or summed are not.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from rl_bridge.engines.lifecycle import call_worker, worker_of
from rl_bridge.engines.results import declared
from rl_bridge.engines.splitting import row_count
from rl_bridge.executors import LocalExecutor
from rl_bridge.executors.base import Arguments, Slot
from rl_bridge.executors.host import Host
from rl_bridge.executors.steps import Together


@contextmanager
def world_of(workers: int) -> Iterator[None]:
    """A process group of so many workers around this one, none for a single worker; it is gone at the end.

    Raises:
        ValueError: the process is in a group already.
    """
    before = dist.is_initialized()
    if before and workers > 1:
        raise ValueError(
            f"a plan of {workers} workers has a process group of its own, and this process is in one of "
            f"{dist.get_world_size()} already"
        )
    hook = sys.excepthook
    try:
        if workers > 1:
            from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

            store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
            dist.init_process_group("fake", store=store, rank=0, world_size=workers)
        yield
    finally:
        if dist.is_initialized() and not before:
            dist.destroy_process_group()
            sys.excepthook = hook  # torch's own puts the rank in front of each line


def executor_of(workers: int) -> LocalExecutor:
    """Where the workers of a plan live; of several, within ``world_of``, the first one alone."""
    return LocalExecutor("cpu") if workers == 1 else FirstWorker(workers)


class FirstWorker(LocalExecutor):
    """An executor of several slots, of which the first alone does anything: its results are taken for those of all."""

    def __init__(self, workers: int) -> None:
        """Made within ``world_of(workers)``."""
        super().__init__("cpu")
        self.slots = tuple(Slot(slot) for slot in range(workers))
        self._host = _Host(0, "cpu")

    def call(
        self,
        function: Callable[..., Any],
        arguments: Arguments,
        *,
        what: str,
        timeout: float | None = None,
        together: Together | None = None,
    ) -> dict[int, Any]:
        """Run the function in the first slot, and answer for all."""
        [result] = super().call(function, {0: arguments[0]}, what=what, timeout=timeout).values()
        if function is not call_worker:
            return dict.fromkeys(arguments, result)
        name, method, *_ = arguments[0]
        if declared(getattr(worker_of(self._host, name).module, method)) != "rows":
            return dict.fromkeys(arguments, result)
        return {slot: _with_rows(result, _rows(given)) for slot, given in arguments.items()}


class _Host(Host):
    """Its groups are fake, as the world is."""

    def group(self, slots: Sequence[int], backend: str | None = None, *, purpose: str = "") -> Any:
        return super().group(slots, "fake", purpose=purpose)


def _rows(given: tuple[Any, ...]) -> int:
    """Of what a worker was called with."""
    _, _, args, kwargs, _ = given
    return row_count((*args, *kwargs.values())[0])


def _with_rows(result: Any, rows: int) -> Any:
    """A result for so many rows, of which the first one's stands for all."""
    if isinstance(result, torch.Tensor):
        return result[:1].expand(rows if len(result) else 0, *result.shape[1:])
    if hasattr(result, "_fields"):
        return type(result)(*(None if value is None else _with_rows(value, rows) for value in result))
    assert isinstance(result, tuple), f"rows of a {type(result).__name__}"
    return tuple(_with_rows(value, rows) for value in result)
