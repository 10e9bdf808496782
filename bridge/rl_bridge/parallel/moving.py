"""Weights that come into being, move and are freed, sharded or not."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rl_bridge.parallel.fsdp import fsdp_parameters, reshard
from rl_bridge.weights.meta_parameters import replace_parameters


def materialize(model: nn.Module, device: torch.device) -> dict[nn.Parameter, nn.Parameter]:
    """Give parameters on "meta" uninitialised tensors on ``device``, sharded ones their share; returns old → new.

    With ``device`` "meta" the memory of all parameters is freed. Those that FSDP offloads go to the host instead of
    ``device``.
    """
    reshard(model)
    records = fsdp_parameters(model)
    if device.type != "meta" and any(record.offload_to_cpu for record in records):
        device = torch.device("cpu")
    replaced = replace_parameters(model, device)
    with torch.no_grad():
        for record in records:
            # FSDP has a second name for the shard, which would keep the memory of a freed one.
            record._sharded_param_data = record._sharded_param_data.to("meta")
            record.reset_sharded_param()
    return replaced


def move_weights(model: nn.Module, device: torch.device) -> dict[nn.Parameter, nn.Parameter]:
    """Move parameters and buffers; to "meta", free the parameters and keep the buffers. Returns old → new.

    From "meta" the parameters come back uninitialised. Between two devices that hold values nothing is replaced, and an
    optimiser has nothing to follow.
    """
    reshard(model)
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    if "meta" in (device.type, *(parameter.device.type for parameter in model.parameters())):
        replaced = materialize(model, device)
    if device.type != "meta":
        model.to(device)
    return replaced


def part_of(tensor: Tensor) -> tuple[slice, ...]:
    """The part of a whole tensor that this process holds: all of it, or its shard.

    >>> part_of(torch.zeros(2, 3))
    (slice(0, 2, None), slice(0, 3, None))
    """
    sizes, starts = tuple(tensor.shape), (0,) * tensor.dim()
    if isinstance(tensor, DTensor):
        sizes, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
