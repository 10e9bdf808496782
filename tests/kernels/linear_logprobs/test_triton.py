"""The vendor's product and Triton's pass over it, in the interpreter: against float64, and what only this way can get
wrong: the state that is carried from block to block.
"""

import importlib

import pytest
import torch

from rl_kernels.common import matmul
from rl_kernels.common.arguments import Problem, Rows
from rl_kernels.common.blocks import Blocks
from tests.kernels.cases import INF, OPTIONS, N, V, ids, normal, sets
from tests.kernels.exact import exact
from tests.kernels.linear_logprobs.inputs import assert_equal_to_float64, model
from tests.kernels.operations import at_device, linear_logprobs
from tests.kernels.registry import imitates_a_gpu

backend = importlib.import_module("rl_kernels.linear_logprobs.triton")


@pytest.mark.parametrize("targets", [None, 3])
@pytest.mark.parametrize("option", list(OPTIONS))
def test_values_and_gradients(option, targets):
    assert_equal_to_float64("triton", OPTIONS[option], targets=targets, biased=targets is None)


@pytest.mark.parametrize("size", [Blocks(1, 1), Blocks(3, 16), Blocks(N, 20)])
@pytest.mark.parametrize("option", ["plain", "everything", "bool allowed_tokens"])
def test_any_cut_into_blocks(monkeypatch, size, option):
    monkeypatch.setattr(backend, "blocks", lambda *_: size)
    assert_equal_to_float64("triton", OPTIONS[option], targets=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    assert_equal_to_float64("triton", {"temperature": 0.7}, dtype=dtype)


def test_float64():
    hidden, weight, _ = (x.double() for x in model())
    wanted = exact(hidden @ weight.T, ids(N), softcap=3.0)
    for a, b in zip(linear_logprobs(hidden, weight, ids(N), softcap=3.0, backend="triton"), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_one_pass_over_each_block(monkeypatch):
    launched = []

    class Recorded:
        def __getitem__(self, grid):
            launched.append(grid)
            return kernel[grid]

    kernel = backend.state_kernel
    monkeypatch.setattr(backend, "state_kernel", Recorded())
    monkeypatch.setattr(backend, "blocks", lambda *_: Blocks(4, 20))
    hidden, weight, _ = model()
    linear_logprobs(hidden, weight, ids(N), backend="triton")
    assert launched == [(4,), (4,), (3,), (3,)]


def test_impossible_entries_and_rows_that_have_nothing_until_a_later_block(monkeypatch):
    monkeypatch.setattr(backend, "blocks", lambda *_: Blocks(N, 8))
    hidden, weight, bias = (x.clone() for x in model())
    bias[:20] = -INF
    tokens, allowed_tokens = ids(N), torch.full((N, 2), -1)
    tokens[0], tokens[1:3] = 3, 30
    allowed_tokens[0], allowed_tokens[1], allowed_tokens[2:, 0] = torch.tensor([3, 4]), torch.tensor([30, 31]), 25
    got = linear_logprobs(hidden, weight, tokens, bias=bias, allowed_tokens=allowed_tokens, backend="triton")
    logits = (hidden.double() @ weight.double().T + bias.double().nan_to_num(neginf=0.0)).masked_fill(
        bias.isinf()[None, :], -INF
    )
    assert got.logsumexp[0] == -INF and got.entropy[0] == 0
    for a, b in zip(got, exact(logits, tokens, allowed_tokens=allowed_tokens), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-5)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")  # how the interpreter takes a maximum
def test_not_a_number_is_not_hidden(monkeypatch):
    monkeypatch.setattr(backend, "blocks", lambda *_: Blocks(N, 20))
    hidden, weight, bias = (x.clone() for x in model())
    hidden[1, 3], bias[0] = float("nan"), -INF
    got = linear_logprobs(hidden, weight, ids(N).clamp(min=1), bias=bias, softcap=3.0, backend="triton")
    assert all(x[1].isnan() and x[2:].isfinite().all() and x[0].isfinite() for x in got)


def test_strides():
    hidden, weight, bias = model()
    wide = torch.stack([hidden, normal(*hidden.shape).float()], -1)[..., 0]
    strided = torch.stack([bias, bias], -1)[:, 0]
    allowed_tokens = torch.zeros(N, V, 2, dtype=torch.bool)
    allowed_tokens[..., 0] = torch.rand(N, V, generator=torch.Generator().manual_seed(0)) < 0.5
    plain, other = (
        linear_logprobs(h, w, ids(N), bias=b, allowed_tokens=s, backend="triton")
        for h, w, b, s in (
            (hidden, weight, bias, allowed_tokens[..., 0].contiguous()),
            (wide, weight.T.contiguous().T, strided, allowed_tokens[..., 0]),
        )
    )
    for a, b in zip(plain, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_states_of_shards_merge_to_the_whole():
    from rl_kernels.common.row_state import finalize_row_state, merge_all

    hidden, weight, bias = model()
    tokens, allowed_tokens, inv_temperature = ids(N, 3), sets(), torch.linspace(0.5, 2.0, N)

    def shard(first, last):
        rows = Rows(tokens, inv_temperature, 3.0, allowed_tokens, None)
        return at_device(backend.forward)(Problem(hidden, weight[first:last], bias[first:last], rows, first), 4096)

    whole, parts = shard(0, V), merge_all([shard(0, 5), shard(5, 30), shard(30, V)])
    for a, b in zip(finalize_row_state(parts), finalize_row_state(whole), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


class AsOnAGpu:
    """torch.mm and torch.addmm with the float32 results of half-precision matrices that they have on a GPU alone."""

    def __init__(self, monkeypatch, *, product, accumulate):
        self.calls, mm, addmm = [], torch.mm, torch.addmm

        def exact_mm(a, b, *, out_dtype=None):
            self.calls += ["mm"] if out_dtype else []
            return mm(a, b) if out_dtype is None else mm(a.to(out_dtype), b.to(out_dtype))

        def exact_addmm(total, a, b, *, out_dtype, out):
            self.calls.append("addmm")
            return addmm(total, a.to(out_dtype), b.to(out_dtype), out=out)

        def own(a, b):
            half = a.dtype == b.dtype == torch.bfloat16
            return matmul.Native(product and half, accumulate and half)

        monkeypatch.setattr(torch, "mm", exact_mm)
        monkeypatch.setattr(torch, "addmm", exact_addmm)
        for module in ("common.matmul", "common.blocks", "linear_logprobs.backward"):
            monkeypatch.setattr(importlib.import_module(f"rl_kernels.{module}"), "native", own)


@imitates_a_gpu
@pytest.mark.parametrize("accumulate", [True, False])
def test_products_that_only_a_gpu_has(monkeypatch, accumulate):
    """The branch for a GPU's half precision: values as exact, gradients of dL/dlogits in the operands' precision."""
    hidden, weight, _ = (x.detach().requires_grad_() for x in model(torch.bfloat16))

    def everything():
        out = linear_logprobs(hidden, weight, ids(N), temperature=0.7, backend="triton")
        return out, torch.autograd.grad(out.logprobs.sum() - 0.1 * out.entropy.sum(), (hidden, weight))

    (values, gradients), machine = everything(), AsOnAGpu(monkeypatch, product=True, accumulate=accumulate)
    other, rounded = everything()
    assert all(torch.equal(a, b) for a, b in zip(other, values, strict=True))
    for a, b in zip(rounded, gradients, strict=True):
        assert 0 < (a - b).float().norm() <= 2**-7 * b.float().norm()
    assert machine.calls == ["mm", "mm", "addmm", "addmm"] if accumulate else ["mm"] * 4


def test_what_torch_cannot_do_is_found_out_once_and_not_asked_of_it():
    """This machine's torch has no float32 product of halves: asked, it says so, and the operands are widened."""
    assert matmul._tried(torch.device("cpu"), torch.bfloat16) == matmul.Native(False, False)
    total, a = torch.ones(3, 3), torch.ones(3, 3, dtype=torch.bfloat16)
    matmul.accumulate(total, a, a)
    assert total.tolist() == [[4.0] * 3] * 3 and matmul.matmul(a, a, torch.float32).dtype == torch.float32


def test_a_full_memory_is_not_taken_for_what_torch_cannot_do():
    def full():
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        matmul._gives(1.0, full)


@imitates_a_gpu
def test_error_of_gradients_in_a_gpus_half_precision(monkeypatch):
    """docs/kernels.md: up to 1.5 times that of float32 gradients rounded once, since dL/dlogits is rounded, too."""
    hidden = torch.randn(1024, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = (torch.randn(1500, 64, generator=torch.Generator().manual_seed(1)) * 0.3).bfloat16()
    tokens, advantages = ids(1024, high=1500), normal(1024, scale=1.0)

    def gradient(logprobs, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
        return torch.autograd.grad((advantages.float() * logprobs(*leaves)).sum(), leaves)

    def whole(h, w):
        return torch.log_softmax(h @ w.T, -1).gather(-1, tokens[:, None])[:, 0]

    exactly, rounded = gradient(whole, torch.float64), [x.bfloat16() for x in gradient(whole, torch.float32)]
    AsOnAGpu(monkeypatch, product=True, accumulate=True)
    ours = gradient(lambda h, w: linear_logprobs(h, w, tokens, backend="torch").logprobs, torch.bfloat16)
    for a, b, c in zip(ours, rounded, exactly, strict=True):
        error, least = ((x.double() - c).norm().item() for x in (a, b))
        assert least < error < 1.55 * least, (error / c.norm(), least / c.norm())
