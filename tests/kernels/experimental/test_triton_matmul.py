"""The Triton backend in its interpreter: every option against float64, and what only a kernel can get wrong."""

import importlib
from itertools import pairwise

import pytest
import torch

from rl_kernels.common.arguments import Problem, Rows
from rl_kernels.linear_logprobs.backward import Needed
from tests.kernels.cases import INF, OPTIONS, N, V, ids, normal, sets
from tests.kernels.exact import exact, gradients
from tests.kernels.linear_logprobs.inputs import H, assert_equal_to_float64, model
from tests.kernels.operations import at_device, linear_logprobs

backend = importlib.import_module("rl_kernels.experimental.triton_matmul.linear_logprobs")


@pytest.mark.parametrize("targets", [None, 3])
@pytest.mark.parametrize("option", list(OPTIONS))
def test_values_and_gradients(option, targets):
    assert_equal_to_float64("triton_matmul", OPTIONS[option], targets=targets, biased=targets is None)


@pytest.mark.long
@pytest.mark.parametrize("workspace", [1, 4 * 5 * H * 3])
@pytest.mark.parametrize("option", ["plain", "everything"])
def test_any_cut_into_blocks(workspace, option):
    assert_equal_to_float64("triton_matmul", OPTIONS[option], workspace=workspace)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    assert_equal_to_float64("triton_matmul", {"temperature": 0.7}, dtype=dtype)


def test_the_kernels_ran(monkeypatch):
    launched = []

    class Recorded:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            launched.append((self.kernel, grid))
            return self.kernel[grid]

    portable = importlib.import_module("rl_kernels.linear_logprobs.triton")
    kernels = backend.forward_kernel, portable.dlogits_kernel
    monkeypatch.setattr(backend, "forward_kernel", Recorded(kernels[0]))
    monkeypatch.setattr(portable, "dlogits_kernel", Recorded(kernels[1]))
    hidden, weight, _ = (x.requires_grad_() for x in model())
    linear_logprobs(hidden, weight, ids(N), backend="triton_matmul").logprobs.sum().backward()
    assert launched == [(kernels[0], (1,)), (kernels[1], (N, 1))]


@pytest.mark.parametrize("count", [1, 16, 17])
@pytest.mark.parametrize(("vocabulary", "hidden_size"), [(1, 1), (16, 16), (17, 33), (530, 5)])
def test_sizes_at_and_beside_the_edges_of_tiles_and_parts(count, vocabulary, hidden_size):
    hidden, weight = normal(count, hidden_size, scale=1.0).float(), normal(vocabulary, hidden_size, seed=1).float()
    tokens = ids(count, 2, high=vocabulary)
    tokens[0] = vocabulary - 1
    got = linear_logprobs(hidden, weight, tokens, backend="triton_matmul")
    for a, b in zip(got, exact(hidden.double() @ weight.double().T, tokens), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-5)


@pytest.mark.long
def test_more_blocks_of_rows_than_a_group(monkeypatch):
    """Programs are dealt to groups of row blocks: also to a last group that is not full, with several parts."""
    monkeypatch.setattr(backend, "GROUP", 2)
    hidden, weight, tokens = normal(70, 3, scale=1.0).float(), normal(520, 3, seed=1).float(), ids(70, high=520)
    got = linear_logprobs(hidden, weight, tokens, backend="triton_matmul")
    for a, b in zip(got, exact(hidden.double() @ weight.double().T, tokens), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-5)


def test_impossible_entries():
    """A bias of −inf excludes an entry, whole tiles and whole rows' tokens; a row may have nothing at all."""
    hidden, weight, bias = (x.clone() for x in model())
    bias[:20] = -INF
    tokens, allowed_tokens = ids(N), torch.full((N, 2), -1)
    tokens[0], tokens[1:3] = 3, 30
    allowed_tokens[0], allowed_tokens[1], allowed_tokens[2:, 0] = torch.tensor([3, 4]), torch.tensor([30, 31]), 25
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    got = linear_logprobs(hidden, weight, tokens, bias=bias, allowed_tokens=allowed_tokens, backend="triton_matmul")
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    finite = torch.where(doubles[2].isfinite(), doubles[2], 0.0)
    logits = doubles[0] @ doubles[1].T + finite
    wanted = exact(logits.masked_fill(doubles[2].isinf()[None, :], -INF), tokens, allowed_tokens=allowed_tokens)
    assert got.logsumexp[0] == -INF and got.entropy[0] == 0
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.double(), b.detach(), rtol=1e-5, atol=2e-5)
    c = normal(N, seed=5), normal(N, seed=6), normal(N, seed=7)
    mine, theirs = gradients(got, [x.float() for x in c], leaves), gradients(wanted, c, doubles)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-4)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")  # how the interpreter takes a maximum
def test_not_a_number_is_not_hidden():
    hidden, weight, bias = (x.clone() for x in model())
    hidden[1, 3], bias[0] = float("nan"), -INF
    got = linear_logprobs(hidden, weight, ids(N).clamp(min=1), bias=bias, softcap=3.0, backend="triton_matmul")
    assert all(x[1].isnan() and x[2:].isfinite().all() and x[0].isfinite() for x in got)


@pytest.mark.parametrize("entries", [16, 32, 64])
def test_kept_sets_in_tiles_of_one_and_two_words(monkeypatch, entries):
    whole, allowed_tokens = backend.configuration, torch.rand(N, 100, generator=torch.Generator().manual_seed(3)) < 0.5
    monkeypatch.setattr(backend, "configuration", lambda *a: whole(*a)._replace(block_n=entries))
    hidden, weight, tokens = normal(N, 3, scale=1.0).float(), normal(100, 3, seed=1).float(), ids(N, 2, high=100)
    tokens[0], allowed_tokens[0, tokens[0, 0]] = tokens[0, 0], True
    got = linear_logprobs(hidden, weight, tokens, allowed_tokens=allowed_tokens, backend="triton_matmul")
    for a, b in zip(
        got, exact(hidden.double() @ weight.double().T, tokens, allowed_tokens=allowed_tokens), strict=True
    ):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-5)


def test_strides():
    hidden, weight, bias = model()
    wide = torch.stack([hidden, normal(N, H).float()], -1)[..., 0]
    strided = torch.stack([bias, bias], -1)[:, 0]
    assert not wide.is_contiguous() and not strided.is_contiguous()
    tokens = ids(N)
    plain, other = (
        linear_logprobs(h, w, tokens, bias=b, backend="triton_matmul")
        for h, w, b in ((hidden, weight, bias), (wide, weight.T.contiguous().T, strided))
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


def test_offsets_beyond_two_to_the_31():
    """The weight's third row begins beyond 2³¹ elements. Its memory is reserved, not touched."""
    stride = 2**30 + 7
    weight = torch.as_strided(torch.empty(2 * stride + 40, dtype=torch.bfloat16), (3, 5), (stride, 1))
    weight.copy_(normal(3, 5))
    hidden, tokens = normal(N, 5).bfloat16(), ids(N, high=3)
    got = linear_logprobs(hidden, weight, tokens, backend="triton_matmul")
    for a, b in zip(got, exact(hidden.double() @ weight.double().T, tokens), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-5)


def test_a_row_does_not_depend_on_the_other_rows():
    hidden, weight, _ = model()
    tokens = ids(N)
    whole = linear_logprobs(hidden, weight, tokens, backend="triton_matmul")
    for row in range(N):
        alone = linear_logprobs(hidden[row:][:1], weight, tokens[row:][:1], backend="triton_matmul")
        assert all(torch.equal(a[row:][:1], b) for a, b in zip(whole, alone, strict=True))


def test_a_shard_counts_tokens_and_kept_sets_from_its_start():
    """States of unequal shards, merged, are the whole vocabulary's; so are the shards' gradients put together."""
    from rl_kernels.common.row_state import finalize_row_state, merge_all

    hidden, weight, bias = model()
    tokens, allowed_tokens, inv_temperature, cuts = ids(N, 3), sets(), torch.linspace(0.5, 2.0, N), [0, 5, 30, V]

    def shard(first, last, run, *more):
        rows = Rows(tokens, inv_temperature, 3.0, allowed_tokens, None)
        return at_device(run)(Problem(hidden, weight[first:last], bias[first:last], rows, first), 4096, *more)

    states = [shard(a, b, backend.forward) for a, b in pairwise(cuts)]
    outputs = finalize_row_state(merge_all(states))
    for a, b in zip(outputs, finalize_row_state(shard(0, V, backend.forward)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    c = (normal(N, 3, seed=5).float(), normal(N, seed=6).float(), normal(N, seed=7).float())
    parts = [shard(a, b, backend.backward, outputs, c, Needed()) for a, b in pairwise(cuts)]
    d_hidden, d_weight, d_bias = shard(0, V, backend.backward, outputs, c, Needed())
    torch.testing.assert_close(sum(p[0] for p in parts), d_hidden, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([p[1] for p in parts]), d_weight, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([p[2] for p in parts]), d_bias, rtol=1e-5, atol=1e-5)


def test_float64():
    hidden, weight, _ = (x.double() for x in model())
    wanted = exact(hidden @ weight.T, ids(N), softcap=3.0)
    for a, b in zip(linear_logprobs(hidden, weight, ids(N), softcap=3.0, backend="triton_matmul"), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_configurations_do_not_depend_on_rows_and_cover_every_architecture():
    from rl_kernels.experimental.triton_matmul.configurations import _PART, configuration, part_of

    for name in ("sm_80", "sm_86", "sm_90", "sm_100", "sm_103", "sm_120", "gfx90a", "gfx942", "gfx1100", "cpu"):
        for width in (2, 4, 8):
            for vocabulary, hidden_size in ((1, 1), (128256, 4096)):
                tile = configuration(name, width, hidden_size, vocabulary)
                assert part_of(vocabulary) % tile.block_n == 0 == _PART % tile.block_n
                assert min(tile[:3]) >= 16 and tile.block_n <= 64
    assert configuration("sm_90", 2, 4097, 128256).block_k == 32 < configuration("sm_90", 2, 4096, 128256).block_k
    assert configuration("sm_103", 4, 4096, 128256) == configuration("sm_100", 4, 4096, 128256)
    assert configuration("sm_120", 2, 4096, 128256) == configuration("sm_80", 2, 4096, 128256)
    assert configuration("sm_86", 2, 4096, 128256) == configuration("sm_80", 2, 4096, 128256)
    assert -(-128256 // part_of(128256)) == 8
