"""An engine whose workers die and come back: with the current weights, and with what they had been asked."""

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Self

import torch

from rl_bridge.engines.base import Engine
from rl_bridge.engines.lifecycle import build_worker
from rl_bridge.executors.errors import WorkerDied
from rl_bridge.executors.host import Host

logger = logging.getLogger(__name__)
DEATHS = 3
"""Of workers in one call, before their end is the run's."""


class Revived(Engine):
    """Workers that hold nothing but weights of others: a dead one is made again where the executor can.

    A trainer's worker cannot come back so: its optimiser's state is gone with it.
    """

    bring_weights: Callable[[], int] | None = None
    """Repeats the last sync to here: the version that it brings. None: there was none."""
    brought: int | None = None
    """The version of that sync."""
    _threads: Mapping[int, int] = MappingProxyType({})
    keeps_requests = False
    """Whether workers hold requests between calls, as where rollouts run ahead: a new one would not have them."""
    revived = 0
    """Workers that were made again."""

    def asked_again(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """``call``, and the same call again after a worker died in it.

        Nothing of the first call was given out, and random numbers depend on a request's id alone: the answers are
        those that the dead worker would have given. Limits of time begin anew.

        Raises:
            WorkerDied: workers died again and again, or cannot be made again; with the reason.
        """
        for deaths in range(DEATHS + 1):
            try:
                return self.call(method, *args, **kwargs)
            except WorkerDied as death:
                if deaths == DEATHS:
                    raise
                logger.warning("%s; it is started again, and asked again", death)
                self._start_again(death)
        raise AssertionError("the loop returns or raises")

    def build(self, **wishes: Any) -> Self:
        """As ``Engine.build``; notes what a process has that the factory does not make."""
        super().build(**wishes)
        self._threads = dict(zip(self.slots, self.run(_threads_of), strict=True))
        return self

    def require_alive(self) -> None:
        """Make dead workers again; their weights are those of their factory until a sync.

        Raises:
            WorkerDied: that cannot be done: a dead slot held another engine's worker too, or the executor starts none.
        """
        executor = self.executor
        dead = executor.dead()
        mine = [slot for slot in dead if slot in self.slots]
        if not mine:
            return
        if self.keeps_requests:
            raise WorkerDied(
                f"{dead[mine[0]]}\nIt cannot be started again: requests that run ahead of training were in it; a run "
                "goes on with --resume"
            )
        if others := {slot: held for slot in dead if (held := executor.held.get(slot)) != [self.name]}:
            raise WorkerDied(
                f"{dead[mine[0]]}\nIt cannot be started again: slots {list(dead)} died, and with them engines that "
                f"cannot come back, {others}. A rollout in slots of its own can (--asynchronous.rollout-workers, "
                "not_colocate_with); a run goes on with --resume"
            )
        try:
            executor.revive()
        except NotImplementedError as error:
            raise WorkerDied(f"{dead[mine[0]]}\nIt cannot be started again: {error}") from error
        executor.call(_set_threads, {slot: (self._threads[slot],) for slot in mine}, what=f"{self.name}.build")
        arguments = {slot: self._build_arguments[slot] for slot in mine}
        executor.call(build_worker, arguments, what=f"{self.name}.build", timeout=self._timeout)
        self.revived += len(mine)

    def _start_again(self, death: WorkerDied) -> None:
        self.require_alive()
        try:
            version = None if self.bring_weights is None else self.bring_weights()
        except ValueError as error:
            raise WorkerDied(f"{death}\nIt was started again, and its weights are gone: {error}") from error
        if version != self.brought:
            raise WorkerDied(
                f"{death}\nIt was started again, and its weights are gone: the trainer has version {version}, "
                f"and requests that were begun with version {self.brought} cannot go on with that one"
            )


def _threads_of(host: Host) -> int:
    return torch.get_num_threads()


def _set_threads(host: Host, threads: int) -> None:
    torch.set_num_threads(threads)
