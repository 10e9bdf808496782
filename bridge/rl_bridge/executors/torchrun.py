"""The ranks of a torchrun job: rank 0 runs the script and a worker, every other rank is a worker and nothing else.

The same script starts with ``python`` or with ``torchrun``. In the other ranks ``init`` does not return: they serve
rank 0 until it stops or ends, and leave with exit code 0.
"""

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist

from rl_bridge.executors.channel import Address, Channel, Listener, connect
from rl_bridge.executors.debug import debugger
from rl_bridge.executors.driver import RemoteExecutor, Worker
from rl_bridge.executors.executor import DeadlineExceeded, Slot, WorkerDied, WorkerError
from rl_bridge.executors.host import Host, backend, job_store, leave_world, own_addresses, use_gloo_interface
from rl_bridge.executors.serving import OnError, serve
from rl_bridge.executors.slots import Own, Remote

_KEY = "rl_bridge/driver"
_OF_A_RANK = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NUMBERS = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
"""Variable → the least that it can be."""
PATIENCE = 10.0
"""Seconds without the other ranks until a line says who is waited for."""
NOTICED = 2.0
"""Seconds in which a rank's death is noticed, behind torchrun's signal to the others."""
logger = logging.getLogger(__name__)


def under_torchrun() -> bool:
    """Whether this process is a rank of a job, by its environment.

    Raises:
        ValueError: the environment is that of a rank in part, or has a number that no rank has.
    """
    variables = {name: os.environ[name] for name in (*_OF_A_RANK, *_NUMBERS) if os.environ.get(name)}
    if variables.keys().isdisjoint(("RANK", "WORLD_SIZE")):  # others use an address of their own, too
        return False
    wrong = [f"{name} is not set" for name in _OF_A_RANK if name not in variables]
    wrong += [
        f"{name}={variables[name]} is no whole number of at least {least}"
        for name, least in _NUMBERS.items()
        if name in variables
        and not (variables[name].isascii() and variables[name].isdigit() and int(variables[name]) >= least)
    ]
    if not wrong:
        rank, world, port = (int(variables[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        wrong += [f"RANK={rank} is none of the ranks 0 to {world - 1} of WORLD_SIZE={world}"] if rank >= world else []
        wrong += [f"MASTER_PORT={port} is above 65535"] if port > 65535 else []
    if wrong:
        had = " ".join(f"{name}={value}" for name, value in variables.items())
        raise ValueError(
            f"the environment has {had}, as a rank of a torchrun job has, but {', '.join(wrong)}: start all ranks with "
            "`torchrun --nproc_per_node=N`, which sets them all; for one process unset them, or give --executor local"
        )
    return True


@contextmanager
def _told_while_waiting(rank: int, world: int, seconds: float) -> Iterator[None]:
    """A line for the user if the other ranks are not there soon: a job of one shell waits for nobody."""
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    words = f"rank {rank} waits for all {world} ranks of its job at {where} (WORLD_SIZE={world}), up to {seconds:g} s"
    timer = threading.Timer(PATIENCE, logger.warning, [words])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class TorchrunExecutor(RemoteExecutor):
    """Slots are the job's ranks."""

    name = "torchrun"

    def __init__(self, *, timeout: float = 1800.0, start_timeout: float = 300.0, debug: str | None = None) -> None:
        """Join the other ranks. In rank 0 this returns; in the others it ends the process when rank 0 has stopped.

        ``timeout``: seconds a call may take. ``start_timeout``: seconds until all ranks have to be here. ``debug``: see
        ``rl_bridge.init``.

        Raises:
            ValueError: this process is no rank of a job.
            DeadlineExceeded: a rank did not come.
        """
        if not under_torchrun():
            raise ValueError("executor 'torchrun' needs torchrun: torchrun --nproc_per_node=N script.py")
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        device = _device()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if os.environ.get("LOCAL_WORLD_SIZE") != str(world):
            use_gloo_interface(_towards())
        if not dist.is_initialized():
            with _told_while_waiting(rank, world, start_timeout):
                dist.init_process_group(backend(device), timeout=timedelta(seconds=start_timeout))
        # Longer than a call, whose deadline says more than a collective's.
        host = Host(rank, device, group_timeout=min(timeout, 1e6) + 60)
        on_error = debugger(debug, rank)
        if rank > 0:
            _serve(host, world, start_timeout, on_error)
        slots = [Slot(0, _node(), str(device), _resources(device))]
        workers: list[Worker] = [Own(host, on_error)]
        for rank, (channel, (node, device_name, resources, pid)) in _workers(world, start_timeout):
            slots.append(Slot(rank, node, device_name, resources))
            workers.append(Remote(rank, channel, f"rank {rank}, process {pid} on {node}"))
        super().__init__(slots, workers, timeout=timeout)
        self._host = host
        self._warned = False
        # torchrun sends SIGTERM to all ranks when one has died. A handler that the script has installed stays.
        if self._in_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminated)

    @staticmethod
    def _in_main_thread() -> bool:
        return threading.current_thread() is threading.main_thread()

    def restart(self) -> None:
        """Not here.

        Raises:
            NotImplementedError: ranks are torchrun's to restart.
        """
        raise NotImplementedError("torchrun starts ranks again, all of them: torchrun --max-restarts=N ...")

    def revive(self) -> list[int]:
        """Not where a rank has died: torchrun ends the others then.

        Raises:
            NotImplementedError: ranks are torchrun's to restart.
        """
        return self.restart() or [] if self.dead() else []

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        """Raise the cause in the main thread, unless it is being raised already."""
        if self._exiting:  # there is nobody whom a cause could be raised to, and the end is near
            return
        # On a busy machine the signal comes before the end of the dead rank's channel has been read.
        deadline = time.monotonic() + NOTICED
        while not (deaths := self._deaths()) and time.monotonic() < deadline:
            time.sleep(0.02)
        if not deaths:
            raise SystemExit(128 + number)
        if _under_way(sys.exc_info()[1]):
            return
        if not self._warned:
            # A call that the dead worker had a part in raises the cause by itself: let it.
            self._warned = True
            timer = threading.Timer(0.5, signal.pthread_kill, (threading.main_thread().ident, signal.SIGTERM))
            timer.daemon = True
            timer.start()
            return
        raise WorkerDied("; ".join(str(death) for death in deaths))

    def _deaths(self) -> list[WorkerDied]:
        return [w.death for w in self._workers.values() if isinstance(w, Remote) and w.death is not None]

    def _stuck(self) -> bool:
        return not self._workers[0].ended(0)

    def _finish(self) -> None:
        # From here on there is nobody whom a cause could be raised to.
        if self._in_main_thread() and signal.getsignal(signal.SIGTERM) == self._terminated:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if not self._stuck():
            self._host.clear()
            leave_world()


def _under_way(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, WorkerDied | WorkerError | DeadlineExceeded):
            return True
        error = error.__cause__ or error.__context__
    return False


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


def _resources(device: torch.device) -> dict[str, float]:
    """CPUs and GPU of a rank; ``RL_BRIDGE_RESOURCES='{"fast_disk": 1}'`` in a node's environment adds what it says."""
    resources = {"CPU": (os.cpu_count() or 1) / int(os.environ.get("LOCAL_WORLD_SIZE", 1))}
    if device.type == "cuda":
        resources |= {"GPU": 1.0, f"accelerator_type:{torch.cuda.get_device_name(device)}": 1.0}
    return resources | json.loads(os.environ.get("RL_BRIDGE_RESOURCES", "{}"))


def _node() -> str:
    return own_addresses(_towards())[0]


def _towards() -> str | None:
    """The machine that the others have to reach, if it is not this one by its loopback."""
    master = os.environ["MASTER_ADDR"]
    return None if master in ("localhost", "127.0.0.1") else master


def _workers(world: int, timeout: float) -> list[tuple[int, tuple[Channel, tuple]]]:
    """Wait for the other ranks, in rank 0. The store tells them where, and the key; then it is deleted there."""
    single_node = os.environ.get("LOCAL_WORLD_SIZE") == str(world)
    listener = Listener("127.0.0.1" if single_node else "")
    master = os.environ["MASTER_ADDR"]
    hosts = ["127.0.0.1"] if single_node else list(dict.fromkeys([*own_addresses(master), master]))
    addresses: list[Address] = [(host, listener.port) for host in hosts]
    store = job_store()
    store.set(_KEY, json.dumps((addresses, listener.key.hex())))
    try:
        return sorted(listener.collect(range(1, world), timeout).items())
    finally:
        store.delete_key(_KEY)
        listener.close()


def _serve(host: Host, world: int, timeout: float, on_error: OnError | None) -> None:
    """The life of a rank other than 0."""
    # They reach every rank, and what to do about them is the driver's to say: it may want to save first. They are not
    # ignored but handled by nothing, because what the worker starts would inherit the former.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    store = job_store()
    store.wait([_KEY], timedelta(seconds=timeout))
    addresses, key = json.loads(store.get(_KEY))
    greeting = (_node(), str(host.device), _resources(host.device), os.getpid())
    channel = connect([tuple(a) for a in addresses], bytes.fromhex(key), host.slot, greeting, timeout)
    serve(host, channel, on_error)
    host.clear()
    leave_world()
    sys.exit(0)
