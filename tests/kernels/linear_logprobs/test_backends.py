"""Every backend, with every option, against float64: values and gradients of hidden states, weight and bias."""

import pytest
import torch

from tests.kernels.cases import OPTIONS, N, V, ids, normal
from tests.kernels.exact import exact
from tests.kernels.linear_logprobs.inputs import H, assert_equal_to_float64, model
from tests.kernels.operations import linear_logprobs, logits_logprobs, placed
from tests.kernels.registry import DEVICE, backends

BACKENDS = backends("linear_logprobs")
each_option = pytest.mark.parametrize("option", list(OPTIONS))
each_backend = pytest.mark.parametrize("backend", BACKENDS)
# Smaller than a row of logits, one that cuts both ways, and the default.
SMALL = 4 * 5 * H * 3


@each_backend
@each_option
def test_values_and_gradients(backend, option):
    assert_equal_to_float64(backend, OPTIONS[option])


@pytest.mark.parametrize("workspace", [1, SMALL, 4 * 5 * V * H])
@pytest.mark.parametrize("option", ["plain", "everything", "mask"])
@pytest.mark.parametrize("targets", [None, 3])
def test_any_cut_into_blocks(workspace, option, targets):
    assert_equal_to_float64("torch", OPTIONS[option], targets=targets, biased=False, workspace=workspace)


@each_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(backend, dtype):
    assert_equal_to_float64(backend, {"temperature": 0.7}, dtype=dtype)


def test_logits_are_never_rounded_to_the_operands_precision():
    """From bf16 operands within 1e-5 nats of float64, where bf16 logits are 2e-3 off."""
    hidden = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = (torch.randn(4096, 256, generator=torch.Generator().manual_seed(1)) * 0.2).bfloat16()
    tokens = ids(64, high=4096)
    wanted = exact(hidden.double() @ weight.double().T, tokens)[0]
    error = (linear_logprobs(hidden, weight, tokens).logprobs - wanted).abs().mean().item()
    rounded = (logits_logprobs(hidden @ weight.T, tokens).logprobs - wanted).abs().mean().item()
    assert error < 1e-5 < 1e-3 < rounded


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_rounds_nothing(backend, dtype):
    def everything():
        hidden, weight, bias = (x.requires_grad_() for x in model(dtype))
        out = linear_logprobs(hidden, weight, ids(N), bias=bias, backend=backend)
        loss = out.logprobs.sum() - 0.1 * out.entropy.sum()
        return [*(x.detach() for x in out), *torch.autograd.grad(loss, (hidden, weight, bias))]

    plain = everything()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        under = everything()
    for a, b in zip(under, plain, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_no_rows_and_no_targets():
    hidden, weight, _ = model()
    leaf = hidden[:0].clone().requires_grad_()
    out = linear_logprobs(leaf, weight, torch.zeros(0, dtype=torch.long))
    assert [x.shape for x in out] == [(0,), (0,), (0,)]
    out.logprobs.sum().backward()
    assert leaf.grad is not None and leaf.grad.shape == (0, H)
    assert linear_logprobs(hidden, weight, torch.zeros(N, 0, dtype=torch.long)).logprobs.shape == (N, 0)


def test_batch_shape_and_strides():
    hidden, weight, _ = model()
    tokens = ids(2, 3)
    strided = torch.stack([hidden[:6].view(2, 3, H), normal(2, 3, H).float()], -1)[..., 0]
    assert not strided.is_contiguous()
    flat = linear_logprobs(hidden[:6], weight.T.contiguous().T, tokens.view(6))
    for a, b in zip(linear_logprobs(strided, weight, tokens), flat, strict=True):
        assert a.shape == (2, 3)
        torch.testing.assert_close(a.view(6), b, rtol=1e-6, atol=1e-6)


def test_gradcheck():
    hidden, weight, bias = (x.double()[:5].requires_grad_() for x in model())
    tokens, mask = torch.tensor([0, 4, 2, 2, 1]), torch.tensor([True, True, False, True, True])

    def function(hidden, weight, bias):
        return tuple(
            linear_logprobs(hidden, weight, tokens, bias=bias, softcap=3.0, temperature=0.7, mask=mask, workspace=500)
        )

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(V, H + 1)}, rf"weight must be \(V, {H}\), got \({V}, {H + 1}\)"),
        ({"bias": torch.zeros(V + 1)}, rf"bias must be \({V},\), got \({V + 1},\)"),
        ({"workspace": 0}, "workspace must be a positive number of bytes, got 0"),
        ({"start": 3}, "start is 3, but without a group"),
        ({"mask": torch.zeros(N)}, r"mask must be bool \(7,\), got torch.float32 \(7,\)"),
        ({"logit_scale": 0.0}, "logit_scale must be positive, got 0.0"),
        (
            {"allowed_tokens": torch.zeros(3, 2, dtype=torch.long)},
            r"allowed_tokens of token ids must be \(7, 'S'\), got \(3, 2\)",
        ),
        (
            {"allowed_tokens": torch.zeros(3, dtype=torch.bool)},
            r"a bool allowed_tokens must be \(37,\) or \(7, 37\), got \(3,\)",
        ),
        ({"allowed_tokens": torch.zeros(N, 2)}, "allowed_tokens must be bool or token ids, got torch.float32"),
    ],
)
def test_bad_arguments_are_named(change, message):
    hidden, weight, _ = model()
    arguments = {"hidden": hidden, "weight": weight, "tokens": ids(N)} | change
    with pytest.raises(ValueError, match=message):
        linear_logprobs(**arguments)


@pytest.mark.long
def test_custom_operation_and_torch_compile():
    hidden, weight, bias = (x.detach().requires_grad_() for x in model())
    tokens, inv_temperature = ids(N, 1), torch.ones(N)
    arguments = (hidden, weight, bias, tokens, inv_temperature, None, None, None, 0, None, 1000, "torch")
    torch.library.opcheck(torch.ops.rl_kernels.linear_logprobs.default, placed(arguments))

    def loss(h, w):
        out = linear_logprobs(h, w, tokens[:, 0], temperature=0.8)
        return (out.logprobs - 0.1 * out.entropy).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    expected, actual = (torch.autograd.grad(f(hidden, weight), (hidden, weight)) for f in (loss, compiled))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_no_further_from_float64_than_whole_logits_in_float32(dtype):
    hidden = torch.randn(96, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight = (torch.randn(1500, 64, generator=torch.Generator().manual_seed(1)) * 0.3).to(dtype)
    tokens = ids(96, high=1500)

    def whole(h, w):
        log_p = torch.log_softmax(h @ w.T, -1)
        return log_p.gather(-1, tokens[:, None]).sum() + 0.1 * (log_p.exp() * log_p).sum()

    def ours(h, w):
        out = linear_logprobs(h, w, tokens)
        return out.logprobs.sum() - 0.1 * out.entropy.sum()

    def gradient(function, h, w):
        h, w = h.clone().requires_grad_(), w.clone().requires_grad_()
        return torch.autograd.grad(function(h, w), (h, w))

    exactly = gradient(whole, hidden.double(), weight.double())
    found = gradient(ours, hidden, weight)
    reference = [x.to(dtype) for x in gradient(whole, hidden.float(), weight.float())]
    for a, b, c in zip(found, reference, exactly, strict=True):
        error, least = ((x.double() - c).norm().item() for x in (a, b))
        assert error <= 1.05 * least, (error, least)
