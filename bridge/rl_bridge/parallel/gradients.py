"""The gradient norm of a model spread over workers, and numbers that all workers must agree on."""

import itertools
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from rl_bridge.parallel.process_groups import MODEL_DIMS, model_mesh


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
