"""What Liger is called with, what comes back, and what it is not asked for."""

import importlib

import pytest
import torch

from tests.kernels.cases import N, V, ids, masked, normal, sets
from tests.kernels.exact import exact, gradients
from tests.kernels.experimental.stand_ins import install, scaled_cross_entropy
from tests.kernels.operations import linear_logprobs

H = 19


@pytest.fixture
def calls(monkeypatch):
    made = []
    install(
        monkeypatch, "liger", "liger_kernel.ops", LigerFusedLinearScaledCrossEntropyFunction=scaled_cross_entropy(made)
    )
    adapter = importlib.import_module("rl_kernels.experimental.liger")
    monkeypatch.setattr(adapter, "is_hopper", lambda device: True)
    return made


def model():
    return normal(N, H, scale=1.0).bfloat16(), normal(V, H, scale=1.0, seed=1).bfloat16()


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "logit_scale": 0.5}, {"mask": masked()}])
def test_values_and_gradients(calls, options):
    leaves = list(model())
    if "mask" in options:
        leaves[0][~options["mask"]] = float("nan")
    doubles = [x.double().requires_grad_() for x in leaves]
    leaves = [x.requires_grad_() for x in leaves]
    got = linear_logprobs(leaves[0], leaves[1], ids(N).int(), **options, backend="liger")
    clean = doubles[0] if "mask" not in options else torch.where(options["mask"][:, None], doubles[0], 0.0)
    wanted = exact(clean @ doubles[1].T, ids(N), **options)
    torch.testing.assert_close(got.logprobs.double(), wanted[0].detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.entropy.double(), wanted[1].detach(), rtol=2**-8, atol=1e-3)
    counted = options.get("mask", torch.ones(N, dtype=torch.bool))
    assert got.logsumexp[counted].isnan().all() and (got.logsumexp[~counted] == 0).all()
    c = normal(N, seed=5), normal(N, seed=6)
    mine, theirs = gradients(got[:2], [x.float() for x in c], leaves), gradients(wanted[:2], c, doubles)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.double(), b.nan_to_num(), rtol=2e-2, atol=2e-2)
    heat = options.get("temperature", 1.0) / options.get("logit_scale", 1.0)
    assert calls == [((int(counted.sum()), H), torch.int64, heat, -100, 1)]


def test_batch_shapes_and_nothing_that_counts(calls):
    hidden, weight = model()
    shaped = linear_logprobs(hidden[:6].view(2, 3, H), weight, ids(2, 3), backend="liger")
    assert shaped.logprobs.shape == (2, 3) and shaped.logprobs.dtype == torch.float32 == shaped.entropy.dtype
    none = linear_logprobs(hidden, weight, ids(N), mask=torch.zeros(N, dtype=torch.bool), backend="liger")
    assert all((x == 0).all() for x in none) and len(calls) == 1


@pytest.mark.parametrize(
    ("change", "lacking"),
    [
        ({"bias": torch.zeros(V)}, "bias"),
        ({"softcap": 3.0}, "softcap"),
        ({"allowed_tokens": sets()}, "allowed_tokens"),
        ({"temperature": torch.ones(N)}, "a tensor as temperature"),
        ({"tokens": ids(N, 2)}, "several targets a row"),
        ({"weight": torch.zeros(V, H)}, "torch.bfloat16 by torch.float32"),
        ({"bias": torch.zeros(V), "softcap": 1.0}, "bias, softcap"),
        ({"group": object()}, "group"),
    ],
)
def test_what_it_lacks_is_refused_by_name(calls, change, lacking):
    hidden, weight = model()
    arguments = {"hidden": hidden, "weight": weight, "tokens": ids(N)} | change
    message = f"backend 'liger' has no {lacking}; backends that have: triton, torch"
    with pytest.raises(NotImplementedError, match=message):
        linear_logprobs(**arguments, backend="liger")
    assert not calls


def test_other_gpus_are_refused(calls, monkeypatch):
    adapter = importlib.import_module("rl_kernels.experimental.liger")
    monkeypatch.setattr(adapter, "is_hopper", lambda device: False)
    with pytest.raises(NotImplementedError, match=r"compute capability 9\.0 only"):
        linear_logprobs(*model(), ids(N), backend="liger")
