"""PyTorch's int8 matmul, which on a GPU takes sizes that are multiples of 8, and more than 16 tokens."""

import torch
from torch import Tensor

from rl_kernels.quantize.scheme import Scheme
from rl_kernels.quantize.torch import forward as quantize

# Elements of the int32 result in memory at once, beside their float32 copies.
_CHUNK = 1 << 24


def forward(
    x: Tensor, weight_q: Tensor, weight_scale: Tensor, bias: Tensor | None, half_range: float, y: Tensor
) -> None:
    """Write the result into ``y`` [M, N]."""
    codes = torch.empty_like(x, dtype=torch.int8)
    scale = torch.empty(len(x), 1, device=x.device)
    quantize([x], [codes], [scale], Scheme("int8", "channel", 0, half_range))
    weight = _padded(weight_q, 8)
    step = max(1, _CHUNK // len(weight))
    for first in range(0, len(x), step):
        rows = slice(first, first + step)
        total = int8_gemm(codes[rows], weight)[:, : len(weight_q)].float()
        total.mul_(scale[rows] * weight_scale)
        y[rows] = total if bias is None else total.add_(bias)


def int8_gemm(codes: Tensor, weight: Tensor) -> Tensor:
    """int32 [M, N] of int8 [M, K] and [N, K], of which N and K are multiples of 8."""
    padded = torch.nn.functional.pad(codes, (0, weight.shape[1] - codes.shape[1], 0, max(0, 32 - len(codes))))
    return torch.ops.aten._int_mm(padded, weight.T)[: len(codes)]


def _padded(weight: Tensor, unit: int) -> Tensor:
    rows, columns = weight.shape
    if rows % unit == columns % unit == 0:
        return weight
    return torch.nn.functional.pad(weight, (0, -columns % unit, 0, -rows % unit))
