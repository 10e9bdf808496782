"""The contents of a slot's process: the workers of engines, the process group of all slots, and their addresses."""

import contextlib
import os
import socket
import struct
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d

from rl_bridge.executors.calls import Step, concerns, not_run
from rl_bridge.executors.executor import Progress
from rl_bridge.memory.garbage_collection import collect_all

# Addresses at which other machines reach this one. They are of IPv4 throughout the executors.

_SIOCGIFADDR = 0x8915  # Linux: the address of an interface


def own_addresses(towards: str | None = None) -> list[str]:
    """IPv4 addresses of this machine that another one may reach, the likeliest first. Nothing is sent.

    ``towards``: a machine of the job; the address on the way to it comes first.
    """
    addresses = []
    for target in (towards, "10.255.255.255"):
        if target is None:
            continue
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                addresses.append(probe.getsockname()[0])
        except OSError:  # no route, or no such name
            continue
    with contextlib.suppress(OSError):  # a name that nobody knows
        addresses.append(socket.gethostbyname(socket.gethostname()))
    addresses = [address for address in dict.fromkeys(addresses) if not address.startswith("127.")]
    return addresses or ["127.0.0.1"]


def use_gloo_interface(towards: str | None = None) -> None:
    """Let gloo use the interface that other machines reach, unless the user has chosen one.

    Left alone gloo asks for the address of this machine's name, and on Debian that is 127.0.1.1: another machine which
    connects to it finds itself. ``towards``: as for ``own_addresses``.
    """
    interface = interface_of(own_addresses(towards)[0])
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def interface_of(address: str) -> str | None:
    """Name of the interface that has this address; None where the system does not say."""
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return None


# The process group of all slots.


def backend(device: torch.device) -> str:
    """Backends of a process that has this device: gloo for host memory, nccl (on ROCm rccl) for the device's."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def named_group(ranks: Sequence[int], backend: str, name: str, timeout: timedelta) -> dist.ProcessGroup:
    """A process group over ``ranks``, in this order, made by its members alone.

    ``torch.distributed.new_group(use_local_synchronization=True)`` would sort the ranks, and find the others by a name
    that holds how many groups this process has: two processes with different numbers of groups wait for each other
    for ever. Here the name is the caller's, the same in all members.
    """
    group, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        list(ranks).index(dist.get_rank()),
        list(ranks),
        backend,
        distributed_c10d._get_default_store(),
        distributed_c10d.GroupName(name),
        timeout=timeout,
    )
    assert isinstance(group, dist.ProcessGroup)
    distributed_c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
    return group


def alone() -> dist.ProcessGroup:
    """The group of this process, for axes of size 1: made once, because each takes descriptors and threads."""
    name = f"rl_bridge/alone/{dist.get_rank()}"
    world = distributed_c10d._world
    for group, group_name in world.pg_names.items():
        if group_name == name:
            return group
    everyone = world.default_pg
    assert everyone is not None
    return named_group([dist.get_rank()], world.pg_map[everyone][0], name, timedelta(seconds=60))


def job_store() -> Store:
    """The store that all processes of the job share, in a corner of its own."""
    return PrefixStore("rl_bridge", distributed_c10d._get_default_store())


def open_store(address: str, world: int, timeout: float) -> TCPStore:
    """The store of a job of ``world`` processes, in this process, at this address and no other."""
    with socket.create_server((address, 0), backlog=1024) as door:
        return TCPStore(
            address,
            door.getsockname()[1],
            world,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
            master_listen_fd=door.detach(),
        )


def join_world(host: "Host", address: str, port: int, world: int, timeout: float) -> None:
    """Join the other processes of the job, whose store is at that address; all of them do so at the same time."""
    _begin_world(backend(host.device), host, TCPStore(address, port, world), world, timeout)


def rejoin_world(host: "Host", address: str, port: int, world: int, timeout: float) -> None:
    """Take the place of a process that is gone, without the others.

    The group of all cannot be joined again: the others have theirs. Here it is torch's fake one, through which nothing
    may be sent; it has the rank and the store that ``named_group`` makes real groups with.
    """
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

    _begin_world("fake", host, TCPStore(address, port, world), world, timeout)


def _begin_world(kind: str, host: "Host", store: TCPStore, world: int, timeout: float) -> None:
    dist.init_process_group(kind, store=store, rank=host.slot, world_size=world, timeout=timedelta(seconds=timeout))


def leave_world() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


# The workers of the engines that share the slot.


class Host:
    """The workers in one slot, its device, and the process groups that the slot belongs to."""

    def __init__(self, slot: int, device: torch.device | str = "cpu", *, group_timeout: float = 600.0) -> None:
        """``group_timeout``: seconds after which a collective that a peer does not join fails."""
        self.slot = slot
        self.device = torch.device(device)
        self.workers: dict[str, Any] = {}
        self.observer: Callable[[Callable[..., Any], tuple[Any, ...]], Any] | None = None
        """A function that runs others in place of ``run``, such as a memory profiler that measures around them."""
        self._timeout = timedelta(seconds=group_timeout)
        self._groups: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = {}
        self._lives: dict[int, int] = {}
        self._failed: dict[int, tuple[Step, str]] = {}
        self._renewed: list[tuple[int, tuple[int, ...]]] = []

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...], step: Step | None = None) -> Any:
        """``function(self, *arguments)``, which an observer may look at.

        Raises:
            OutOfStep: of a ``step`` that comes after one that failed here.
        """
        for failed, error in self._failed.values():
            if step is not None and concerns(failed, step.together):
                raise not_run(step.what, failed, error)
        return function(self, *arguments) if self.observer is None else self.observer(function, arguments)

    def group(self, slots: Sequence[int], backend: str | None = None, *, purpose: str = "") -> dist.ProcessGroup | None:
        """The process group over ``slots``, in this order; None for a single slot. All of them call it, none else.

        A group is made once: two calls with the same slots, backend and ``purpose`` share one.

        Raises:
            ValueError: this slot is not among ``slots``, or the process has not joined the others.
        """
        members = tuple(slots)
        if self.slot not in members:
            raise ValueError(f"slot {self.slot} asked for a process group of slots {list(members)}")
        if len(members) == 1:
            return None
        if not dist.is_initialized():
            raise ValueError(f"slots {list(members)} need a process group, and this executor has a single process")
        backend = backend or ("nccl" if self.device.type == "cuda" else "gloo")
        key = (members, f"{backend} {purpose}")
        if key not in self._groups:
            lives = [(slot, self._lives[slot]) for slot in members if slot in self._lives]
            if not purpose:
                lives += [number for number, slots in self._renewed if {*members} <= {*slots}]
            name = f"rl_bridge/{key}/{lives}" if lives else f"rl_bridge/{key}"
            self._groups[key] = named_group(members, backend, name, self._timeout)
        return self._groups[key]

    def count_lives(self, lives: dict[int, int]) -> None:
        """``lives``: how often the process of a slot was started again. Groups with one that was are made anew."""
        begun = {slot for slot, count in lives.items() if self._lives.get(slot) != count}
        self._groups = {key: group for key, group in self._groups.items() if not begun & {*key[0]}}
        self._lives = dict(lives)

    def progress(self, step: Step | None, error: BaseException, *, completed: bool = False) -> Progress | None:
        """Note that a step failed here, and how far it came."""
        if step is None:
            return None
        if not completed:
            self._failed[step.number] = step, f"{type(error).__name__}: {error}"
        groups = self._among(step.together.slots)
        counts = {str(key): _joined(self._groups[key]) for key in groups}
        return Progress(completed, _place(error), counts)

    def forgive(self, step: Step) -> None:
        """The step failed alike in all its slots: they go on."""
        self._failed.pop(step.number, None)

    def renew(self, step: Step) -> None:
        """Let go of the process groups among the slots of a failed step: later ones are made anew.

        A peer that waits in a collective of such a group gets an error once nobody here has the group any more. So the
        workers that may have it go too: the driver refuses to call them.
        """
        slots = step.together.slots
        self._renewed.append((step.number, slots))
        self.workers = {name: worker for name, worker in self.workers.items() if not _meets(worker, slots)}
        for key in self._among(slots):
            dist.destroy_process_group(self._groups.pop(key))
        collect_all()

    def _among(self, slots: Sequence[int]) -> list[tuple[tuple[int, ...], str]]:
        """Groups of engines among these slots: one with a purpose of its own is not used in calls of an engine."""
        return [key for key in self._groups if {*key[0]} <= {*slots} and not key[1].split(" ", 1)[1]]

    def clear(self) -> None:
        """Let go of the workers and the process groups."""
        self.workers.clear()
        self._groups.clear()


def _meets(worker: Any, slots: Sequence[int]) -> bool:
    """Whether an engine's worker joins collectives with another one in these slots."""
    return getattr(worker, "group", None) is not None and len({*worker.slots} & {*slots}) > 1


def _joined(group: Any) -> int:
    """Collectives of a group that this process has joined."""
    return group._get_sequence_number_for_group()


def _place(error: BaseException) -> str:
    """File and line that raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
