"""Weights of every kind at sizes that suit interpreters, and buffers for them."""

import torch

from rl_kernels.quantize.scheme import Scheme

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
# Scheme, granularity, dtype of the buffers, options.
SCHEMES = {
    "int8 channel": ("int8", "channel", torch.int8, {}),
    "int8 channel, 127": ("int8", "channel", torch.int8, {"half_range": 127.0}),
    "int8 tensor": ("int8", "tensor", torch.int8, {}),
    "fp8 channel": ("fp8", "channel", FN, {}),
    "fp8 tensor": ("fp8", "tensor", FN, {}),
    "fp8 blocks of 16": ("fp8", "block", FN, {"block": 16}),
    "fp8 blocks of 12": ("fp8", "block", FN, {"block": 12}),
    "fp8 channel, fnuz": ("fp8", "channel", FNUZ, {}),
    "fp8 blocks of 16, fnuz": ("fp8", "block", FNUZ, {"block": 16}),
}


def normal(*shape, seed=0):
    """Rows of very different magnitude."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g) * 10.0 ** (torch.rand(*shape[:-1], 1, generator=g) * 6 - 4)


def weights():
    """Aligned and not, stacks that fold and that do not, transposed, with steps; ties, zeros, NaN, infinities."""
    first = normal(20, 48)
    first[2], first[5, :] = torch.arange(48) + 0.5, 0.0
    first[7, 3], first[9, 40], first[11, 0], first[11, 1] = float("nan"), float("-inf"), float("inf"), float("nan")
    first[13] = -first[13].abs()
    return [
        first,
        normal(40, 64, seed=1).bfloat16(),
        normal(3, 20, 33, seed=2).bfloat16(),
        normal(2, 3, 5, 40, seed=3).transpose(0, 1),
        normal(70, 30, seed=4).T,
        normal(40, 66, seed=5).half()[::2, ::3],
        normal(1, 7, seed=6),
        torch.zeros(4, 16),
    ]


def buffers(weights, scheme, granularity, dtype, options):
    """Buffers full of something else."""
    settings = Scheme(scheme, granularity, options.get("block", 128), 1.0)
    out = [torch.full(w.shape, 99, dtype=torch.uint8).view(dtype) for w in weights]
    return out, [torch.full(settings.scale_shape(w.shape), -7.0) for w in weights]


def bits(tensors):
    return [t.contiguous().view(torch.uint8) for t in tensors]
