"""One Ray actor a slot. Ray finds the places and watches the processes; calls go straight to them, as under torchrun.

An actor's only method serves the driver until it stops. So a call costs what a socket costs (Ray's own takes ten times
as long), and the death of an actor is both the end of a stream and an error of Ray's that says why.
"""

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
import torch
from ray.exceptions import RayError  # pyright: ignore[reportMissingImports]
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group  # pyright: ignore[reportMissingImports]
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # pyright: ignore[reportMissingImports]

from rl_bridge.executors.channel import Address, Listener, connect
from rl_bridge.executors.debug import debugger
from rl_bridge.executors.driver import RemoteExecutor, Worker
from rl_bridge.executors.executor import DeadlineExceeded, Slot, WorkerDied
from rl_bridge.executors.host import (
    Host,
    join_world,
    leave_world,
    open_store,
    rejoin_world,
    use_gloo_interface,
)
from rl_bridge.executors.placement import Resources, bundles, lacking
from rl_bridge.executors.serving import serve
from rl_bridge.executors.slots import Remote

logger = logging.getLogger(__name__)


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
        """Reserve the slots and start their actors; the options are those of ``rl_bridge.init``.

        ``start_timeout``: seconds until all slots have to be free and all actors to be here.

        Raises:
            ValueError: the cluster that was started here does not have what the slots need; with what it has.
            DeadlineExceeded: what they need is in use or not there, or an actor did not connect.
            WorkerDied: an actor did not start.
        """
        self._own_cluster = _attach(address, workers, slots, log_level, debug)
        self._actors: dict[int, Any] = {}
        self._lives: dict[int, int] = {}
        self._group: PlacementGroup | None = None
        self._start_timeout, self._debug, self._restarts = start_timeout, debug, restarts
        try:
            self._bundles = bundles(workers, slots, ray.cluster_resources())
            self._group = _reserve(self._bundles, start_timeout, grows=not self._own_cluster)
            super().__init__(*self._start(timeout, range(len(self._bundles))), timeout=timeout)
            self._join()
        except BaseException:
            self._finish()
            raise

    def _start(self, timeout: float, indices: Sequence[int]) -> tuple[list[Slot], list[Worker]]:
        """Start an actor in these bundles, and wait until they have connected."""
        assert self._group is not None
        nodes = _nodes()
        own_address = ray.util.get_node_ip_address()
        self._single_node = set(nodes) == {own_address}
        listener = Listener("127.0.0.1" if self._single_node else own_address)
        references = {}
        try:
            address = ("127.0.0.1" if self._single_node else own_address, listener.port)
            for index in indices:
                bundle = self._bundles[index]
                actor = _actor_class(bundle, self._group, index).remote()
                self._actors[index] = actor
                gpu = bundle.get("GPU", 0) > 0
                # Longer than a call, whose deadline says more than a collective's.
                wait = min(timeout, 1e6) + 60
                references[index] = actor.serve.remote(
                    index,
                    address,
                    key=listener.key,
                    gpu=gpu,
                    group_timeout=wait,
                    start_timeout=self._start_timeout,
                    debug=self._debug,
                    path=sys.path,
                )

            def check() -> None:
                for index, reference in references.items():
                    if reason := _reason(reference, 0):
                        raise WorkerDied(f"the worker of slot {index} did not start: {reason}")

            connected = listener.collect(references, self._start_timeout, check)
        finally:
            listener.close()
        slots, workers = [], []
        for index in indices:
            channel, (node, device, pid) = connected[index]
            slots.append(Slot(index, node, device, self._bundles[index]))
            reference = references[index]
            name = f"actor, process {pid} on {node}"
            workers.append(Remote(index, channel, name, lambda r=reference: _reason(r, 5.0)))
        return slots, workers

    def _join(self) -> None:
        """Make the process group of all slots. Its store is the driver's, and outlives any worker."""
        world, timeout = len(self.slots), self._start_timeout
        address = "127.0.0.1" if self._single_node else ray.util.get_node_ip_address()
        self._store = open_store(address, world, timeout)
        everyone = dict.fromkeys((slot.index for slot in self.slots), (address, self._store.port, world, timeout))
        self.call(join_world, everyone, what="start", timeout=timeout)
        self._joined = everyone

    def revive(self) -> list[int]:
        """Start the actors of dead slots again, empty, beside those that live. Groups with them are made anew."""
        dead = [*self.dead()]
        if not dead:
            return []
        for slot in dead:
            self._workers[slot].close()
            ray.kill(self._actors.pop(slot))
            self._lives[slot] = self._lives.get(slot, 0) + 1
        slots, workers = self._start(self.timeout, dead)
        started = {slot.index: slot for slot in slots}
        everyone = [*({worker.slot: worker for worker in workers} | self._alive()).values()]
        self._replace([started.get(slot.index, slot) for slot in self.slots], everyone)
        joined = {slot: self._joined[slot] for slot in dead}
        self.call(rejoin_world, joined, what="revive", timeout=self._start_timeout)
        arguments = dict.fromkeys((slot.index for slot in self.slots), (dict(self._lives),))
        self.call(Host.count_lives, arguments, what="revive", timeout=self._start_timeout)
        return dead

    def restart(self) -> None:
        """End every actor and start new ones in the same places; calls under way fail with ``WorkerDied``.

        Raises:
            RuntimeError: that has been done as often as ``init(restarts=...)`` allows.
        """
        if self._restarts < 1:
            raise RuntimeError("no restart is left: init(restarts=...) says how many there are")
        self._restarts -= 1
        for worker in self._workers.values():
            worker.close()
        self._end_actors()
        assert self._group is not None
        if not self._group.wait(self._start_timeout):
            raise DeadlineExceeded(f"restart: {_no_room(self._bundles, self._start_timeout)}")
        self.held.clear()
        self._steps.clear()
        self._lives.clear()
        self._replace(*self._start(self.timeout, range(len(self._bundles))))
        self._join()

    def _end_actors(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors.clear()

    def _finish(self) -> None:
        if ray.is_initialized():
            self._end_actors()
            if self._group is not None:
                remove_placement_group(self._group)
                self._group = None
            if self._own_cluster:
                ray.shutdown()


class _Actor:
    """The process of a slot."""

    def serve(
        self,
        slot: int,
        address: Address,
        *,
        key: bytes,
        gpu: bool,
        group_timeout: float,
        start_timeout: float,
        debug: str | None,
        path: list[str],
    ) -> None:
        """Work for the driver until it stops."""
        # What the driver can import, its workers can: on this machine, or where the folders have the same names.
        sys.path += [entry for entry in path if entry not in sys.path and os.path.isdir(entry or ".")]
        device = torch.device("cuda", 0) if gpu and torch.cuda.is_available() else torch.device("cpu")
        if address[0] != "127.0.0.1":
            use_gloo_interface(address[0])
        host = Host(slot, device, group_timeout=group_timeout)
        greeting = (ray.util.get_node_ip_address(), str(device), os.getpid())
        on_error = debugger(debug, slot)
        serve(host, connect([address], key, slot, greeting, start_timeout), on_error)
        host.clear()
        leave_world()


def _actor_class(bundle: Resources, group: PlacementGroup, index: int) -> Any:
    custom = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU", "memory")}
    return ray.remote(_Actor).options(  # type: ignore[attr-defined]
        num_cpus=bundle.get("CPU", 0),
        num_gpus=bundle.get("GPU", 0),
        memory=bundle.get("memory"),
        resources=custom,
        max_restarts=0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
    )


def _attach(
    address: str | None, workers: int | None, slots: Sequence[Resources] | None, log_level: str, debug: str | None
) -> bool:
    """Connect to a cluster; whether it is one that this has started, and has to end."""
    if ray.is_initialized():
        return False
    address = address or os.environ.get("RAY_ADDRESS")
    # Where to find a debugger is printed by the workers.
    level = logging.getLevelNamesMapping()[log_level]
    chatty = level <= logging.INFO or debug is not None
    if address:
        ray.init(address=address, logging_level=level, log_to_driver=chatty)
        return False
    needed = workers or 1 if slots is None else sum(slot.get("CPU", 0) for slot in slots)
    with warnings.catch_warnings():
        # Where JAX has run it warns of every fork. Ray's processes become other programs at once.
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        ray.init(
            address="local",
            num_cpus=max(int(needed), os.cpu_count() or 1),
            logging_level=level,
            log_to_driver=chatty,
            include_dashboard=False,
            # Data does not go through the object store.
            object_store_memory=128 * 2**20,
            # Every worker is an actor of a slot. One that Ray starts in advance outlives a killed driver if Ray's
            # servers die while the worker looks for them: then it looks on for a minute.
            _system_config={"prestart_worker_first_driver": False},
        )
    return True


def _nodes() -> dict[str, Resources]:
    """All resources of each living node, by its address."""
    return {node["NodeManagerAddress"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def _reserve(bundles: Sequence[dict[str, float]], timeout: float, *, grows: bool) -> PlacementGroup:
    if trouble := lacking(bundles, _nodes()):
        # A cluster of somebody else's may start nodes when they are asked for, and does not say so.
        if not grows:
            raise ValueError(trouble)
        logger.warning("%s; this waits %g s for the cluster to grow (start_timeout)", trouble, timeout)
    group = placement_group(list(bundles), strategy="PACK")
    if not group.wait(timeout):
        trouble = _no_room(bundles, timeout)
        remove_placement_group(group)
        raise DeadlineExceeded(f"start: {trouble}")
    return group


def _no_room(bundles: Sequence[Resources], timeout: float) -> str:
    needs = ", ".join(map(str, bundles))
    return f"no room for slots of {needs} in {timeout:g} s; free is {ray.available_resources()}"


def _reason(reference: Any, timeout: float) -> str:
    """Why an actor's method has ended with an error; empty if it has not, or not yet."""
    ended, _ = ray.wait([reference], timeout=timeout)
    try:
        ray.get(ended)
    except RayError as error:
        return str(error)
    return ""
