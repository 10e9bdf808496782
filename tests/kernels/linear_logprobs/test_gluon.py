"""The Gluon backend's own source in an emulator: every option against float64, pipelines of any length, refusals."""

import importlib
import inspect

import pytest
import torch

from rl_kernels import backends, linear_logprobs
from tests.kernels.cases import INF, OPTIONS, N, V, generator, ids, normal
from tests.kernels.exact import exact
from tests.kernels.gluon_emulator import Emulated, Hazard
from tests.kernels.linear_logprobs import test_backends as shared

pytest.importorskip("triton.experimental.gluon")
backend = importlib.import_module("rl_kernels.linear_logprobs.gluon")
kernels = importlib.import_module("rl_kernels.linear_logprobs.gluon_kernels")
# Without its cache, and without the fixture's leave.
refusal = backends.refusal.__wrapped__


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    kernel = Emulated(kernels.forward_kernel, kernels.gl)
    monkeypatch.setattr(backend, "forward_kernel", kernel)
    monkeypatch.setattr(backends, "refusal", lambda name, device: None)
    # Rows of 24 half-precision numbers begin at multiples of 16 bytes.
    monkeypatch.setattr(shared, "H", 24)
    return kernel


def compared(hidden, weight, tokens, *, workspace=256 << 20, **options):
    got = linear_logprobs(hidden, weight, tokens, workspace=workspace, **options, backend="gluon")
    for a, b in zip(got, exact(hidden.double() @ weight.double().T, tokens, **options), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("option", list(OPTIONS))
def test_values_and_gradients(emulated, option):
    counted = option != "nothing counts"
    shared.assert_equal_to_float64("gluon", OPTIONS[option], targets=3, dtype=torch.bfloat16)
    shared.assert_equal_to_float64("gluon", OPTIONS[option], biased=False, dtype=torch.float16)
    assert emulated.programs == 2 * counted


# Features: one, few, as many, and more steps than the ring has stages. Entries: one tile, several parts, parts of two
# tiles. Each last tile but 256's is not full; 288's kept sets end with a word, and the tile behind it.
@pytest.mark.parametrize("features", [1, 72, 256, 264, 570])
@pytest.mark.parametrize("vocabulary", [1, 256, 288, 530, 2500])
def test_sizes_at_and_beside_the_edges_of_tiles_and_parts(features, vocabulary):
    hidden = normal(129, features, scale=0.3).bfloat16()
    # Rows of the weight begin at multiples of 16 bytes, whatever their length; behind them is what must not be read.
    weight = torch.full((vocabulary, 576), float("nan"), dtype=torch.bfloat16)[:, :features]
    weight.copy_(normal(vocabulary, features, scale=0.3, seed=1))
    tokens = ids(129, 2, high=vocabulary)
    tokens[0] = vocabulary - 1
    compared(hidden, weight, tokens, support=torch.rand(129, vocabulary, generator=generator(3)) < 0.7)


def test_more_blocks_of_rows_than_a_group_in_several_cuts(emulated, monkeypatch):
    monkeypatch.setattr(backend.portable, "GROUP", 2)
    hidden, weight = normal(600, 24, scale=1.0).bfloat16(), normal(520, 24, seed=1).bfloat16()
    tokens, mask = ids(600, high=520), torch.rand(600, generator=generator(5)) < 0.9
    compared(hidden, weight, tokens, mask=mask)
    assert emulated.programs == 5 * 3
    # The workspace holds tens of rows' states and copies.
    compared(hidden, weight, tokens, mask=mask, workspace=20000)
    assert emulated.programs > 10 * 3


def test_hidden_states_of_any_strides_are_copied():
    hidden, weight, bias = shared.model(torch.bfloat16)
    wide = torch.stack([hidden, hidden], -1)[..., 0]
    odd = torch.cat([hidden[:, :1], hidden], 1)[:, 1:]
    strided = torch.stack([bias, bias], -1)[:, 0]
    plain = linear_logprobs(hidden, weight, ids(N), bias=bias, backend="gluon")
    for other in (wide, odd):
        got = linear_logprobs(other, weight, ids(N), bias=strided, backend="gluon")
        assert all(torch.equal(a, b) for a, b in zip(plain, got, strict=True))


def test_impossible_entries_and_rows_and_not_a_number():
    hidden, weight, bias = shared.model(torch.bfloat16)
    bias[:20] = -INF
    tokens, support = ids(N).clamp(min=20), torch.full((N, 2), -1)
    tokens[0], support[1:, 0], support[1:, 1] = 3, tokens[1:], 25
    got = linear_logprobs(hidden, weight, tokens, bias=bias, support=support, backend="gluon")
    logits = (hidden.double() @ weight.double().T + bias.double().nan_to_num(neginf=0.0)).masked_fill(
        bias == -INF, -INF
    )
    for a, b in zip(got, exact(logits, tokens, support=support), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-4)
    assert got.logsumexp[0] == -INF and got.entropy[0] == 0
    hidden[1, 3] = float("nan")
    got = linear_logprobs(hidden, weight, tokens, bias=bias, softcap=3.0, backend="gluon")
    assert all(x[1].isnan() and x[2:].isfinite().all() for x in got)


def test_offsets_beyond_two_to_the_31():
    """The weight's third row begins beyond 2³¹ elements. Its memory is reserved, not touched."""
    stride = 2**30 + 8
    weight = torch.as_strided(torch.empty(2 * stride + 40, dtype=torch.bfloat16), (3, 8), (stride, 1))
    weight.copy_(normal(3, 8))
    compared(normal(N, 8).bfloat16(), weight, ids(N, high=3))


def test_a_row_does_not_depend_on_the_other_rows_and_shards_merge():
    from rl_kernels.row_state import finish, merge_all

    hidden, weight, bias = shared.model(torch.bfloat16)
    inverse, support, tokens = torch.linspace(0.5, 2.0, N), OPTIONS["support"]["support"], ids(N, 3)

    def state(rows, first, last):
        mine = (hidden[rows], weight[first:last], bias[first:last], tokens[rows], inverse[rows], 3.0)
        return backend.forward(*mine, support[rows], None, first, 4096)

    whole = finish(state(slice(None), 0, V))
    for row in range(N):
        alone = finish(state(slice(row, row + 1), 0, V))
        assert all(torch.equal(a[row:][:1], b) for a, b in zip(whole, alone, strict=True))
    shards = finish(merge_all([state(slice(None), a, b) for a, b in ((0, 5), (5, 5), (5, 30), (30, V))]))
    for a, b in zip(shards, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# What the kernel would be with a fault in its pipeline, and what the emulator says of it.
FAULTS = {
    "a buffer refilled under a product": ("step - 1 + STAGES", "step + STAGES", "that is read cannot become landing"),
    "a refill for another step": ("done + STAGES", "done + STAGES + 1", "whose last phase was not waited for"),
    "a phase that never flips": ("step // STAGES & 1", "step // STAGES & 0", "a wait for parity 0 in phase 1"),
    "no wait": ("mbarrier.wait(", "(lambda *a: None)(", "that is landing cannot become read"),
    "logits taken too early": ("warpgroup_mma_wait(0, deps", "warpgroup_mma_wait(1, deps", "that is read cannot"),
    "too few copies": ("STAGES):\n        fill(", "STAGES - 1):\n        fill(", "a phase that never completes"),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_the_emulator_finds_faults(emulated, fault):
    old, new, message = FAULTS[fault]
    source = inspect.getsource(kernels.forward_kernel.fn)
    source = source[source.index("def ") :]
    assert source.count(old) == 1
    names = dict(vars(kernels))
    exec(source.replace(old, new), names)
    emulated.function = names["forward_kernel"]
    hidden, weight = normal(N, 384, scale=0.3).bfloat16(), normal(2100, 384, scale=0.3).bfloat16()
    with pytest.raises(Hazard, match=message):
        linear_logprobs(hidden, weight, ids(N), backend="gluon")


def test_what_it_lacks_is_refused():
    hidden, weight, _ = shared.model(torch.bfloat16)
    narrow = normal(V, 19).bfloat16()
    for h, w, message in (
        (hidden.float(), weight.float(), "no torch.float32 by torch.float32"),
        (hidden, weight.half(), "no torch.bfloat16 by torch.float16"),
        (hidden[:, :19], narrow, r"no weight with strides \(19, 1\)"),
        (hidden, weight.T.contiguous().T, r"no weight with strides \(1, 37\)"),
        (hidden[:, :16], weight[:, 1:17], r"no weight with strides \(24, 1\) at this address"),
        (hidden[:, :0], weight[:, :0], "no product over no features"),
    ):
        with pytest.raises(NotImplementedError, match=f"backend 'gluon' has {message}.*triton, torch"):
            linear_logprobs(h, w, ids(N), backend="gluon")


def test_no_rows_and_no_targets():
    hidden, weight, _ = shared.model(torch.bfloat16)
    out = linear_logprobs(hidden[:0], weight, torch.zeros(0, dtype=torch.long), backend="gluon")
    assert [x.shape for x in out] == [(0,), (0,), (0,)]
    none = torch.zeros(N, 0, dtype=torch.long)
    assert linear_logprobs(hidden, weight, none, backend="gluon").logprobs.shape == (N, 0)


@pytest.mark.parametrize(
    ("capability", "hip", "reason"),
    [((9, 0), None, None), ((8, 0), None, "9.0 only"), ((10, 0), None, "9.0 only"), ((9, 0), "7.0", "9.0 only")],
)
def test_only_hopper_and_only_when_asked_for(monkeypatch, capability, hip, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    found = refusal("gluon", "cuda")
    assert found is None if reason is None else reason in str(found)
    assert "9.0 only" in str(refusal("gluon", "cpu"))
    assert backends.select("linear_logprobs", "cuda", None) == "torch" and not backends.suits("gluon", "cuda")
    installed = backends.find_spec
    monkeypatch.setattr(
        backends, "find_spec", lambda name: None if name == "triton.experimental.gluon" else installed(name)
    )
    assert reason is not None or refusal("gluon", "cuda") == "this Triton has no Gluon (3.6 and 3.9 have)"
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    assert refusal("gluon", "cuda") == "triton is not installed"
