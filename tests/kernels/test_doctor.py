"""The doctor names every operation's backend, and why the others do not run."""

import torch

from rl_kernels import backends
from rl_kernels.doctor import doctor
from tests.kernels.registry import unasked


def test_every_operation_has_a_backend_and_reasons():
    found = doctor()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert found.device == device and found.versions["torch"].startswith("2.")
    assert {f.operation: f.backend for f in found.findings} == {
        name: unasked(name, device) for name in backends.BACKENDS
    }
    for finding in found.findings:
        assert {finding.backend, *finding.others} == set(backends.BACKENDS[finding.operation])
        assert all(finding.others.values())


def test_a_backend_that_is_not_installed_says_so(monkeypatch):
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    backends.refusal.cache_clear()
    try:
        others = {f.operation: f.others for f in doctor().findings}["logits_logprobs"]
    finally:
        backends.refusal.cache_clear()
    assert others["triton"] == "triton is not installed" and others["reference"] == "jax is not installed"
