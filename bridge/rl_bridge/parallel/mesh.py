"""The mesh of an engine's workers: its four axes, process groups along them, and gradient norms over all workers."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from rl_bridge.common.argument_kinds import check_options
from rl_bridge.common.terminal import given
from rl_bridge.executors.host import Host, alone

# How the workers of an engine are arranged: four axes, each of size 1 unless asked for.

AXES = ("replicate", "shard", "sequence", "tensor")
"""The axes of a mesh, slowest first: neighbours in ``tensor`` have neighbouring ranks."""


class Place(NamedTuple):
    """Where a rank stands on each axis."""

    replicate: int
    shard: int
    sequence: int
    tensor: int


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Sizes of the axes.

    ``replicate``: copies of the model, each with rows of its own. ``shard``: parameters and optimiser cut by FSDP2,
    each rank with rows of its own. ``sequence``: tokens of the same rows cut by ring attention. ``tensor``: matrices
    cut by tensor parallelism, with the same rows on every rank.

    >>> Mesh(shard=2, tensor=2).size
    4
    >>> Mesh(shard=2, tensor=2).place(3)
    Place(replicate=0, shard=1, sequence=0, tensor=1)
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    sequence: int = 1

    def __post_init__(self) -> None:
        """Refuse an axis without a rank."""
        check_options(self)
        if min(self.shape) < 1:
            raise ValueError(f"every axis of a mesh has at least one rank, got {given(self, *AXES)}")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sizes in the order of ``AXES``."""
        return self.replicate, self.shard, self.sequence, self.tensor

    @property
    def size(self) -> int:
        """Number of workers."""
        return self.replicate * self.shard * self.sequence * self.tensor

    @property
    def data_parts(self) -> int:
        """Shares that the rows of a batch are split into."""
        return self.replicate * self.shard

    def place(self, rank: int) -> Place:
        """Where ``rank`` stands."""
        rank, tensor = divmod(rank, self.tensor)
        rank, sequence = divmod(rank, self.sequence)
        replicate, shard = divmod(rank, self.shard)
        return Place(replicate, shard, sequence, tensor)

    def data_rank(self, rank: int) -> int:
        """Which share of the rows ``rank`` works on."""
        return rank // (self.sequence * self.tensor)

    def speakers(self) -> list[int]:
        """One rank of each share of rows: those whose results are joined."""
        return list(range(0, self.size, self.sequence * self.tensor))

    def token_speakers(self) -> list[int]:
        """One rank of each share of tokens: those whose results are joined where the columns were cut, too."""
        return list(range(0, self.size, self.tensor))


# The mesh of an engine's workers, made of process groups that only these workers have to join.

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


# The gradient norm of a model spread over workers, and numbers that all workers must agree on.


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float, mesh: DeviceMesh | None) -> Tensor:
    """Scale all gradients so that their norm is at most ``max_norm``; returns the norm before, equal on all workers.

    Every element counts once: shards are summed over their workers, copies and tied parameters are not. The norm is 0
    where no parameter has a gradient. All workers of the mesh call the function.

    >>> weight = nn.Parameter(torch.tensor([1.0, 1.0]))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> clip_grad_norm([weight], 1.0, None), weight.grad
    (tensor(5.), tensor([0.6000, 0.8000]))
    """
    unique = list(dict.fromkeys(parameters))
    if not unique:
        raise ValueError("there are no parameters whose gradients could be clipped")
    # One list for each set of dimensions that parameters are cut over: their sums are completed over these.
    gradients: dict[tuple[str, ...], list[Tensor]] = {_cut_over(parameter): [] for parameter in unique}
    for parameter in unique:
        if parameter.grad is not None:
            gradients[_cut_over(parameter)].append(_local(parameter.grad))
    sums = {over: torch.nn.utils.get_total_norm(tensors).double().square() for over, tensors in gradients.items()}
    total = _completed(sums, mesh).sqrt().float()
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in itertools.chain.from_iterable(gradients.values()):
        gradient.mul_(factor.to(gradient.device, gradient.dtype))
    return total


def agree_max(value: float, group: dist.ProcessGroup | None) -> float:
    """The largest value of the group's workers, on each of them; without a group, the value.

    >>> agree_max(3, None)
    3
    """
    if group is None:
        return value
    kind = torch.int64 if isinstance(value, int) else torch.float64
    largest = torch.tensor(value, dtype=kind, device=_device_of(group))
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return type(value)(largest.item())


def agree_max_over(axes: Sequence[str], value: float, mesh: DeviceMesh | None) -> float:
    """The largest value of the workers along these axes of ``make_mesh``'s mesh."""
    for axis in axes:
        if mesh is not None and mesh.get_group(axis).size() > 1:
            value = agree_max(value, mesh.get_group(axis))
    return value


def _cut_over(parameter: nn.Parameter) -> tuple[str, ...]:
    """The dimensions of the mesh whose workers hold different parts of the parameter."""
    if not isinstance(parameter, DTensor):
        return ()
    names = parameter.device_mesh.mesh_dim_names or ()
    return tuple(n for n, p in zip(names, parameter.placements, strict=True) if not p.is_replicate())


def _local(gradient: Tensor) -> Tensor:
    if not isinstance(gradient, DTensor):
        return gradient
    if any(isinstance(placement, Partial) for placement in gradient.placements):
        raise ValueError(f"a gradient is not summed yet: {gradient.placements}")
    return gradient.to_local()


def _completed(sums: dict[tuple[str, ...], Tensor], mesh: DeviceMesh | None) -> Tensor:
    """The sum of all elements: one all-reduce for each dimension that something is cut over."""
    keys = sorted(sums)
    parts = torch.stack([sums[key] for key in keys])
    for name in MODEL_DIMS:
        indices = [index for index, key in enumerate(keys) if name in key]
        if indices and mesh is not None and model_mesh(mesh)[name].size() > 1:
            group = model_mesh(mesh)[name].get_group()
            whole = parts[indices].to(_device_of(group))
            dist.all_reduce(whole, group=group)
            parts[indices] = whole.to(parts.device)
    return parts.sum()


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Where the group's collectives want their tensors."""
    on_gpu = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
