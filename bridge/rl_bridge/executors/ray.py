"""One Ray actor a slot. Ray finds the places and watches the processes; calls go straight to them, as under torchrun.

An actor's only method serves the driver until it stops. So a call costs what a socket costs (Ray's own takes ten times
as long), and the death of an actor is both the end of the stream and an error of Ray that says why.
"""

import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import ray
import torch
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl_bridge.executors.base import Slot
from rl_bridge.executors.channel import Listener, connect
from rl_bridge.executors.debug import debugger
from rl_bridge.executors.driver import RemoteExecutor
from rl_bridge.executors.host import Host
from rl_bridge.executors.remote import Remote
from rl_bridge.executors.serving import serve
from rl_bridge.executors.world import join_world, leave_world, open_store

Resources = Mapping[str, float]


class RayExecutor(RemoteExecutor):
    """Slots are bundles of one placement group, each with one actor that has the whole bundle."""

    name = "ray"

    def __init__(
        self,
        *,
        workers: int | None = None,
        slots: Sequence[Resources] | None = None,
        address: str | None = None,
        timeout: float = 1800.0,
        start_timeout: float = 300.0,
        restarts: int = 0,
        log_level: str = "WARNING",
        debug: str | None = None,
    ) -> None:
        """Attach to the cluster at ``address`` (or ``RAY_ADDRESS``; "auto": the one on this machine), or start one.

        ``slots``: resources of each slot, such as ``[{"GPU": 1, "CPU": 4}, {"CPU": 8}]``. By default one slot for each
        GPU of the cluster; ``workers`` says how many, and without GPUs they are slots of one CPU. ``restarts``: how
        often ``restart`` may be called.

        Raises:
            ValueError: the cluster does not have what the slots need; with what it has.
            DeadlineExceeded: what they need is there but in use, or an actor did not start, for ``start_timeout``.
        """
        self._own_cluster = _attach(address, workers, slots, log_level)
        self._group: PlacementGroup | None = None
        self._actors: list[Any] = []
        self._restarts_left, self._start_timeout, self._debug = restarts, start_timeout, debug
        try:
            self._bundles = bundles(workers, slots, ray.cluster_resources())
            self._group = _reserve(self._bundles, start_timeout)
            found, ends = self._start(timeout)
        except BaseException:
            self._finish()
            raise
        super().__init__(found, ends, timeout=timeout)
        self._join()
