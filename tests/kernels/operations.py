"""The operations as tests call them: arguments go where the backend under test runs, results come back to the CPU.

Tests make arguments and expected values on the CPU. On a machine without a GPU nothing moves. A leaf
on the CPU gets its gradient on the CPU.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import rl_kernels
from tests.kernels import registry


class _Moved(torch.autograd.Function):
    """A copy on another device, of the same strides and the same offset: kernels read both."""

    @staticmethod
    def forward(ctx, x, device):
        ctx.device = x.device
        # Axes of stride 0, of an expanded tensor, have one element of memory.
        own = x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())]
        last = sum((size - 1) * stride for size, stride in zip(own.shape, own.stride(), strict=True))
        memory = torch.empty(x.storage_offset() + last + 1 if x.numel() else 0, dtype=x.dtype, device=device)
        moved = memory.as_strided(own.shape, own.stride(), x.storage_offset()) if x.numel() else memory.view(x.shape)
        moved.copy_(own)
        return moved.as_strided(x.shape, x.stride(), x.storage_offset()) if x.numel() else moved

    @staticmethod
    def backward(ctx, *gradients):  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradients[0].to(ctx.device), None


def placed(tree: Any, device: str | None = None) -> Any:
    """The CPU's tensors of a tree, where the backend under test runs; other tensors stay."""
    device = device or registry.DEVICE
    if device == "cpu":
        return tree
    return pytree.tree_map(lambda x: _Moved.apply(x, device) if _on_cpu(x) else x, tree)


def returned(tree: Any) -> Any:
    """A tree with its tensors on the CPU."""
    return pytree.tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, tree)


def _on_cpu(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type == "cpu"


def at_device(function: Callable[..., Any], device: str | None = None) -> Callable[..., Any]:
    """The function with its arguments' tensors on the device under test, or on ``device``; its results on the CPU."""

    @functools.wraps(function)
    def called(*arguments, **options):
        return returned(function(*placed(arguments, device), **placed(options, device)))

    return called


int8_matmul = at_device(rl_kernels.int8_matmul)
linear_logprobs = at_device(rl_kernels.linear_logprobs)
linear_topk_logprobs = at_device(rl_kernels.linear_topk_logprobs)
logits_logprobs = at_device(rl_kernels.logits_logprobs)
sample = at_device(rl_kernels.sample)
topk_logprobs = at_device(rl_kernels.topk_logprobs)


def quantize_(weights: Any, out: Any, scales: Any, **options: Any) -> None:
    """``rl_kernels.quantize_``; what it writes comes back to the buffers."""
    written = placed((out, scales))
    rl_kernels.quantize_(placed(weights), *written, **options)
    for buffer, result in zip((*out, *scales), (*written[0], *written[1]), strict=True):
        if buffer is not result:
            buffer.copy_(result)


def linear_policy_loss(hidden: Any, weight: Any, tokens: Any, loss: Any, **options: Any) -> Any:
    """``rl_kernels.linear_policy_loss`` with a loss that holds tensors of the CPU."""

    def on_the_cpu(*arguments):
        result = loss(*returned(arguments))
        return placed(result)

    whole = at_device(rl_kernels.linear_policy_loss)
    return whole(hidden, weight, tokens, on_the_cpu, **options)
