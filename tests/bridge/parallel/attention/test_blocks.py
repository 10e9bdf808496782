"""One block: every operation against the definition, and parts of the keys that make up the whole."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rl_bridge.parallel.attention import blocks
from rl_bridge.parallel.attention.blocks import merge_
from tests.bridge.parallel.attention import reference

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2}
SCALE = 0.3


def heads_first(x):
    return x.transpose(0, 1)[None]


def tokens_first(x):
    return x[0].transpose(0, 1)


@pytest.fixture(params=["best", "math"])
def operation(request, monkeypatch):
    """The operation for the device, and the one for anything."""
    if request.param == "math":
        monkeypatch.setattr(blocks, "operation", lambda q, v: "math")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("lengths", [(7, 7), (1, 1), (5, 9), (40, 3), (1, 33)])
@pytest.mark.parametrize("dim", [8, 20])
def test_a_block_is_attention(operation, device, dtype, lengths, dim):
    queries, keys = lengths
    causal = queries == keys
    q, _, _, grad = reference.tensors(queries, dim=dim, dtype=dtype, device=device)
    _, k, v, _ = reference.tensors(keys, dim=dim, dtype=dtype, device=device, seed=1)
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(0 if causal else keys)
    wide = [x.double() for x in (q, k, v)]
    want = reference.with_gradients(lambda q, k, v: reference.attention(q, k, v, mask, SCALE)[0], *wide, grad)
    arguments = [heads_first(x) for x in (q, k, v)]
    out, lse = blocks.forward(*arguments, causal=causal, scale=SCALE)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    want_lse = reference.attention(q, k, v, mask, SCALE)[1]
    assert (tokens_first(lse) - want_lse).abs().max() < 10 * TOLERANCE[dtype]
    gradients = blocks.backward(heads_first(grad), *arguments, out, lse, causal=causal, scale=SCALE)
    got = [tokens_first(x).double().cpu() for x in (out, *gradients)]
    assert reference.distance(got[:1], want[:1]) < TOLERANCE[dtype]
    # With one key the gradients of queries and keys are 0 but for rounding: compared on the scale of the largest.
    largest = max(x.abs().max() for x in want[1:])
    assert max((a - b).abs().max() for a, b in zip(got[1:], want[1:], strict=True)) < TOLERANCE[dtype] * largest


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("far", [0.0, 60.0])
def test_blocks_of_some_keys_merge_into_all(operation, device, dtype, far):
    q, _, _, grad = reference.tensors(6, dtype=dtype, device=device)
    _, k, v, _ = reference.tensors(11, dtype=dtype, device=device, seed=1)
    # Keys whose scores are far above the others' underflow no merged value.
    k[4:7] += far
    mask = torch.ones(6, 11, dtype=torch.bool, device=device)
    wide = [x.double() for x in (q, k, v)]
    want = reference.with_gradients(lambda q, k, v: reference.attention(q, k, v, mask, SCALE)[0], *wide, grad)
    parts = [slice(0, 4), slice(4, 7), slice(7, 11)]
    arguments = [[heads_first(x) for x in (q, k[part], v[part])] for part in parts]
    computed = [blocks.forward(*x, causal=False, scale=SCALE) for x in arguments]
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    out, lse = (tokens_first(x).to(exact).clone() for x in computed[0])
    for block_out, block_lse in computed[1:]:
        merge_(out, lse, tokens_first(block_out), tokens_first(block_lse))
    whole = [heads_first(x) for x in (grad, out.to(dtype), lse)]
    gradients = [blocks.backward(whole[0], *x, *whole[1:], causal=False, scale=SCALE) for x in arguments]
    dq = sum(g[0].to(exact) for g in gradients)
    dk, dv = (torch.cat([g[i] for g in gradients], 2) for i in (1, 2))
    got = [out.double().cpu(), *(tokens_first(x).double().cpu() for x in (dq, dk, dv))]
    assert all(torch.isfinite(x).all() for x in got)
    scores = SCALE * (q.double()[:, 0] @ k.double()[:, 0].T).abs().max()
    largest = max(x.abs().max() for x in want[1:])
    # A score is rounded in proportion to itself, and its exponential in proportion to that.
    tolerance = TOLERANCE[dtype] * (2 + scores.item())
    assert reference.distance(got[:1], want[:1]) < tolerance
    assert max((a - b).abs().max() for a, b in zip(got[1:], want[1:], strict=True)) < tolerance * largest


@pytest.mark.parametrize(
    "dtype, dim, value_dim, expected",
    [
        (torch.bfloat16, 64, 64, "cuda_flash"),
        (torch.float16, 256, 256, "cuda_flash"),
        (torch.bfloat16, 512, 512, "cuda_efficient"),
        (torch.float32, 64, 64, "cuda_efficient"),
        (torch.float64, 64, 64, "math"),
        (torch.bfloat16, 20, 20, "math"),
        (torch.bfloat16, 64, 32, "math"),
    ],
)
def test_cuda_takes_the_fastest_operation_that_there_is(dtype, dim, value_dim, expected, monkeypatch):
    with FakeTensorMode():
        q, v = (torch.empty(1, 4, 33, size, dtype=dtype, device="cuda") for size in (dim, value_dim))
        monkeypatch.setattr(blocks, "has_flash", lambda device: device == q.device)
        assert blocks.operation(q, v) == expected
        monkeypatch.setattr(blocks, "has_flash", lambda device: False)
        assert blocks.operation(q, v) == expected.replace("flash", "efficient")


@pytest.mark.parametrize("name, dtype", [("cuda_flash", torch.bfloat16), ("cuda_efficient", torch.float32)])
def test_the_operations_of_cuda_take_what_they_are_given(name, dtype, monkeypatch):
    # Shapes, dtypes and signatures, on tensors without values: also where there is no GPU.
    monkeypatch.setattr(blocks, "operation", lambda q, v: name)
    q = torch.empty(1, 4, 33, 64, dtype=dtype, device="meta")
    k, v = (torch.empty(1, 2, 47, 64, dtype=dtype, device="meta") for _ in range(2))
    out, lse = blocks.forward(q, k, v, causal=False, scale=SCALE)
    assert (out.shape, out.dtype) == (q.shape, dtype)
    assert (lse.shape, lse.dtype) == ((1, 4, 33), torch.float32)
    gradients = blocks.backward(torch.empty_like(out), q, k, v, out, lse, causal=False, scale=SCALE)
    assert [x.shape for x in gradients] == [x.shape for x in (q, k, v)]


def test_no_block_is_empty():
    q, k, v, _ = (heads_first(x) for x in reference.tensors(3))
    with pytest.raises(AssertionError):
        blocks.forward(q[:, :, :0], k, v, causal=False, scale=SCALE)
