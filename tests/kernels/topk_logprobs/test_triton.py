"""What is Triton's alone: blocks, candidates, bounds and rooms, at sizes that its interpreter can afford."""

import importlib

import pytest
import torch

from rl_kernels.common.arguments import Problem, Rows
from rl_kernels.common.blocks import Blocks
from rl_kernels.common.row_state import finalize_row_state
from tests.kernels.cases import INF, ids, normal
from tests.kernels.exact import exact
from tests.kernels.operations import at_device, placed, returned

triton, in_torch = (importlib.import_module(f"rl_kernels.topk_logprobs.{name}") for name in ("triton", "torch"))
ids_of = at_device(triton.ids)
V, BLOCK = 83, 16


@pytest.fixture
def small(monkeypatch):
    """Six blocks a row, and room for a few."""
    monkeypatch.setattr(triton, "BLOCK_N", BLOCK)
    monkeypatch.setattr(triton, "CANDIDATE_BLOCK", 64)
    monkeypatch.setattr(triton, "_CANDIDATES", 12)


def adversarial():
    z = normal(12, V).float()
    z[0], z[1] = 1.0, -INF
    z[2], z[3] = torch.arange(float(V)), -torch.arange(float(V))
    z[4, 3:] = -INF
    z[5] = torch.tensor([90.0, -90.0]).repeat(V)[:V]
    z[6] = torch.tensor([0.0, -0.0, -1.0]).repeat(V)[:V]
    z[7, ::5], z[7, 2::5] = float("nan"), INF
    z[8] = (z[8] / 2).round()
    # The cut falls between equals that are in different blocks.
    z[9], z[9, [BLOCK - 1, BLOCK, 3 * BLOCK, V - 1]] = 0.0, 2.0
    z[10] = 1e-40 * ids(V, high=5)
    return z


def sorted_ids(z, k):
    return z.double().sort(dim=-1, descending=True, stable=True).indices[:, :k]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("k", "width"), [(3, V), (BLOCK + 4, 40), (V, V)])
def test_ids_of_adversarial_rows(k, width):
    z = adversarial()[:, :width]
    assert torch.equal(ids_of(z, None, None, k), sorted_ids(z, k))


@pytest.mark.long
@pytest.mark.usefixtures("small")
def test_ids_with_kept_sets_of_either_form_and_masked_rows(monkeypatch):
    n, width = 6, 40
    z, mask = adversarial()[:n, :width], torch.arange(n) % 4 != 1
    listed = torch.stack([torch.randperm(width, generator=torch.Generator().manual_seed(row))[:7] for row in range(n)])
    listed[::3, 2:] = -1
    allowed = torch.zeros(n, width + 1, dtype=torch.bool).scatter_(1, listed.where(listed >= 0, width), True)[:, :width]
    wanted = sorted_ids(z.masked_fill(~allowed, -INF), 5).masked_fill(~mask[:, None], 0)
    # Four rows at a time, and a kept set whose entries are not neighbours in memory.
    monkeypatch.setattr(triton, "_WORKSPACE", 4 * (8 * (5 * 2 + 15) + 2 * width + 32 * 7))
    for allowed_tokens in (listed, allowed.T.contiguous().T):
        assert torch.equal(ids_of(z, allowed_tokens, mask, 5), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ids_of_one_row_of_no_row_and_of_rows_of_any_stride(dtype):
    z = normal(V, 3).to(dtype).T
    assert z.stride() == (1, 3)
    assert torch.equal(ids_of(z, None, None, 6), sorted_ids(z, 6))
    assert torch.equal(ids_of(z[1:2], None, None, 6), sorted_ids(z[1:2], 6))
    assert ids_of(z[:0], None, None, 6).shape == (0, 6)


@pytest.mark.parametrize("k", [64, 1100])
def test_ids_with_the_blocks_of_a_gpu(k):
    """Three blocks and a bit, in bfloat16, where many entries tie; at k = 1100 places for two blocks."""
    z = normal(2, 3 * triton.BLOCK_N + 77).bfloat16()
    assert torch.equal(ids_of(z, None, None, k), sorted_ids(z, k))
    assert triton.rooms(k, triton.BLOCK_N) == {64: 63, 1100: 2}[k]


def test_row_offsets_beyond_two_to_the_31():
    """A row stride of 2³⁰ + 7 elements: the third row begins beyond 2³¹. Its memory is reserved, not touched."""
    stride = 2**30 + 7
    z = torch.as_strided(torch.empty(2 * stride + 40, dtype=torch.bfloat16), (3, 37), (stride, 1))
    z.copy_(normal(3, 37))
    assert torch.equal(ids_of(z, None, None, 4), sorted_ids(z, 4))


def swept(z, k, patience):
    """Candidates and bounds after a sweep of rows."""
    z, blocks = placed(z), -(-z.shape[1] // BLOCK)
    found = triton.Candidates(len(z), k, blocks, BLOCK, z.device)
    found.search(z, None, 0, z.shape[1], 0, patience=patience)
    return found


def test_a_block_adds_k_at_most_and_a_bound_that_is_reached_none():
    """Rising rows would fill every block's place, and do; falling ones and equal ones add the first block's only."""
    k = 3
    rising = torch.arange(float(V))
    z = torch.stack([rising, -rising, torch.zeros(V), torch.full((V,), -INF)])
    for patience in (k // 2, k):
        found = swept(z, k, patience)
        assert found.counts.tolist() == [6 * k, k, k, k]
        assert [sorted(triton.identities(w[:k]).tolist()) for w in found.words[1:]] == [[0, 1, 2]] * 3
        assert found.capacity == 7 * k
    # With more than a block everything has its place: then it is keeping that raises the bound.
    found = swept(z, 20, 10)
    assert found.counts.tolist() == [V] * 4 and found.capacity == 20 + 6 * BLOCK


def test_kept_are_the_k_best_and_what_they_must_exceed():
    found = swept(adversarial()[[2, 8, 11]], 4, 4)
    before = [sorted(words[:count].tolist()) for words, count in zip(found.words, found.counts, strict=True)]
    assert all(len(words) > 4 for words in before)
    best = returned(found.keep())
    assert [sorted(words) for words in best.tolist()] == [words[-4:] for words in before]
    assert found.counts.tolist() == [4] * 3
    for bound, words in zip(found.bounds.tolist(), before, strict=True):
        assert words[-5] >> 32 <= bound <= words[-4] >> 32


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("k", [2, 30])
def test_from_hidden_states_as_torch_in_many_tiles(k, monkeypatch):
    """Small integers, so that logits are exact and tie; kept sets, a shard, a cap. Ids and values are exactly torch's,
    states to rounding; each tile's candidates take the room of those before.
    """
    hidden, weight, bias = ids(4, 6, high=3).float(), ids(V, 6, seed=1, high=3).float() - 1, ids(V, seed=2).float() / 8
    allowed_tokens = torch.rand(4, V + 5, generator=torch.Generator().manual_seed(3)) < 0.6
    allowed_tokens[3] = False
    inv_temperature, allowed = torch.tensor([0.5, 1.0, 3.0, 1.0]), []
    monkeypatch.setattr(triton, "blocks", lambda *_: Blocks(3, 24))
    monkeypatch.setattr(
        triton.Candidates, "keep", lambda self, keep=triton.Candidates.keep: allowed.append(0) or keep(self)
    )
    rows = Rows(torch.empty(4, 0, dtype=torch.long), inv_temperature, 3.0, allowed_tokens, None)
    arguments = (Problem(hidden, weight, bias, rows, 5), k, 1 << 20)
    state, values, found = at_device(triton.forward)(*arguments)
    wanted_state, wanted_values, wanted = at_device(in_torch.forward)(*arguments)
    assert torch.equal(found, wanted) and torch.equal(values, wanted_values)
    for a, b in zip(state, wanted_state, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)
    assert len(allowed) == 2 * 4, "four tiles for each of two blocks of rows"


def test_states_of_extreme_rows():
    """Gaps of ±90 and more, nothing but −inf, one token that is possible."""
    z = torch.tensor([[90.0, -90.0, 0.0, 89.0], [-INF] * 4, [-INF, 3.0, -INF, -INF], [-1e30, 1e30, 0.0, 1.0]])
    weight = z.T.contiguous()
    # −inf · 0 would be NaN: what is impossible is not kept.
    rows = Rows(torch.empty(4, 0, dtype=torch.long), torch.ones(4), None, z > -INF, None)
    problem = Problem(torch.eye(4), weight.masked_fill(weight == -INF, 0.0), None, rows, 0)
    state, values, found = at_device(triton.forward)(problem, 4, 1 << 20)
    assert torch.equal(found, sorted_ids(z, 4)) and torch.equal(values, z.gather(1, found))
    _, entropy, logsumexp = finalize_row_state(state)
    _, wanted_entropy, wanted = exact(z, torch.zeros(4, dtype=torch.int64))
    torch.testing.assert_close(logsumexp.double(), wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy.double(), wanted_entropy, rtol=1e-6, atol=1e-6)
