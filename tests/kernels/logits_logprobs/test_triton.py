"""What only a kernel can get wrong: block edges, strides, offsets beyond 2³¹, packed sets."""

import pytest
import torch

from rl_kernels.common.token_masks import packed
from tests.kernels.cases import INF, ids, normal
from tests.kernels.exact import allowed_mask, exact
from tests.kernels.operations import at_device, logits_logprobs, placed, returned


@pytest.mark.parametrize("vocabulary", [1, 127, 128, 4095, 4097, 50257])
def test_a_vocabulary_that_is_no_multiple_of_any_block(vocabulary):
    logits, tokens = normal(2, vocabulary).float(), ids(2, high=vocabulary)
    leaf, double = logits.clone().requires_grad_(), logits.double().requires_grad_()
    got, wanted = (
        logits_logprobs(leaf, tokens, temperature=0.9, backend="triton"),
        exact(double, tokens, temperature=0.9),
    )
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-6, atol=2e-5)
    got.logprobs.sum().backward()
    wanted[0].sum().backward()
    assert leaf.grad is not None and double.grad is not None
    torch.testing.assert_close(leaf.grad.double(), double.grad, rtol=1e-5, atol=1e-6)


def test_rows_whose_whole_first_blocks_are_impossible():
    logits, tokens = torch.full((3, 9000), -INF), torch.tensor([8999, 0, 8999])
    logits[0, 8000:], logits[2] = torch.linspace(-90.0, 90.0, 1000), -INF
    for a, b in zip(logits_logprobs(logits, tokens, backend="triton"), exact(logits, tokens), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("inplace", [False, True])
def test_strided_logits_and_gradient(inplace):
    stored = normal(11, 2, 5).float()  # vocabulary first, every second row
    tokens = ids(5, high=11)
    leaf = placed(stored.clone())[:, 0].T.requires_grad_()
    assert leaf.stride() == (1, 10)
    out = logits_logprobs(leaf, tokens, softcap=2.0, inplace_backward=inplace, backend="triton")
    (gradient,) = returned(torch.autograd.grad(out.entropy.sum(), leaf))
    double = stored[:, 0].T.double().requires_grad_()
    (wanted,) = torch.autograd.grad(exact(double, tokens, softcap=2.0)[1].sum(), double)
    torch.testing.assert_close(gradient.double(), wanted, rtol=1e-5, atol=1e-6)


def test_row_offsets_beyond_two_to_the_31():
    """A row stride of 2³⁰ + 7 elements: the third row begins beyond 2³¹. Its memory is reserved, not touched."""
    stride = 2**30 + 7
    storage = torch.empty(2 * stride + 40, dtype=torch.bfloat16)
    logits = torch.as_strided(storage, (3, 37), (stride, 1))
    logits.copy_(normal(3, 37))
    tokens = ids(3)
    for a, b in zip(logits_logprobs(logits, tokens, backend="triton"), exact(logits, tokens), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 1000])
def test_packed_sets(vocabulary):
    allowed_tokens = torch.randint(-1, vocabulary, (4, 6), generator=torch.Generator().manual_seed(0))
    allowed_tokens[2] = -1
    as_bool = allowed_mask(allowed_tokens, vocabulary, 4)
    for form in (allowed_tokens, as_bool):
        words = at_device(packed)(form, vocabulary)
        assert words.dtype == torch.int32 and words.shape == (4, -(-vocabulary // 32))
        bits = (words[:, :, None] >> torch.arange(32)) & 1
        assert torch.equal(bits.view(4, -1)[:, :vocabulary].bool(), as_bool)


def test_packed_sets_a_few_rows_at_a_time(monkeypatch):
    import importlib

    backend = importlib.import_module("rl_kernels.logits_logprobs.triton")
    logits, tokens = normal(7, 100).float(), ids(7, high=100)
    allowed_tokens = torch.rand(7, 100, generator=torch.Generator().manual_seed(1)) < 0.3
    whole = logits_logprobs(logits, tokens, allowed_tokens=allowed_tokens, backend="triton")
    monkeypatch.setattr(backend, "_PACKED", 26)  # two rows of 100 bits
    for a, b in zip(
        logits_logprobs(logits, tokens, allowed_tokens=allowed_tokens, backend="triton"), whole, strict=True
    ):
        assert torch.equal(a, b)


def test_float64():
    logits, tokens = normal(3, 300), ids(3, high=300)
    for a, b in zip(
        logits_logprobs(logits, tokens, softcap=3.0, backend="triton"), exact(logits, tokens, softcap=3.0), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
