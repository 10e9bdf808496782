"""Every backend against float64 over the exact codes; edges of tiles; what is refused."""

import importlib

import numpy as np
import pytest
import torch

from tests.kernels.operations import int8_matmul, placed, quantize_
from tests.kernels.registry import DEVICE, asked_and_runs, backends
from tests.oracle.lookup import ORACLE

BACKENDS = backends("int8_matmul")
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(out_features, in_features, *, granularity="channel"):
    weight, codes = normal(out_features, in_features, seed=1), torch.empty(out_features, in_features, dtype=torch.int8)
    scale = torch.empty(out_features) if granularity == "channel" else torch.empty(())
    quantize_([weight], [codes], [scale], granularity=granularity)
    return weight, codes, scale


def exact(x, codes, scale, bias=None, half_range=127.5):
    """Float64; the codes by rl_fn's oracle, a loop over elements."""
    q, s = ORACLE["quantize_int8"](x.float().numpy(), half_range=half_range)
    y = (q.astype(np.float64) @ codes.double().T.numpy()) * s.astype(np.float64) * scale.double().numpy()
    return torch.from_numpy(y) if bias is None else torch.from_numpy(y) + bias.double()


@each_backend
@pytest.mark.parametrize(
    ("tokens", "out_features", "in_features", "granularity"),
    [(1, 3, 5, "channel"), (7, 70, 130, "channel"), (20, 64, 128, "tensor"), (70, 17, 200, "channel")],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_float64(backend, dtype, tokens, out_features, in_features, granularity):
    """No size a multiple of any tile, and all of them; one token, few and many."""
    _, codes, scale = layer(out_features, in_features, granularity=granularity)
    x = (normal(tokens, in_features) * 10.0 ** normal(tokens, 1, seed=3)).to(dtype)
    for bias, half_range in ((None, 127.5), (normal(out_features, seed=4).to(dtype), 127.0)):
        y = int8_matmul(x, codes, scale, bias, half_range=half_range, backend=backend)
        wanted = exact(x, codes, scale, bias, half_range)
        assert y.dtype == dtype and y.shape == (tokens, out_features)
        error = 1e-6 if dtype == torch.float32 else 2.0**-8
        # What a bias takes away the rounding before it does not know of.
        size = wanted.abs() + (0 if bias is None else bias.double().abs())
        assert ((y.double() - wanted).abs() <= error * size + 1e-9).all()


@each_backend
def test_it_is_near_the_layer_it_stands_for(backend):
    weight, codes, scale = layer(40, 256)
    x = normal(9, 256)
    wanted = x @ weight.T
    assert (int8_matmul(x, codes, scale, backend=backend) - wanted).norm() < 0.012 * wanted.norm()


@each_backend
def test_sums_that_float32_would_round(backend):
    """2¹² products of 127·127 and one of 127·1: the sum has 26 bits, its last ones from the last product."""
    in_features = 4097
    codes = torch.full((2, in_features), 127, dtype=torch.int8)
    codes[:, -1] = torch.tensor([1, -1])
    x = torch.ones(1, in_features)
    y = int8_matmul(x, codes, torch.ones(()), half_range=127.0, backend=backend)
    difference = y.double() * 127 - 127.0 * 127 * 4096
    assert ((difference - torch.tensor([127.0, -127.0])).abs() <= 0.5 * 2.0**-23 * 127 * 127 * 4096 * 1.01).all()
    first, second = y[0].double()
    assert first > second


@each_backend
def test_a_token_does_not_depend_on_its_batch(backend):
    """Neither on how many tiles there are nor on what is in the others, NaN and zeros included."""
    _, codes, scale = layer(20, 48)
    x = normal(70, 48).bfloat16()
    x[3, 5], x[4] = float("nan"), 0.0
    bias = normal(20, seed=2)
    whole = int8_matmul(x, codes, scale, bias, backend=backend)
    assert whole[3].isnan().all() and torch.equal(whole[4], bias.bfloat16()) and whole.isnan().sum() == 20
    for rows in (slice(0, 1), slice(4, 9), slice(30, 70)):
        part = int8_matmul(x[rows], codes, scale, bias, backend=backend)
        assert torch.equal(part.view(torch.int16), whole[rows].view(torch.int16))


@each_backend
def test_shapes_and_strides(backend):
    _, codes, scale = layer(6, 10)
    x = normal(2, 3, 20)[..., ::2]
    y = int8_matmul(x, codes, scale[:, None], backend=backend)
    assert y.shape == (2, 3, 6)
    stored = codes.T.contiguous().T  # [K, N] in memory
    assert torch.equal(int8_matmul(x.contiguous(), stored, scale, backend=backend), y)
    assert torch.equal(int8_matmul(x[1, 2], codes, scale, backend=backend), y[1, 2])
    assert int8_matmul(x[:0], codes, scale, backend=backend).shape == (0, 3, 6)
    assert int8_matmul(x, codes[:0], scale[:0], backend=backend).shape == (2, 3, 0)


@pytest.mark.long
def test_chunks_and_wide_tokens_change_nothing(monkeypatch):
    _, codes, scale = layer(20, 48)
    x = normal(70, 48)
    for backend, name, value in (("torch", "_CHUNK", 100), ("triton", "WIDEST", 16)):
        whole = int8_matmul(x, codes, scale, backend=backend)
        monkeypatch.setattr(importlib.import_module(f"rl_kernels.int8_matmul.{backend}"), name, value)
        assert torch.equal(int8_matmul(x, codes, scale, backend=backend), whole)


X, Q, S = torch.ones(2, 4), torch.ones(3, 4, dtype=torch.int8), torch.ones(3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": X.double()}, r"x must be float32, .*, got torch\.float64 \(2, 4\)"),
        ({"x": torch.tensor(1.0)}, r"with at least one axis, got torch\.float32 \(\)"),
        ({"weight_q": Q[:, :3]}, r"weight_q must be int8 \[N, 4\] for x \(2, 4\), got torch\.int8 \(3, 3\)"),
        ({"weight_q": Q.float()}, r"weight_q must be int8 .*, got torch\.float32"),
        ({"x": X[:, :0], "weight_q": Q[:, :0]}, "a last axis from 1 to 131071, got 0"),
        ({"weight_scale": S[:2]}, r"weight_scale must be float32 \(3,\), \(3, 1\) or one number, .* \(2,\)"),
        ({"weight_scale": S.bfloat16()}, r"weight_scale must be float32 .*, got torch\.bfloat16"),
        ({"bias": S[:2]}, r"bias must be floats \(3,\), got torch\.float32 \(2,\)"),
        ({"bias": S.to("meta")}, f"bias must be on {DEVICE}.* as x is, got meta"),
        ({"half_range": 126.0}, r"half_range must be within \[127, 128\], got 126"),
    ],
)
def test_bad_arguments_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        int8_matmul(**{"x": X, "weight_q": Q, "weight_scale": S, **change})


def test_a_gradient_is_refused_and_said_why():
    y = int8_matmul(X.clone().requires_grad_(), Q, S)
    with pytest.raises(NotImplementedError, match="int8_matmul is for inference: rounding to int8 has no gradient"):
        y.sum().backward()


@asked_and_runs("int8_matmul")
def test_the_backend_that_runs_is_the_one_asked_for(monkeypatch, asked, runs):
    ran = []
    for name in BACKENDS:
        module = importlib.import_module(f"rl_kernels.int8_matmul.{name}")
        monkeypatch.setattr(module, "forward", lambda *a, n=name: ran.append(n))
    int8_matmul(X, Q, S, backend=asked)
    assert ran == [runs]


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "reference"])
def test_opcheck(backend):
    torch.library.opcheck(torch.ops.rl_kernels.int8_matmul.default, placed((X, Q, S, S, 127.5, backend)))


def test_under_torch_compile():
    compiled = torch.compile(lambda x: int8_matmul(x, Q, S, S), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(X), int8_matmul(X, Q, S, S))
