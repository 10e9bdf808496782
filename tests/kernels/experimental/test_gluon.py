"""The three Gluon kernels' own source in an emulator: every option against float64, and pipelines of any length."""

import contextlib

import pytest
import torch

from rl_kernels.common.arguments import Problem, Rows
from tests.kernels.cases import INF, OPTIONS, N, V, generator, ids, normal
from tests.kernels.exact import exact
from tests.kernels.experimental.emulation import backend, emulate
from tests.kernels.experimental.gluon_emulator import PROGRAMS
from tests.kernels.linear_logprobs import inputs
from tests.kernels.operations import linear_logprobs
from tests.kernels.registry import imitates_a_gpu

pytest.importorskip("triton.experimental.gluon")
pytestmark = imitates_a_gpu


@pytest.fixture(params=list(PROGRAMS), autouse=True)
def emulated(monkeypatch, request):
    return emulate(monkeypatch, request.param)


@pytest.fixture
def gathers(emulated):
    """Whether the kernel takes an index of rows."""
    return backend.KERNELS[backend.architecture(None)].gathers


def compared(hidden, weight, tokens, *, workspace=256 << 20, **options):
    got = linear_logprobs(hidden, weight, tokens, workspace=workspace, **options, backend="gluon")
    for a, b in zip(got, exact(hidden.double() @ weight.double().T, tokens, **options), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("option", list(OPTIONS))
def test_values_and_gradients(emulated, option):
    counted = option != "nothing counts"
    inputs.assert_equal_to_float64("gluon", OPTIONS[option], targets=3, dtype=torch.bfloat16)
    inputs.assert_equal_to_float64("gluon", OPTIONS[option], biased=False, dtype=torch.float16)
    assert emulated.programs == 2 * counted


# Hidden sizes: few, as many, and more steps than the ring has stages; of TMA, which takes any, also one and odd ones.
# Vocabularies: one tile, several parts, parts of two and of five tiles. But for 256 the last tile is not full; the kept
# sets of 288 end with a word, and the tile behind it.
SIZES = [(1, 8300), (16, 1), (80, 530), (256, 256), (272, 288), (571, 2500)]


@pytest.mark.parametrize(("hidden_size", "vocabulary"), SIZES)
def test_sizes_at_and_beside_the_edges_of_tiles_and_parts(hidden_size, vocabulary, gathers):
    if gathers:
        hidden_size = -(-hidden_size // 16) * 16
    hidden = normal(129, hidden_size, scale=0.3).bfloat16()
    # Rows of the weight begin at multiples of 32 bytes, whatever their length; behind them is what must not be read.
    weight = torch.full((vocabulary, 592), float("nan"), dtype=torch.bfloat16)[:, :hidden_size]
    weight.copy_(normal(vocabulary, hidden_size, scale=0.3, seed=1))
    tokens = ids(129, 2, high=vocabulary)
    tokens[0] = vocabulary - 1
    compared(hidden, weight, tokens, allowed_tokens=torch.rand(129, vocabulary, generator=generator(3)) < 0.7)


def test_more_blocks_of_rows_than_a_group_in_several_cuts(emulated, monkeypatch):
    monkeypatch.setattr(backend, "GROUP", 2)
    hidden, weight = normal(600, 32, scale=1.0).bfloat16(), normal(520, 32, seed=1).bfloat16()
    tokens, mask = ids(600, high=520), torch.rand(600, generator=generator(5)) < 0.9
    compared(hidden, weight, tokens, mask=mask)
    assert emulated.programs == 5 * 3
    # The workspace holds tens of rows' states and copies.
    compared(hidden, weight, tokens, mask=mask, workspace=20000)
    assert emulated.programs > 10 * 3


def test_hidden_states_of_any_strides_are_copied():
    hidden, weight, bias = inputs.model(torch.bfloat16)
    wide = torch.stack([hidden, hidden], -1)[..., 0]
    odd = torch.cat([hidden[:, :1], hidden], 1)[:, 1:]
    strided = torch.stack([bias, bias], -1)[:, 0]
    plain = linear_logprobs(hidden, weight, ids(N), bias=bias, backend="gluon")
    for other in (wide, odd):
        got = linear_logprobs(other, weight, ids(N), bias=strided, backend="gluon")
        assert all(torch.equal(a, b) for a, b in zip(plain, got, strict=True))


def test_impossible_entries_and_rows_and_not_a_number():
    hidden, weight, bias = inputs.model(torch.bfloat16)
    bias[:20] = -INF
    tokens, allowed_tokens = ids(N).clamp(min=20), torch.full((N, 2), -1)
    tokens[0], allowed_tokens[1:, 0], allowed_tokens[1:, 1] = 3, tokens[1:], 25
    got = linear_logprobs(hidden, weight, tokens, bias=bias, allowed_tokens=allowed_tokens, backend="gluon")
    logits = (hidden.double() @ weight.double().T + bias.double().nan_to_num(neginf=0.0)).masked_fill(
        bias == -INF, -INF
    )
    for a, b in zip(got, exact(logits, tokens, allowed_tokens=allowed_tokens), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-4)
    assert got.logsumexp[0] == -INF and got.entropy[0] == 0
    hidden[1, 3] = float("nan")
    got = linear_logprobs(hidden, weight, tokens, bias=bias, softcap=3.0, backend="gluon")
    assert all(x[1].isnan() and x[2:].isfinite().all() for x in got)


def test_offsets_beyond_two_to_the_31(gathers):
    """The third row begins beyond 2³¹ elements. Its memory is reserved, not touched."""
    stride = 2**30 + 16
    far = torch.as_strided(torch.empty(2 * stride + 40, dtype=torch.bfloat16), (3, 16), (stride, 1))
    far.copy_(normal(3, 16))
    if gathers:
        compared(far, normal(V, 16).bfloat16(), ids(3), mask=torch.tensor([True, False, True]))
    else:
        compared(normal(N, 16).bfloat16(), far, ids(N, high=3))


def test_a_row_does_not_depend_on_the_other_rows_and_shards_merge():
    from rl_kernels.common.row_state import finalize_row_state, merge_all

    hidden, weight, bias = inputs.model(torch.bfloat16)
    inv_temperature, allowed_tokens, tokens = (
        torch.linspace(0.5, 2.0, N),
        OPTIONS["allowed_tokens"]["allowed_tokens"],
        ids(N, 3),
    )

    def state(rows, first, last):
        mine = Rows(tokens, inv_temperature, 3.0, allowed_tokens, None).take(rows)
        return backend.forward(Problem(hidden[rows], weight[first:last], bias[first:last], mine, first), 4096)

    whole = finalize_row_state(state(slice(None), 0, V))
    for row in range(N):
        alone = finalize_row_state(state(slice(row, row + 1), 0, V))
        assert all(torch.equal(a[row:][:1], b) for a, b in zip(whole, alone, strict=True))
    shards = finalize_row_state(merge_all([state(slice(None), a, b) for a, b in ((0, 5), (5, 5), (5, 30), (30, V))]))
    for a, b in zip(shards, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_the_tensors_device_is_current_at_the_launch(emulated, monkeypatch):
    entered, launch = [], type(emulated).__getitem__

    @contextlib.contextmanager
    def device_of(tensor):
        entered.append(tensor.device)
        yield
        entered.pop()

    def guarded(self, grid):
        assert entered, "a kernel launched for cuda:1 while cuda:0 is current reads another device's memory"
        return launch(self, grid)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(type(emulated), "__getitem__", guarded)
    hidden, weight, _ = inputs.model(torch.bfloat16)
    linear_logprobs(hidden, weight, ids(N), backend="gluon")
    assert emulated.programs


def test_no_rows_and_no_targets():
    hidden, weight, _ = inputs.model(torch.bfloat16)
    out = linear_logprobs(hidden[:0], weight, torch.zeros(0, dtype=torch.long), backend="gluon")
    assert [x.shape for x in out] == [(0,), (0,), (0,)]
    none = torch.zeros(N, 0, dtype=torch.long)
    assert linear_logprobs(hidden, weight, none, backend="gluon").logprobs.shape == (N, 0)
