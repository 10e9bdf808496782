"""Which rectangle of a tensor a worker holds, and what two rectangles share."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard

# (start, length) for each dimension.
Part = tuple[tuple[int, int], ...]


def whole(shape: Sequence[int]) -> Part:
    """The part that is everything."""
    return tuple((0, length) for length in shape)


def volume(part: Part) -> int:
    """How many elements a part has."""
    elements = 1
    for _, length in part:
        elements *= length
    return elements


def overlap(one: Part, other: Part) -> Part:
    """What both parts hold; of volume 0 if nothing.

    >>> overlap(((0, 4), (0, 2)), ((3, 4), (0, 2)))
    ((3, 1), (0, 2))
    """
    shared = []
    for (a, m), (b, n) in zip(one, other, strict=True):
        start = max(a, b)
        shared.append((start, max(0, min(a + m, b + n) - start)))
    return tuple(shared)


def inside(tensor: torch.Tensor, held: Part, part: Part) -> torch.Tensor:
    """The view of ``part`` (a part of the whole) in a tensor that holds the part ``held`` of the whole."""
    for dim, ((start, length), (origin, _)) in enumerate(zip(part, held, strict=True)):
        tensor = tensor.narrow(dim, start - origin, length)
    return tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor that this process holds of a tensor; shares its memory."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor. Of a DTensor, all processes of its mesh take part."""
    detached = tensor.detach()
    if not isinstance(detached, DTensor):
        return detached
    # Shards that were offloaded to host memory are gathered where the mesh communicates.
    moved = detached.to(detached.device_mesh.device_type)
    assert isinstance(moved, DTensor)
    return moved.full_tensor()


def part_of(tensor: torch.Tensor) -> Part:
    """The part of the whole tensor that this process holds.

    Raises:
        NotImplementedError: a DTensor whose local values are sums to be reduced, are no single rectangle, or are not
            what its placements say.
    """
    if not isinstance(tensor, DTensor):
        return whole(tensor.shape)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this process is not in the tensor's mesh"
    part = placed_part(tensor.shape, mesh.shape, coordinate, tensor.placements)
    held = tuple(tensor.to_local().shape)
    if tuple(length for _, length in part) != held:
        # FSDP2 over tensor parallelism, where the rows do not split evenly: the placements are not what FSDP2 did.
        raise NotImplementedError(
            f"a weight of shape {tuple(tensor.shape)} placed {tuple(tensor.placements)} over {tuple(mesh.shape)} ranks "
            f"should have {part} here, and has a shape of {held}: it does not split evenly"
        )
    return part


def placed_part(
    shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> Part:
    """The part of a tensor of ``shape`` at a coordinate of a mesh: each placement cuts what those before it left.

    >>> placed_part([5, 2], [2], [1], [Shard(0)])
    ((3, 2), (0, 2))
    """
    kept = [[(0, length)] for length in shape]
    for ranks, number, placement in zip(mesh, coordinate, placements, strict=True):
        if isinstance(placement, _StridedShard):
            dim = placement.dim
            kept[dim] = [
                interval
                for chunk in _chunks(kept[dim], int(placement.split_factor))
                for interval in _chunks(chunk, ranks)[number]
            ]
        elif isinstance(placement, Shard):
            kept[placement.dim] = _chunks(kept[placement.dim], ranks)[number]
        elif not placement.is_replicate():
            raise NotImplementedError(f"a weight placed {placement} over {ranks} ranks: only shards and copies travel")
    return tuple(_one(intervals, placements) for intervals in kept)


def _chunks(intervals: list[tuple[int, int]], count: int) -> list[list[tuple[int, int]]]:
    """Places of a dimension, cut into ``count`` chunks as ``torch.chunk`` cuts: the last ones smaller or empty."""
    total = sum(length for _, length in intervals)
    size = -(-total // count)
    cuts = [min(i * size, total) for i in range(count + 1)]
    return [_between(intervals, low, high) for low, high in pairwise(cuts)]


def _between(intervals: list[tuple[int, int]], low: int, high: int) -> list[tuple[int, int]]:
    kept, passed = [], 0
    for start, length in intervals:
        first, last = max(low, passed), min(high, passed + length)
        if first < last:
            kept.append((start + first - passed, last - first))
        passed += length
    return kept


def _one(intervals: list[tuple[int, int]], placements: Sequence[Placement]) -> tuple[int, int]:
    """The intervals as one: neighbours are joined; none at all is an empty one."""
    if not intervals:
        return (0, 0)
    for (a, m), (b, _) in pairwise(intervals):
        if a + m != b:
            raise NotImplementedError(f"a weight placed {tuple(placements)}: this process holds no single rectangle")
    return (intervals[0][0], sum(length for _, length in intervals))
