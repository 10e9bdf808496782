"""Collectives of tensor parallelism that gradients flow through."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class SumValues(torch.autograd.Function):
    """The sum of the ranks' parts; every rank's part gets the gradient of the sum, which is the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, None


class SumGradients(torch.autograd.Function):
    """The value itself, which all ranks have and each uses for its own part: the ranks' gradients are summed."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class Concatenate(torch.autograd.Function):
    """The ranks' equal parts of the last axis side by side; every rank keeps the gradient of its own part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.width, ctx.start = part.shape[-1], dist.get_rank(group) * part.shape[-1]
        return _side_by_side(part, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient.narrow(-1, ctx.start, ctx.width).contiguous(), None


class Split(torch.autograd.Function):
    """This rank's equal part of the last axis of a value that all ranks have; the gradients are put side by side."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, width = group, whole.shape[-1] // dist.get_world_size(group)
        return whole.narrow(-1, dist.get_rank(group) * width, width).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _side_by_side(gradient, ctx.group), None


def _side_by_side(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, -1)
