"""An outside library is never chosen, and asked for by name it runs or says why it does not."""

import pytest
import torch

from rl_kernels import backends
from rl_kernels.doctor import doctor
from tests.kernels.operations import linear_logprobs, sample

WHERE = {"liger": "linear_logprobs", "flashinfer": "sampling", "aiter": "sampling"}
each = pytest.mark.parametrize("backend", list(WHERE))


@pytest.fixture
def fresh():
    backends.refusal.cache_clear()
    yield
    backends.refusal.cache_clear()


@each
def test_not_installed(monkeypatch, fresh, backend):
    real = backends.find_spec
    modules = {module for module, _ in backends.ADAPTERS.values()}
    monkeypatch.setattr(backends, "find_spec", lambda name: None if name in modules else real(name))
    message = rf"backend '{backend}' cannot run on cpu here: {backend} is not installed \(its adapter .* [\d.]+"
    with pytest.raises(NotImplementedError, match=message):
        backends.select(WHERE[backend], "cpu", backend)
    assert "written against" in {f.operation: f.others for f in doctor().findings}[WHERE[backend]][backend]


@each
def test_installed_on_the_wrong_machine(monkeypatch, fresh, backend):
    monkeypatch.setattr(backends, "find_spec", lambda name: object())
    assert backends.refusal(backend, "cpu") == f"{backend} has kernels for GPUs only"
    monkeypatch.setattr(torch.version, "hip", None if backend == "aiter" else "7.0")
    vendor = "AMD" if backend == "aiter" else "NVIDIA"
    assert backends.refusal(backend, "cuda") == f"{backend} has kernels for {vendor} GPUs only"


@each
def test_installed_on_the_right_machine_but_not_asked_for(monkeypatch, fresh, backend):
    monkeypatch.setattr(backends, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.version, "hip", "7.0" if backend == "aiter" else None)
    assert backends.select(WHERE[backend], "cuda", backend) == backend
    assert backends.select(WHERE[backend], "cuda", None) not in backends.ADAPTERS
    assert backends.why_not(backend, "cuda").startswith("only when asked for by name (its adapter was written against")


def test_the_operations_refuse_them_here():
    with pytest.raises(NotImplementedError, match=r"linear_logprobs: backend 'liger' cannot run on .* here"):
        linear_logprobs(torch.zeros(1, 2), torch.zeros(3, 2), torch.tensor([0]), backend="liger")
    for backend in ("flashinfer", "aiter"):
        with pytest.raises(NotImplementedError, match=rf"sampling: backend '{backend}' cannot run on .* here"):
            sample(torch.zeros(1, 3), seed=0, position=0, backend=backend)
