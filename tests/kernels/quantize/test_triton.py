"""What only a kernel can get wrong: rounding, launches, widths, offsets beyond 2³¹."""

import importlib

import pytest
import torch
import triton
import triton.language as tl

from rl_kernels.quantize.triton_kernels import fp8_codes, int8_codes
from tests.kernels.operations import placed, quantize_, returned
from tests.kernels.quantize.cases import bits, buffers, normal

backend = importlib.import_module("rl_kernels.quantize.triton")


@triton.jit
def round_kernel(x, codes, FP8: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    ratio = tl.load(x + at)
    one = tl.full([SIZE], 1.0, tl.float32)
    if FP8:
        tl.store(codes + at, fp8_codes(ratio, one, one > 0, False, False))
    else:
        tl.store(codes + at, int8_codes(ratio, one, one > 0))


def around(points):
    """The points, the floats beside them, and all of it negative."""
    up, down = (torch.nextafter(points, torch.full_like(points, end)) for end in (torch.inf, 0.0))
    near = torch.cat([points, up, down])
    return torch.cat([near, -near, torch.zeros(4096 - 2 * len(near))])


def test_every_fp8_number_and_every_tie():
    """In integers; the devices' own conversion cannot run here, and the interpreter's rounds otherwise."""
    numbers = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    x = around(torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2, torch.tensor([1e-30, 1e-45, 1e30])]))
    codes = placed(torch.empty(4096, dtype=torch.uint8))
    round_kernel[(1,)](placed(x), codes, FP8=True, SIZE=4096)
    assert torch.equal(returned(codes), x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))


def test_every_int8_number_and_every_tie():
    x = around(torch.arange(257) / 2)
    codes = placed(torch.empty(4096, dtype=torch.int8))
    round_kernel[(1,)](placed(x), codes, FP8=False, SIZE=4096)
    assert torch.equal(returned(codes), x.clamp(-128, 127).round().to(torch.int8))


class Counted:
    def __init__(self, kernel):
        self.kernel, self.grids = kernel, []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return self.kernel[grid]


@pytest.fixture
def launches(monkeypatch):
    counters = {}
    for name in ("quantize_kernel", "absmax_kernel"):
        counters[name] = Counted(getattr(backend, name))
        monkeypatch.setattr(backend, name, counters[name])
    return lambda: tuple(len(counter.grids) for counter in counters.values())


def test_a_model_is_one_launch(launches):
    """Thirty matrices of one dtype, the interpreter's programs kept few by their size."""
    tensors = [normal(3 + i % 4, 16 * (1 + i % 3), seed=i).bfloat16() for i in range(30)]
    out, scales = buffers(tensors, "int8", "channel", torch.int8, {})
    quantize_(tensors, out, scales, backend="triton")
    assert launches() == (1, 0)
    wanted, factors = buffers(tensors, "int8", "channel", torch.int8, {})
    quantize_(tensors, wanted, factors, backend="torch")
    for a, b in zip(bits(out + scales), bits(wanted + factors), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("granularity", "count"), [("channel", (4, 0)), ("tensor", (3, 3)), ("block", (3, 0))])
def test_a_launch_a_dtype_and_width_and_alignment(monkeypatch, launches, granularity, count):
    """Rows too wide for any tile go in pieces."""
    monkeypatch.setattr(importlib.import_module("rl_kernels.quantize.table"), "WIDTHS", (16, 32, 64))
    tensors = [normal(5, 16), normal(3, 96), normal(4, 48).bfloat16(), normal(3, 70), normal(2, 16)]
    scheme, dtype, options = (
        ("fp8", torch.float8_e4m3fn, {"block": 16}) if granularity == "block" else ("int8", torch.int8, {})
    )
    results = []
    for name in ("triton", "torch"):
        out, scales = buffers(tensors, scheme, granularity, dtype, options)
        quantize_(tensors, out, scales, scheme=scheme, granularity=granularity, **options, backend=name)
        results.append(bits(out + scales))
    assert launches() == count
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_row_offsets_beyond_two_to_the_31():
    """A row stride of 2³⁰ + 16 elements: the third row begins beyond 2³¹. Memory is reserved, not touched."""
    stride = 2**30 + 16
    weight = torch.as_strided(torch.empty(2 * stride + 64, dtype=torch.bfloat16), (3, 48), (stride, 1))
    out = torch.as_strided(torch.empty(2 * stride + 64, dtype=torch.int8), (3, 48), (stride, 1))
    weight.copy_(normal(3, 48))
    scale = torch.empty(3, 1)
    quantize_([weight], [out], [scale], backend="triton")
    (wanted,), (factor,) = buffers([weight], "int8", "channel", torch.int8, {})
    quantize_([weight.clone()], [wanted], [factor], backend="torch")
    assert torch.equal(out, wanted) and torch.equal(scale, factor)


def test_blocks_too_large_for_registers_are_refused():
    out, scales = buffers([normal(4, 4)], "fp8", "block", torch.float8_e4m3fn, {"block": 256})
    with pytest.raises(NotImplementedError, match="blocks up to 128, got 256; available: torch"):
        quantize_([normal(4, 4)], out, scales, scheme="fp8", granularity="block", block=256, backend="triton")
