"""What is refused and how it is named, that the backend asked for runs, and the operator's contract with PyTorch."""

import importlib

import pytest
import torch

import rl_kernels.quantize.api as operation
from tests.kernels.operations import placed, quantize_
from tests.kernels.registry import DEVICE, asked_and_runs, backends

W, CODES, SCALES = torch.ones(4, 6), torch.empty(4, 6, dtype=torch.int8), torch.empty(4, 1)
FP8 = torch.empty(4, 6, dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scheme": "int4"}, r"scheme must be one of \('int8', 'fp8'\), got 'int4'"),
        ({"granularity": "row"}, "granularity of int8 must be one of .*, got 'row'"),
        ({"granularity": "block"}, "granularity of int8 must be one of .*, got 'block'"),
        ({"block": 0}, "block must be at least 1, got 0"),
        ({"half_range": 100.0}, r"half_range must be within \[127, 128\], got 100"),
        ({"scheme": "fp8", "half_range": 127.0}, "half_range belongs to int8"),
        ({"out": [CODES]}, "equally many, got 2, 1 and 2"),
        ({"weights": [W, W.double()]}, r"weights\[1\] must be float32, .*, got torch\.float64"),
        ({"weights": [W, W[:0]]}, r"weights\[1\] must not be empty, got shape \(0, 6\)"),
        ({"weights": [W, torch.tensor(1.0)]}, r"weights\[1\] must have at least 1 axes, got shape \(\)"),
        ({"scheme": "fp8", "weights": [W, W[0]]}, r"weights\[1\] must have at least 2 axes, got shape \(6,\)"),
        ({"out": [CODES, CODES[:3]]}, r"out\[1\] must have its weight's shape \(4, 6\), got \(3, 6\)"),
        ({"out": [CODES, FP8]}, r"out\[1\] must be torch\.int8, got torch\.float8_e4m3fn"),
        ({"scheme": "fp8", "out": [FP8, CODES]}, r"out\[1\] must be .*e4m3fn or .*e4m3fnuz, got torch\.int8"),
        ({"out": [CODES, CODES[:1].expand(4, 6)]}, r"out\[1\] must have an element of memory for each"),
        ({"scales": [SCALES, SCALES.double()]}, r"scales\[1\] must be contiguous float32, got torch\.float64"),
        ({"scales": [SCALES, torch.empty(8)[::2]]}, r"scales\[1\] must be contiguous float32, .* strides \(2,\)"),
        ({"scales": [SCALES, SCALES[:3]]}, r"scales\[1\] must have shape \(4, 1\) for channel .*, got \(3, 1\)"),
        ({"scales": [SCALES, torch.empty(4, device="meta")]}, r"scales\[1\] must be on " + DEVICE + r".*, got meta"),
        ({"out": [CODES.to("meta"), CODES]}, r"out\[0\] must be on " + DEVICE + r".* as weights\[0\] is, got meta"),
    ],
)
def test_bad_arguments_are_named(change, message):
    fp8 = change.get("scheme") == "fp8"
    arguments = {"weights": [W, W], "out": [FP8, FP8] if fp8 else [CODES, CODES], "scales": [SCALES, SCALES]}
    with pytest.raises(ValueError, match=message):
        quantize_(**{**arguments, **change})


def test_no_weights_are_no_work(monkeypatch):
    monkeypatch.setattr(operation, "_quantize", lambda *_: pytest.fail("something was launched"))
    assert quantize_([], [], []) is None


def test_an_unknown_backend_raises_and_names_those_there_are():
    with pytest.raises(NotImplementedError, match="no backend 'cuda'; available: triton, torch, reference"):
        quantize_([W], [CODES], [SCALES], backend="cuda")


@asked_and_runs("quantize")
def test_the_backend_that_runs_is_the_one_asked_for(monkeypatch, asked, runs):
    ran = []
    for name in backends("quantize"):
        module = importlib.import_module(f"rl_kernels.quantize.{name}")
        monkeypatch.setattr(module, "forward", lambda *a, n=name: ran.append(n))
    quantize_([W], [CODES], [SCALES], backend=asked)
    assert ran == [runs]


@pytest.mark.parametrize("backend", [b for b in backends("quantize") if b != "reference"])
def test_opcheck(backend):
    arguments = ([W, W.bfloat16()], [CODES.clone(), CODES.clone()], [SCALES.clone(), SCALES.clone()])
    torch.library.opcheck(operation._quantize, (*placed(arguments), "int8", "channel", 128, 127.5, backend))


def test_parameters_and_torch_compile():
    weight = torch.nn.Parameter(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)))

    def refit(out, scales):
        quantize_([weight], [out], [scales])
        return out.float() * scales

    eager = refit(CODES.clone(), SCALES.clone())
    assert not eager.requires_grad and (eager - weight).abs().max() < 0.02
    compiled = torch.compile(refit, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(CODES.clone(), SCALES.clone()), eager)
