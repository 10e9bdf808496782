"""What is refused, and that the backend asked for is the one that runs."""

import importlib

import pytest
import torch

from rl_kernels import backends
from tests.kernels import registry
from tests.kernels.operations import logits_logprobs
from tests.kernels.registry import asked_and_runs

BACKENDS = registry.backends("logits_logprobs")
LOGITS, TOKENS = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.long)


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        (torch.zeros(3, 2, dtype=torch.long), {}, r"tokens must have shape \(2, 3\), .*got \(3, 2\)"),
        (torch.zeros(2, dtype=torch.long), {}, r"tokens must have shape \(2, 3\), .*got \(2,\)"),
        (torch.zeros(2, 3), {}, r"tokens must be integers, got torch\.float32"),
        (torch.zeros(2, 3, dtype=torch.bool), {}, r"tokens must be integers, got torch\.bool"),
        (TOKENS, {"temperature": 0.0}, r"temperature must be positive, got 0\.0"),
        (TOKENS, {"temperature": -1.0}, r"temperature must be positive, got -1\.0"),
        (TOKENS, {"temperature": float("nan")}, "temperature must be positive, got nan"),
        (TOKENS, {"temperature": torch.ones(3)}, r"temperature must be a number or \(2, 3\), got \(3,\)"),
        (TOKENS, {"softcap": 0.0}, r"softcap must be positive, got 0\.0"),
        (TOKENS, {"softcap": -2.0}, r"softcap must be positive, got -2\.0"),
    ],
)
def test_bad_arguments_are_named(tokens, options, message, backend):
    with pytest.raises(ValueError, match=message):
        logits_logprobs(LOGITS, tokens, **options, backend=backend)


def test_an_unknown_backend_raises_and_names_those_there_are():
    with pytest.raises(NotImplementedError, match=r"no backend 'cuda'; available: triton, torch, reference"):
        logits_logprobs(LOGITS, TOKENS, backend="cuda")


@asked_and_runs("logits_logprobs")
def test_the_backend_that_runs_is_the_one_asked_for(monkeypatch, asked, runs):
    ran = []
    for name in BACKENDS:
        module = importlib.import_module(backends.BACKENDS["logits_logprobs"][name])
        monkeypatch.setattr(module, "forward", lambda *a, f=module.forward, n=name: (ran.append(n), f(*a))[1])
    logits_logprobs(LOGITS, TOKENS, backend=asked)
    assert ran == [runs]


def test_a_backend_that_cannot_be_imported_is_not_replaced(monkeypatch):
    def broken(name):
        raise ImportError(name)

    monkeypatch.setattr(backends, "import_module", broken)
    with pytest.raises(ImportError, match=r"rl_kernels\.logits_logprobs\.reference"):
        logits_logprobs(LOGITS, TOKENS, backend="reference")
