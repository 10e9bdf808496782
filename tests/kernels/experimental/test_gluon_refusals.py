"""Where the Gluon backend does not run, and why it says so."""

import pytest
import torch

from rl_kernels import backends
from tests.kernels.cases import N, V, ids, normal
from tests.kernels.linear_logprobs import inputs
from tests.kernels.operations import linear_logprobs
from tests.kernels.registry import imitates_a_gpu

pytest.importorskip("triton.experimental.gluon")
from tests.kernels.experimental.emulation import backend, emulate

pytestmark = imitates_a_gpu

# Without its cache.
refusal = backends.refusal.__wrapped__
WHERE = "compute capability 9.0 and 10.0 and for gfx950 only"


def refused(hidden, weight, message):
    with pytest.raises(NotImplementedError, match=f"backend 'gluon' has no {message}.*triton, torch"):
        linear_logprobs(hidden, weight, ids(N), backend="gluon")


@pytest.mark.parametrize(("name", "unit"), [("sm_90", 8), ("sm_100", 8), ("gfx950", 16)])
def test_what_it_lacks(monkeypatch, name, unit):
    emulate(monkeypatch, name)
    hidden, weight, _ = inputs.model(torch.bfloat16)
    refused(hidden.float(), weight.float(), "torch.float32 by torch.float32")
    refused(hidden, weight.half(), "torch.bfloat16 by torch.float16")
    refused(hidden[:, :19], normal(V, 19).bfloat16(), r"weight with strides \(19, 1\).* of " + f"{unit} elements")
    refused(hidden, weight.T.contiguous().T, r"weight with strides \(1, 37\)")
    refused(hidden[:, :16], weight[:, 1:17], r"weight with strides \(32, 1\) at this address")
    refused(hidden[:, :0], weight[:, :0], "hidden size 0")


def test_what_only_the_kernel_without_descriptors_lacks(monkeypatch):
    emulate(monkeypatch, "gfx950")
    hidden, weight, _ = inputs.model(torch.bfloat16)
    refused(hidden[:, :24], weight[:, :24], r"hidden size 24 \(multiples of 16\)")
    stride = 2**22
    far = torch.as_strided(torch.empty(stride + 32, dtype=torch.bfloat16), (2, 32), (stride, 1))
    refused(hidden, far, "weight whose rows begin 4194304 elements apart")


def test_another_architecture(monkeypatch):
    emulate(monkeypatch, "sm_90")
    monkeypatch.setattr(backend, "architecture", lambda device: "sm_80")
    refused(*inputs.model(torch.bfloat16)[:2], "kernel for sm_80")


@pytest.mark.parametrize(
    ("capability", "hip", "runs"),
    [
        ((9, 0), None, True),
        ((10, 0), None, True),
        ((8, 0), None, False),
        ((10, 3), None, False),
        ((12, 0), None, False),
        ("gfx950:sramecc+:xnack-", "7.0", True),
        ("gfx942:sramecc+:xnack-", "7.0", False),
    ],
)
def test_only_where_there_is_a_kernel_and_only_when_asked_for(monkeypatch, capability, hip, runs):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 5) if hip else capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *device: _Properties(capability))
    monkeypatch.setattr(torch.version, "hip", hip)
    found = refusal("gluon", "cuda")
    assert found is None if runs else WHERE in str(found)
    assert WHERE in str(refusal("gluon", "cpu"))
    assert backends.select("linear_logprobs", "cuda", None) != "gluon"
    installed = backends.find_spec
    gluon = "triton.experimental.gluon"
    monkeypatch.setattr(backends, "find_spec", lambda name: None if name == gluon else installed(name))
    assert not runs or refusal("gluon", "cuda") == "this Triton has no Gluon (3.6 and 3.9 have)"
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    assert refusal("gluon", "cuda") == "triton is not installed"


class _Properties:
    def __init__(self, name):
        self.gcnArchName = name
