"""The process group of all slots."""

import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from rl_bridge.executors.host import Host


def backend(device: torch.device) -> str:
    """Backends of a process that has this device: gloo for host memory, nccl (on ROCm rccl) for the device's."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def open_store(host: Host, address: str, world: int, timeout: float) -> int:
    """Keep the job's store in this slot, at this address and no other; its port. Runs in slot 0."""
    with socket.create_server((address, 0), backlog=1024) as door:
        host.store = dist.TCPStore(  # type: ignore[attr-defined]
            address,
            door.getsockname()[1],
            world,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
            master_listen_fd=door.detach(),
        )
    return host.store.port


def join_world(host: Host, address: str, port: int, world: int, timeout: float, group_timeout: float) -> None:
    """Join the other slots in one process group; every slot runs this at the same time."""
    store = getattr(host, "store", None) or dist.TCPStore(address, port, world, timeout=timedelta(seconds=timeout))
    dist.init_process_group(
        backend(host.device),
        store=store,
        rank=host.slot,
        world_size=world,
        timeout=timedelta(seconds=group_timeout),
    )


def leave_world() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
