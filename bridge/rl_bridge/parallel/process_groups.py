"""The mesh of an engine's workers, made of process groups that only these workers have to join."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from rl_bridge.executors.host import Host, alone
from rl_bridge.parallel.mesh import AXES, Mesh

MODEL_DIMS = ("replicate", "fsdp", "tensor")


def make_mesh(host: Host, slots: Sequence[int], layout: Mesh) -> DeviceMesh | None:
    """A mesh with the dimensions "replicate", "shard", "sequence", "tensor" over the slots; None for one slot.

    rank = ((replicate · shards + shard) · sequences + sequence) · tensors + tensor: tensor ranks are neighbours. All
    slots of the engine must call the function at the same time. No other process takes part.

    Args:
        host: of this process, whose slot is one of the slots.
        slots: the engine's slots by rank, ascending.
        layout: how many ranks each dimension has.

    Raises:
        ValueError: sizes whose product is not the number of slots, slots that do not ascend, a host outside the slots.
    """
    if layout.size != len(slots):
        raise ValueError(f"{layout} needs {layout.size} workers, got {len(slots)} slots")
    if list(slots) != sorted(set(slots)) or host.slot not in slots:
        # torch sorts the ranks of a group, and a tensor is put together in the order of its group.
        raise ValueError(f"slots must ascend and contain this process' slot {host.slot}, got {list(slots)}")
    if layout.size == 1:
        return None
    by_slot = torch.tensor(slots).view(layout.shape)
    everyone = host.group(tuple(slots))
    assert everyone is not None
    rank_of = dict(zip(slots, dist.get_process_group_ranks(everyone), strict=True))

    def mesh_of(grid: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
        place = (grid == host.slot).nonzero()[0].tolist()
        groups: list[ProcessGroup] = []
        for dim in range(len(names)):
            line = grid[tuple(slice(None) if d == dim else i for d, i in enumerate(place))].tolist()
            groups.append(host.group(tuple(line)) or alone())
        ranks = torch.tensor([rank_of[slot] for slot in grid.flatten().tolist()]).view(grid.shape)
        return DeviceMesh.from_group(groups, host.device.type, ranks, mesh_dim_names=names)

    mesh = mesh_of(by_slot, AXES)
    # FSDP and tensor parallelism of one parameter must be dimensions of one mesh, and FSDP takes one dimension.
    mesh.of_model = mesh_of(by_slot.flatten(1, 2), MODEL_DIMS)  # pyright: ignore[reportAttributeAccessIssue]
    return mesh


def model_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of ``make_mesh`` as parameters see it: "replicate", "fsdp" (shard × sequence), "tensor"."""
    parameter_mesh = getattr(mesh, "of_model", None)
    if parameter_mesh is None:
        raise ValueError(f"{mesh} was not made by make_mesh")
    return parameter_mesh


def one_rank_mesh(device_type: str) -> DeviceMesh:
    """A model's mesh of this process alone. Where there are no process groups yet, a world of one is begun."""
    if not dist.is_initialized():
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group("gloo" if device_type == "cpu" else None, store=store, rank=0, world_size=1)
    ranks = torch.tensor([dist.get_rank()]).view(1, 1, 1)
    return DeviceMesh.from_group([alone()] * 3, device_type, ranks, mesh_dim_names=MODEL_DIMS)
