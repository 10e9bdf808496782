"""Many requests of a reward to one server, several at a time."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from rl_bridge import http
from rl_bridge.http import Askers, NoReply
from rl_bridge.rewards.errors import RowFailed

__all__ = ["NoReply", "Server"]
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Server(http.Server):
    """A server that scores items."""

    largest: int | None = 1 << 26

    def each(self, ask: Callable[[Item, threading.Event], float], items: Sequence[Item]) -> list[float]:
        """``ask`` of every item, several at a time, with what tells it that nobody waits; the results in order.

        Raises:
            RowFailed: the first item, in their order, that got no reply. The others that wait are not asked any more.
                Neither this nor an interrupt waits for a request that is under way.
        """
        stop = threading.Event()
        with Askers(self.concurrency, "reward request") as askers:
            futures = [askers.submit(partial(ask, item, stop)) for item in items]
            found = []
            try:
                for place, future in enumerate(futures):
                    try:
                        found.append(future.result())
                    except NoReply as error:
                        raise RowFailed(place, str(error)) from error
            finally:
                stop.set()
        return found
