"""The process group of all slots."""

import socket
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d

__all__ = [
    "TCPStore",
    "alone",
    "backend",
    "job_store",
    "join_world",
    "leave_world",
    "named_group",
    "open_store",
    "rejoin_world",
]


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
    for group, known in world.pg_names.items():
        if known == name:
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


def join_world(rank: int, world: int, store: TCPStore, device: torch.device, timeout: float) -> None:
    """Join the other processes of the job; all of them do so at the same time."""
    dist.init_process_group(
        backend(device), store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )


def rejoin_world(rank: int, world: int, store: TCPStore, timeout: float) -> None:
    """Take the place of a process that is gone, without the others.

    The group of all cannot be joined again: the others have theirs. Here it is torch's fake one, through which nothing
    may be sent; it has the rank and the store that ``named_group`` makes real groups with.
    """
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

    dist.init_process_group("fake", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout))


def leave_world() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
