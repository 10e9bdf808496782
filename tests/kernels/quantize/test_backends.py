"""Every backend gives rl_fn's codes and scales bit for bit, whatever the weights' strides and dtypes."""

import functools

import pytest
import torch

from tests.kernels.operations import placed, quantize_, returned
from tests.kernels.quantize.cases import FN, FNUZ, SCHEMES, bits, buffers, normal, weights
from tests.kernels.registry import backends
from tests.oracle.lookup import ORACLE


def quantized(tensors, name, backend):
    scheme, granularity, dtype, options = SCHEMES[name]
    out, scales = buffers(tensors, scheme, granularity, dtype, options)
    quantize_(tensors, out, scales, scheme=scheme, granularity=granularity, **options, backend=backend)
    return out, scales


@functools.cache
def rl_fns(name):
    return quantized(weights(), name, "reference")


@pytest.mark.long
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("backend", [b for b in backends("quantize") if b != "reference"])
def test_codes_and_scales_are_rl_fns(backend, name):
    out, scales = quantized(weights(), name, backend)
    for i, (got, wanted) in enumerate(zip(bits(out + scales), bits(rl_fns(name)[0] + rl_fns(name)[1]), strict=True)):
        assert torch.equal(got, wanted), i


@pytest.mark.parametrize("backend", backends("quantize"))
def test_codes_and_scales_are_the_definition(backend):
    """rl_fn's oracle, a loop over elements, without rl_fn."""
    w = normal(20, 36)
    w[0] = torch.arange(36) + 0.5
    for name in ("int8 channel", "fp8 blocks of 16"):
        scheme, _, _, options = SCHEMES[name]
        more = {"granularity": "block", "block": 16} if options else {}
        values, scale = ORACLE[f"quantize_{scheme}"](w.numpy(), **more)
        (codes,), (found,) = quantized([w], name, backend)
        assert torch.equal(codes.double(), torch.from_numpy(values).double())
        assert torch.equal(found, torch.from_numpy(scale))


@pytest.mark.parametrize("backend", backends("quantize"))
def test_what_is_not_finite_has_scale_nan_and_codes_0_and_zeros_the_smallest_scale(backend):
    (codes, zeros), (scale, smallest) = quantized([weights()[0], weights()[-1]], "int8 channel", backend)
    bad = torch.tensor([row in (7, 9, 11) for row in range(20)])
    assert torch.equal(scale[:, 0].isnan(), bad) and not codes[bad].any() and codes[~bad].any()
    assert scale[5] == 2.0**-23 and not codes[5].any()
    assert (smallest == 2.0**-23).all() and not zeros.any()


@pytest.mark.parametrize("backend", [b for b in backends("quantize") if b != "reference"])
def test_subnormal_numbers_are_numbers(backend):
    w = torch.tensor([[1e-40, -3e-41, 0.0, 0.0], [1e-36, -3e-37, 2e-38, 1e-39]])
    for name, oracle in (("int8 channel", "quantize_int8"), ("fp8 channel", "quantize_fp8")):
        values, scale = ORACLE[oracle](w.numpy())
        (codes,), (found,) = quantized([w], name, backend)
        assert torch.equal(codes.double(), torch.from_numpy(values).double())
        assert torch.equal(found, torch.from_numpy(scale))


@pytest.mark.parametrize("backend", backends("quantize"))
def test_fnuz_dequantises_to_the_same_numbers(backend):
    w = [torch.cat([normal(6, 40), -1e-9 * torch.ones(6, 1)], 1)]
    (fn,), (scale,) = quantized(w, "fp8 channel", backend)
    (fnuz,), (doubled,) = quantized(w, "fp8 channel, fnuz", backend)
    assert (fn.dtype, fnuz.dtype) == (FN, FNUZ) and torch.equal(doubled, 2 * scale)
    assert torch.equal(fn.float() * scale, fnuz.float() * doubled)
    assert (fn.view(torch.uint8) == 0x80).any() and not fnuz.float().isnan().any()


@pytest.mark.parametrize("backend", backends("quantize"))
def test_buffers_may_be_parts_of_larger_ones(backend):
    """Two projections in one matrix, as engines have them, and columns of a wider one; what is beside them stays."""
    w = [normal(5, 24, seed=1), normal(7, 24, seed=2)]
    (a, b), (s, t) = quantized(w, "int8 channel", "torch")
    merged, factors = placed((torch.full((14, 40), 99, dtype=torch.int8), torch.full((14,), -7.0)))
    quantize_(w, [merged[:5, 8:32], merged[5:12, 8:32]], [factors[:5], factors[5:12]], backend=backend)
    merged, factors = returned((merged, factors))
    assert torch.equal(merged[:12, 8:32], torch.cat([a, b])) and torch.equal(factors[:12, None], torch.cat([s, t]))
    assert (merged[:, :8] == 99).all() and (merged[:, 32:] == 99).all() and (merged[12:] == 99).all()
    assert (factors[12:] == -7).all()
    turned, one = torch.empty(24, 5, dtype=torch.int8), torch.empty(())
    quantize_(w[:1], [turned.T], [one], granularity="tensor", backend=backend)
    (whole,), (scale,) = quantized(w[:1], "int8 tensor", "torch")
    assert torch.equal(turned.T, whole) and torch.equal(one, scale[0, 0])


def test_chunks_change_nothing(monkeypatch):
    import importlib

    monkeypatch.setattr(importlib.import_module("rl_kernels.quantize.torch"), "_CHUNK", 200)
    for name in ("int8 channel", "int8 tensor", "fp8 tensor", "fp8 blocks of 16"):
        out, scales = quantized(weights(), name, "torch")
        for got, wanted in zip(bits(out + scales), bits(rl_fns(name)[0] + rl_fns(name)[1]), strict=True):
            assert torch.equal(got, wanted)
