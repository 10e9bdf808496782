"""Layers of a model that is trained on a CPU: oneDNN's matrix products, and less kept for the backward pass.

A layer of transformers keeps every result on its way: SwiGLU five arrays, RMSNorm two. Here a layer keeps what it read
and computes the rest again, which costs less than reading it from memory. Results are those of the layers' own
forward, to rounding. Anywhere but on a CPU, and with weights in shards or of low precision, that forward runs.
"""

import types
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, silu
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralMLP, MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP, Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

NORMS = (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm)
MLPS = (LlamaMLP, MistralMLP, Qwen2MLP, Qwen3MLP)
SMALL = 1 << 18
"""Weights of fewer numbers go to torch's product: oneDNN keeps 100 KiB of code for each number of tokens it has seen,
which with a small model is more than its activations.
"""
OPS: Any = torch.ops.mkldnn
ONEDNN = torch.backends.mkldnn.is_available() and hasattr(OPS, "_linear_pointwise")


def use_cpu_layers(model: nn.Module) -> None:
    """Switch the linear layers, norms and SwiGLUs that are known here. The model's names and weights stay.

    A module that was given a forward of its own keeps it.
    """
    for module in model.modules():
        for kinds, forward in (((nn.Linear,), _linear), (NORMS, _norm), (MLPS, _mlp)):
            if type(module) in kinds and "forward" not in vars(module):
                module.forward = types.MethodType(forward, module)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias."""
    if not ONEDNN or x.dtype != torch.float32 or weight.numel() < SMALL:
        return linear(x, weight, bias)
    return OPS._linear_pointwise(x, weight, bias, "none", [], "")


def _takes(x: Tensor, *weights: Tensor | None) -> bool:
    """Whether operand and weights are plain arrays of one exact type on a CPU."""
    if x.dtype not in (torch.float32, torch.float64) or not x.numel() or torch.is_autocast_enabled("cpu"):
        return False
    tensors = [x, *(weight for weight in weights if weight is not None)]
    # A fake tensor stands for an array in a plan of memory.
    kinds = (Tensor, nn.Parameter, FakeTensor)
    return all(type(t) in kinds and t.device.type == "cpu" and t.dtype == x.dtype for t in tensors)


def _linear(self: nn.Linear, x: Tensor) -> Tensor:
    if not _takes(x, self.weight, self.bias):
        return nn.Linear.forward(self, x)
    return _Linear.apply(x, self.weight, self.bias)  # pyright: ignore[reportReturnType]


def _norm(self: Any, x: Tensor) -> Tensor:
    # Transformers' norms are float32 whatever they read.
    if x.dtype != torch.float32 or not _takes(x, self.weight):
        return type(self).forward(self, x)
    return _RMSNorm.apply(x, self.weight, self.variance_epsilon)  # pyright: ignore[reportReturnType]


def _mlp(self: Any, x: Tensor) -> Tensor:
    layers = self.gate_proj, self.up_proj, self.down_proj
    plain = all(type(layer) is nn.Linear and layer.bias is None and not _hooked(layer) for layer in layers)
    is_swiglu = plain and isinstance(self.act_fn, (nn.SiLU, SiLUActivation)) and not _hooked(self.act_fn)
    if not is_swiglu or not _takes(x, *(layer.weight for layer in layers)):
        return type(self).forward(self, x)
    return _SwiGLU.apply(x, *(layer.weight for layer in layers))  # pyright: ignore[reportReturnType]


def _hooked(module: nn.Module) -> bool:
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks)


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    return grad.flatten(0, -2).T @ x.flatten(0, -2)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            product(grad, weight.T) if of_x else None,
            _weight_gradient(grad, x) if of_weight else None,
            grad.flatten(0, -2).sum(0) if of_bias else None,
        )


class _RMSNorm(torch.autograd.Function):
    """x / √(mean x² + ε) · weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, inverse = ctx.saved_tensors
        of_x, of_weight, _ = ctx.needs_input_grad
        normed = x * inverse
        into_weight = (grad * normed).flatten(0, -2).sum(0) if of_weight else None
        if not of_x:
            return None, into_weight, None
        scaled = grad * weight
        along = (scaled * normed).mean(-1, keepdim=True)
        return scaled.sub_(normed.mul_(along)).mul_(inverse), into_weight, None


class _SwiGLU(torch.autograd.Function):
    """(silu(x @ gate.T) · (x @ up.T)) @ down.T."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        opened, raised = product(x, gate), product(x, up)
        ctx.save_for_backward(x, gate, up, down, opened, raised)
        return product(silu(opened).mul_(raised), down)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, gate, up, down, opened, raised = ctx.saved_tensors
        of_x, of_gate, of_up, of_down = ctx.needs_input_grad
        active = silu(opened)
        into_down = _weight_gradient(grad, active * raised) if of_down else None
        inner = product(grad, down.T)
        of_raised = active.mul_(inner)
        of_opened = torch.ops.aten.silu_backward(inner.mul_(raised), opened)
        into_x = product(of_opened, gate.T).add_(product(of_raised, up.T)) if of_x else None
        into_gate, into_up = (
            _weight_gradient(part, x) if needed else None for part, needed in ((of_opened, of_gate), (of_raised, of_up))
        )
        return into_x, into_gate, into_up, into_down
