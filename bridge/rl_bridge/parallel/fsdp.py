"""Fully sharded data parallelism (FSDP2), and weights that come into being, move and are freed, sharded or not."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from rl_bridge.parallel.checkpointing import layers_of
from rl_bridge.parallel.config import ParallelConfig
from rl_bridge.weights.manifest import replace_parameters, without_peft

# Fully sharded data parallelism (FSDP2): ZeRO-3, ZeRO-2, replicated groups of shards, one worker alone.


def shard_model(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> None:
    """Shard each layer, and then the rest as one piece; a gradient is the sum of the workers' gradients.

    Args:
        model: on the meta device, or on the device that it computes on, and the same on all workers.
        mesh: the model's (``model_mesh``): rows over "fsdp", copies over "replicate".
        config: its precision, resharding and offload.
    """
    over = mesh["fsdp"] if mesh["replicate"].size() == 1 else mesh["replicate", "fsdp"]
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if config.cpu_offload else OffloadPolicy()
    # A transformers model takes token ids, which no cast may touch, and per-token numbers that must stay exact.
    cast_root = not isinstance(without_peft(model), PreTrainedModel)
    places = _places(model)
    # FSDP has one group for a parameter: what a layer shares with others stays in the rest, as do tied embeddings.
    alone = [layer for layer in layers_of(model) if all(places[p] == count for p, count in _places(layer).items())]
    for module in [*reversed(alone), model]:  # a layer within a layer first
        root = module is model
        precision = MixedPrecisionPolicy(
            param_dtype=config.param_dtype,
            reduce_dtype=config.reduce_dtype,
            cast_forward_inputs=cast_root or not root,
        )
        # The backward pass begins with the root's weights, so that they stay gathered for it.
        reshard = config.reshard_after_forward and not root
        fully_shard(module, mesh=over, reshard_after_forward=reshard, mp_policy=precision, offload_policy=offload)
        module.register_forward_hook(lambda module, inputs, output: reshard_without_backward(module))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Without the second setter gloo is asked for a scaled sum, which it does not have.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _places(module: nn.Module) -> Counter[nn.Parameter]:
    """In how many places of the module each parameter is."""
    return Counter(p for part in module.modules() for p in part._parameters.values() if p is not None)


def reshard(model: nn.Module) -> None:
    """Free all gathered weights: the parameters are then the sharded ones, whatever ran before."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def forget_pass(model: nn.Module) -> None:
    """Begin anew after a pass that ended in its middle: else the next one would reduce no gradients, or add its own."""
    if not isinstance(model, FSDPModule):
        return
    model.reset_iter_state()
    for record in fsdp_parameters(model):
        # Gradients that were on their way to the shards. A parameter that was never gathered has none.
        record.unsharded_accumulated_grad = None
        if hasattr(record, "_unsharded_param"):
            record._unsharded_param.grad = None


def fsdp_parameters(model: nn.Module) -> list[Any]:
    """FSDP's own records of its parameters, empty for a model that is not sharded."""
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    return [record for state in states for group in state._fsdp_param_groups for record in group.fsdp_params]


def reshard_without_backward(module: nn.Module) -> None:
    """After a forward pass without gradients: weights that wait for the backward pass would wait for ever."""
    if not torch.is_grad_enabled() and isinstance(module, FSDPModule):
        module.reshard()


# Weights that come into being, move and are freed, sharded or not.


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
