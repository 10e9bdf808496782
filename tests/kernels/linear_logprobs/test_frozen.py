"""What needs no gradient costs none: of a frozen head, a LoRA, or detached hidden states, on every backend."""

import importlib

import pytest
import torch

from rl_kernels.common.arguments import Problem, Rows
from rl_kernels.linear_logprobs.backward import Needed
from tests.kernels.cases import N, V, ids, normal
from tests.kernels.live_bytes import LiveBytes
from tests.kernels.operations import linear_logprobs, linear_policy_loss, linear_topk_logprobs, placed
from tests.kernels.registry import each_backend

H = 19
WANTED = [(True, False, False), (False, True, False), (False, False, True), (True, True, False), (True, False, True)]


def model():
    return normal(N, H, scale=1.0).float(), normal(V, H, scale=1.0, seed=1).float(), normal(V, seed=2).float()


def gradients(operation, wanted, backend):
    leaves = [x.requires_grad_(w) for x, w in zip(model(), wanted, strict=True)]
    operation(*leaves, backend).backward()
    return [x.grad for x in leaves]


def token_loss(hidden, weight, bias, backend):
    out = linear_logprobs(hidden, weight, ids(N, 2), bias=bias, softcap=9.0, backend=backend)
    return out.logprobs.sum() - 0.3 * out.entropy.sum() + 0.1 * out.logsumexp.sum()


def top_k_loss(hidden, weight, bias, backend):
    return linear_topk_logprobs(hidden, weight, 3, bias=bias, backend=backend).logprobs.sum()


def fused_loss(hidden, weight, bias, backend):
    def loss(logprobs, entropy, logsumexp, rows):
        return -logprobs.sum() - 0.1 * entropy.sum()

    return linear_policy_loss(hidden, weight, ids(N), loss, bias=bias, fused=True, backend=backend)[0]


LOSSES = {"linear_logprobs": token_loss, "topk_logprobs": top_k_loss, "linear_policy_loss": fused_loss}


@pytest.mark.long
@pytest.mark.parametrize("wanted", WANTED, ids=str)
@each_backend(*LOSSES)
def test_the_gradients_that_are_needed_are_the_same_bits(operation, backend, wanted):
    whole = gradients(LOSSES[operation], (True, True, True), backend)
    found = gradients(LOSSES[operation], wanted, backend)
    for name, a, b, needed in zip(("hidden", "weight", "bias"), found, whole, wanted, strict=True):
        assert (a is not None) == needed, name
        if a is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=0 if backend != "reference" else 1e-5)


@pytest.mark.long
def test_a_frozen_weight_has_no_gradient_in_memory_and_no_matmul(monkeypatch):
    """Of the backward's three GEMMs two are left, and of memory neither the sum in float32 nor the gradient."""
    run = importlib.import_module("rl_kernels.linear_logprobs.torch")
    shared = importlib.import_module("rl_kernels.linear_logprobs.backward")
    vocab, size, calls = 1000, 48, []

    def count(*arguments, function=shared.accumulate):
        calls.append(arguments[0].shape)
        function(*arguments)

    monkeypatch.setattr(shared, "accumulate", count)
    hidden, weight = normal(2, size).bfloat16(), normal(vocab, size, seed=1).bfloat16()
    rows = Rows(ids(2, 1, high=vocab), torch.ones(2), None, None, None)
    outputs = cotangents = placed((torch.ones(2, 1), torch.ones(2), torch.ones(2)))
    problem = placed(Problem(hidden, weight, None, rows, 0))

    def backward(needed):
        calls.clear()
        with LiveBytes() as memory:
            run.backward(problem, 1, outputs, cotangents, needed)
        return memory.peak, len(calls)

    (trained, every), (frozen, some) = backward(Needed()), backward(Needed(weight=False))
    assert every == 2 * some > 0
    # 4 bytes a number of the sum, 2 of the gradient.
    assert trained >= 6 * vocab * size > 100 * frozen


def test_under_torch_compile():
    """What needs a gradient is known when the graph is made."""
    hidden, weight, _ = model()
    leaf, tokens = hidden.requires_grad_(), ids(N)

    def loss(h, w):
        return linear_logprobs(h, w, tokens, temperature=0.8).logprobs.sum()

    expected, compiled = loss, torch.compile(loss, fullgraph=True, backend="aot_eager")
    a, b = (torch.autograd.grad(f(leaf, weight), leaf)[0] for f in (expected, compiled))
    assert torch.equal(a, b)
