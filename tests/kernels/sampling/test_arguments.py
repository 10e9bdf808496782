"""What is refused, and the operator's contract with PyTorch."""

import pytest
import torch

import rl_kernels.sampling.api as operation
from tests.kernels.operations import placed, sample
from tests.kernels.registry import each_backend

LOGITS = torch.zeros(3, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.5}, r"temperature must be finite and at least 0, got -0\.5"),
        ({"temperature": float("nan")}, "temperature must be finite"),
        ({"temperature": torch.ones(2)}, r"temperature must be a number or \[3\], got \(2,\)"),
        ({"top_k": 0}, "top_k must be ≥ 1, got 0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0\.0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1\.5"),
        ({"min_p": -0.1}, r"min_p must be in \[0, 1\], got -0\.1"),
        ({"seed": 2**63}, "seed must be an integer of 64 bits"),
        ({"position": 0.5}, "position must be an integer of 64 bits"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        sample(LOGITS, **{"seed": 0, "position": 0, **options})


@pytest.mark.parametrize("shape", [(5,), (2, 3, 5), (2, 0)])
def test_logits_have_rows_and_entries(shape):
    with pytest.raises(ValueError, match=r"logits must be floats \[B, V\]"):
        sample(torch.zeros(shape), seed=0, position=0)


@each_backend("sampling")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_is_refused(backend, temperature):
    logits = LOGITS.clone()
    logits[1, 4] = float("nan")
    with pytest.raises(ValueError, match=r"NaN, .* in rows \[1\]"):
        sample(logits, temperature=temperature, seed=0, position=0, check=True, backend=backend)


@pytest.mark.parametrize("logit", [float("inf"), float("nan")])
@pytest.mark.parametrize("cuts", [{}, {"top_k": 2}, {"top_p": 0.5}, {"top_k": 2, "top_p": 0.5}])
def test_an_infinite_logit_is_refused_whatever_is_cut_off(cuts, logit):
    logits = LOGITS.clone()
    logits[2, 0] = logit
    with pytest.raises(ValueError, match=r"NaN, \+inf .* in rows \[2\]"):
        sample(logits, **cuts, seed=0, position=0, check=True, backend="torch")
    unchecked = sample(logits, **cuts, seed=0, position=0, check=False, return_allowed_tokens=True, backend="torch")
    assert unchecked.tokens[2] == -1 and unchecked.logprobs[2].isnan()


@each_backend("sampling")
def test_an_empty_batch(backend):
    result = sample(LOGITS[:0], top_k=2, top_p=0.5, seed=0, position=0, return_allowed_tokens=True, backend=backend)
    assert result.tokens.shape == (0,) and result.allowed_tokens is not None and result.allowed_tokens.shape == (0, 0)


def test_opcheck():
    numbers, ids = torch.ones(3), torch.arange(3)
    arguments = (LOGITS, numbers, ids + 1, 0.5 * numbers, -numbers, ids, ids, "torch")
    torch.library.opcheck(operation._sample, placed(arguments))


def test_an_unknown_backend_raises():
    with pytest.raises(NotImplementedError, match="available: triton, torch, reference"):
        sample(LOGITS, seed=0, position=0, backend="flashinfer")
